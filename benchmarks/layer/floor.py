"""The least that a decoder layer takes: its GEMMs, its attention and its traffic, each at full speed."""

import functools

import torch
from torch.nn.attention import SDPBackend

from benchmarks.common.attention import attention_ms
from benchmarks.common.environment import device
from benchmarks.common.shapes import LayerShape
from benchmarks.common.timing import copy_bandwidth, measure
from coat_ds.plan import layer_flops

# bytes of an element kept in FP8 with a scale for each group of 16
FP8_GROUPED = 1 + 1 / 16
# of a GEMM; on a CPU GEMMs are slow, and their times are not used
WARMUP, REPEATS = (2, 10) if torch.cuda.is_available() else (0, 1)


def gemm_ms(shape: LayerShape) -> float:
    """The twelve FP8 GEMMs of the four linear layers, one scale per tensor, fast accumulation."""
    fp8 = functools.partial(torch.Tensor.to, dtype=torch.float8_e4m3fn)
    one = torch.ones((), device=device())
    linears = ((shape.hidden, shape.qkv), (shape.hidden, shape.hidden))
    linears += ((shape.hidden, shape.fc1), (shape.ffn, shape.hidden))
    total = 0.0
    for k, n in linears:
        # y = x W^T, dx = dy W, dW = dy^T x, as rows times rows
        for sizes in ((shape.tokens, n, k), (shape.tokens, k, n), (n, k, shape.tokens)):
            a, b = (
                fp8(torch.randn(rows, sizes[2], device=device(), dtype=torch.bfloat16)) for rows in sizes[:2]
            )
            multiply = functools.partial(
                torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            total += measure(multiply, WARMUP, REPEATS).median
    return total


def traffic(shape: LayerShape) -> float:
    """Bytes that must be moved outside of GEMMs and attention, with weights quantized already.

    Per token, with BF16 activations (2 bytes), FP8 operands (1) and FP8 kept in groups of 16 (17/16). A
    scale is known before its tensor is written, rotary positions are part of attention, biases of GEMMs.
    """
    h, f, fc1, kept = shape.hidden, shape.ffn, shape.fc1, FP8_GROUPED
    forward = (
        # norm: input; operand and what is kept
        2 * h + (1 + kept) * h
        # attention's output to an operand
        + 2 * h + h
        # residual and norm: both terms; sum, operand and what is kept
        + 4 * h + (2 + 1 + kept) * h
        # activation: input; operand and what is kept
        + 2 * fc1 + f + kept * fc1
        # residual
        + 4 * h + 2 * h
    )  # fmt: skip
    backward = (
        # the gradient to operands of two GEMMs
        2 * h + 2 * h
        # activation: gradient and what was kept; operands of two GEMMs, rebuilt operand of the third
        + 2 * f + kept * fc1 + 2 * fc1 + f
        # norm: gradient, what was kept, the residual's gradient; sum as BF16 and operands, rebuilt operand
        + (2 + kept + 2) * h + (2 + 2) * h + h
        # attention's output to an operand
        + 2 * h + h
        # gradient of q, k, v to operands
        + 2 * shape.qkv + 2 * shape.qkv
        # norm
        + (2 + kept + 2) * h + 2 * h + h
    )  # fmt: skip
    return shape.tokens * (forward + backward)


def flops(shape: LayerShape) -> float:
    """FLOPs of the layer's own GEMMs, forward and backward; attention's over the causal half."""
    return layer_flops(shape.sizes(), shape.batch, shape.sequence)


def floor_of(shape: LayerShape, backend: SDPBackend) -> dict[str, float]:
    """Milliseconds of each part."""
    copied = 2**30 if torch.cuda.is_available() else 2**20
    return {
        "gemm_ms": gemm_ms(shape),
        "attention_ms": attention_ms(shape, backend),
        "traffic_ms": traffic(shape) / copy_bandwidth(copied),
    }
