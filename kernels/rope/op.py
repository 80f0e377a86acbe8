"""Rotary positions as an autograd function.

Backward also computes the maxima of the gradient. If only an FP8 GEMM reads the gradient, backward writes FP8
codes instead.
"""

import functools

import torch

from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.autograd.origin import with_maxima
from coat_kernels.device import uses_kernels
from coat_kernels.rope.kernels import (
    launch_operands,
    rotate_qkv_backward_triton,
    rotate_qkv_triton,
)
from coat_kernels.rope.reference import rotate_qkv_backward_reference, rotate_qkv_reference
from coat_kernels.tensorwise.predicted import PredictedScale, quantize_predicted, write_reference
from coat_kernels.tensorwise.quantize import Quantized


def rotate_qkv_backward_operands(
    dq, dk, dv, cos, sin, scale: PredictedScale, sums: bool, stacked: bool = False
) -> Quantized:
    """Returns the gradient of the projection's output [s * b, width] as row-major and column-major FP8 codes
    only, with its column sums if `sums`."""
    dq, dk, dv = [t if t.stride(3) == 1 else t.contiguous() for t in (dq, dk, dv)]
    s, b, kv_groups, d = dk.shape
    width = (dq.shape[2] + 2 * kv_groups) * d
    if uses_kernels(dq):
        write = functools.partial(launch_operands, dq, dk, dv, cos, sin, stacked=stacked)
    else:
        grad, _ = rotate_qkv_backward_reference(dq, dk, dv, cos, sin, stacked)
        write = functools.partial(write_reference, grad.view(s * b, width), fmt=scale.fmt)
    return quantize_predicted(
        write, scale, (s * b, width), dq.device, columns=True, sums=sums, returns_amax=False
    )[0]


def rotate_qkv_forward(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_groups: int, d: int, stacked: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the kernel for CUDA tensors, else the reference."""
    run = rotate_qkv_triton if uses_kernels(mixed) else rotate_qkv_reference
    return run(mixed, cos, sin, kv_groups, d, stacked)


def rotate_qkv_backward(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the kernel for CUDA tensors, else the reference."""
    backward = rotate_qkv_backward_triton if uses_kernels(dq) else rotate_qkv_backward_reference
    return backward(dq, dk, dv, cos, sin)


class _RotateQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, kv_groups, d):
        ctx.save_for_backward(cos, sin)
        return rotate_qkv_forward(mixed.contiguous(), cos, sin, kv_groups, d)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        grad, maxima = rotate_qkv_backward(dq, dk, dv, *ctx.saved_tensors)
        return with_maxima(grad, maxima), *(None,) * 4


def rotate_qkv(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_groups: int, d: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits the output of a fused projection and rotates its queries and keys.

    mixed: [s, b, kv_groups * (m + 2) * d] in BF16 or FP32; each group holds m queries, a key and a value.
    cos, sin: FP32 [s, d], d even: channel i rotates with channel i + d / 2; or those of
    `no_rotation`: only split. There is no kernel for rotary positions on a part of the channels: split
    and rotate with torch operations.

    Returns q [s, b, kv_groups * m, d], k and v [s, b, kv_groups, d]. Backward saves cos and sin. Raises
    ValueError for shapes that do not match.
    """
    s, b, width = mixed.shape
    r = cos.shape[-1]
    if cos.shape != sin.shape or cos.ndim != 2 or (r and cos.shape != (s, d)) or d % 2:
        raise ValueError(
            f"rotate_qkv: expected cosines and sines of shape [{s}, {d}], of an even number of channels, or "
            f"[any, 0]; found {list(cos.shape)} and {list(sin.shape)}"
        )
    if width % (kv_groups * d) or width < 3 * kv_groups * d:
        raise ValueError(
            f"rotate_qkv: expected a multiple of {kv_groups} groups x {d} channels, at least three times "
            f"that; found {width} columns"
        )
    return _RotateQKV.apply(mixed, cos, sin, kv_groups, d)
