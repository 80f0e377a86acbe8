"""One AdamW step for lists of tensors."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import triton.language as tl

from coat_kernels.adamw import chunks
from coat_kernels.adamw.chunks import arrived, corrections_of, launches
from coat_kernels.adamw.kernel import ROWS, WARPS, adamw_kernel
from coat_kernels.adamw.options import AdamWOptions
from coat_kernels.adamw.reference import adamw_reference
from coat_kernels.codecs.codec import GROUP_SIZE, Storage
from coat_kernels.device import uses_kernels
from coat_kernels.prepared import FUSED

# elements per piece of PyTorch's step, whole groups; a piece's dozen temporaries fit into the cache
PIECE = 2**16
TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}


def constants_of(options: AdamWOptions) -> dict[str, object]:
    """The kernel's constants that are equal in all launches of a step, except `EXACT`."""
    m, v = options.exp_avg_codec, options.exp_avg_sq_codec
    return {
        "M_CODES": TRITON_DTYPES[m.dtype],
        "M_FROM": m.tiles.from_codes,
        "M_STATISTICS": m.tiles.statistics,
        "M_TO": m.tiles.to_codes,
        "M_SCALE": m.has_scale,
        "M_EXPONENT": m.has_exponent,
        "V_CODES": TRITON_DTYPES[v.dtype],
        "V_FROM": v.tiles.from_codes,
        "V_STATISTICS": v.tiles.statistics,
        "V_TO": v.tiles.to_codes,
        "V_SCALE": v.has_scale,
        "V_EXPONENT": v.has_exponent,
        "RELATIVE": m.relative,
        "M_RATIO": m.ratio_tile,
        "V_ROOTS": v.roots and v.roots.tile,
        "V_LOG_ROOTS": v.roots and v.roots.log2_tile,
        "STOCHASTIC": options.stochastic,
        "DITHER": options.dither,
        "MAXIMIZE": options.maximize,
        "ROWS": ROWS,
        "G": GROUP_SIZE,
    }


def adamw_triton(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[Storage],
    exp_avg_sqs: Sequence[Storage],
    steps: Sequence[float] | torch.Tensor,
    options: AdamWOptions,
    remainders: Sequence[torch.Tensor] | None = None,
    *,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """`adamw_` on CUDA, or in the interpreter.

    At most five launches for any number of tensors: one for each chunk size, and one for the last tile of
    each tensor. Only the last one uses masks.
    """
    device, lr = params[0].device, options.lr
    lists = zip(params, grads, exp_avgs, exp_avg_sqs, remainders or params, strict=True)
    tensors = [(p, g, *m, *v, r) for p, g, m, v, r in lists]
    pointers = np.array([[t.data_ptr() for t in row] for row in tensors], dtype=np.int64)
    element_bytes = tuple(t.element_size() for t in tensors[0])
    numels = tuple(p.numel() for p in params)
    corrections = corrections_of(steps, options, device)
    uploaded = launches(pointers.tobytes(), element_bytes, numels, device)
    constants = constants_of(options) | {"EXACT": bool(remainders)}
    constants |= {"PARAM": TRITON_DTYPES[params[0].dtype], "GRAD": TRITON_DTYPES[grads[0].dtype]}
    # views into flat buffers may start anywhere
    constants["ALIGNED"] = not (pointers[:, (0, 1, 2, 5, 8)] % 16).any()
    for table, tiles in arrived(*uploaded, device):
        with torch.cuda.device_of(params[0]):
            adamw_kernel[(len(table) * tiles,)](
                table,
                corrections,
                lr if isinstance(lr, torch.Tensor) else None,
                grad_scale,
                found_inf,
                tiles.bit_length() - 1,
                options.seed,
                lr=0.0 if isinstance(lr, torch.Tensor) else lr,
                weight_decay=options.weight_decay,
                rate1=1 - options.beta1,
                rate2=1 - options.beta2,
                # subnormal roots count as zero, and zero moments must not divide by zero
                eps=max(options.eps, 2.0**-120),
                MASKED=tiles == 1,
                WHOLE=tiles not in (chunks.CHUNKS[-1], 1),
                num_warps=WARPS,
                **constants,
                **FUSED,
            )


@torch.no_grad()
def adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[Storage],
    exp_avg_sqs: Sequence[Storage],
    steps: Sequence[float] | torch.Tensor,
    options: AdamWOptions,
    remainders: Sequence[torch.Tensor] | None = None,
    *,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One AdamW step in place for every tensor of the lists.

    Args:
        params: FP32 or BF16, contiguous, of one type and one device.
        grads: FP32, BF16 or FP16, contiguous, of one type.
        steps: the step count of each tensor, from 1, as numbers or as one FP32 tensor on the device.
        remainders: int16, for BF16 parameters: 16 bits that complete each parameter to an exact FP32 master.
        grad_scale: FP32 [1] on the device; gradients are multiplied by it.
        found_inf: FP32 [1] on the device; unless it is zero, nothing changes.

    CUDA tensors use the kernel and never synchronize with the device. Other tensors use the reference, in
    pieces.
    """
    if params and uses_kernels(params[0], fp8=False):
        lists = (params, grads, exp_avgs, exp_avg_sqs, steps, options, remainders)
        adamw_triton(*lists, grad_scale=grad_scale, found_inf=found_inf)
        return
    if found_inf is not None and found_inf.item():
        return
    options = replace(options, lr=float(options.lr))
    lists = params, grads, exp_avgs, exp_avg_sqs, steps, remainders or [None] * len(params)
    for param, grad, m, v, step, remainder in zip(*lists, strict=True):
        _in_pieces(param, grad, m, v, float(step), options, remainder, grad_scale)


def _in_pieces(param, grad, m, v, step, options: AdamWOptions, remainder, grad_scale) -> None:
    """`adamw_reference` on one piece of the tensor after another: the temporaries of a piece fit into the
    cache."""

    def cut(x, a, b):
        return None if x is None else x.view(-1)[a:b]

    for a in range(0, param.numel(), PIECE):
        b = a + PIECE
        adamw_reference(
            cut(param, a, b),
            cut(grad, a, b),
            *(s.groups(a // GROUP_SIZE, b // GROUP_SIZE) for s in (m, v)),
            step,
            options,
            cut(remainder, a, b),
            grad_scale=grad_scale,
        )
