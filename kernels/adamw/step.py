"""One AdamW step for lists of tensors."""

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl

from coat_kernels.adamw.chunks import CHUNKS, corrections_of, launches
from coat_kernels.adamw.cpu import adamw_compiled, compiled_can, compiled_step
from coat_kernels.adamw.kernel import ROWS, WARPS, adamw_kernel
from coat_kernels.adamw.reference import adamw_reference
from coat_kernels.codecs.codec import Codec, Storage

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}


def adamw_triton(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[Storage],
    exp_avg_sqs: Sequence[Storage],
    steps: Sequence[float] | torch.Tensor,
    remainders: Sequence[torch.Tensor] | None = None,
    weights: Sequence[torch.Tensor] | None = None,
    *,
    exp_avg_codec: Codec,
    exp_avg_sq_codec: Codec,
    group_size: int,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    stochastic: bool = False,
    dither: bool = False,
    seed: int = 0,
) -> None:
    """`adamw_` on CUDA, or in the interpreter.

    At most five launches, however many tensors there are: one for each size of chunks, and one, the only one
    with masks, for the last tile of each tensor.
    """
    device = params[0].device
    extra = remainders or weights or params
    tensors = [
        (p, g, *m, *v, e) for p, g, m, v, e in zip(params, grads, exp_avgs, exp_avg_sqs, extra, strict=True)
    ]
    pointers = np.array([[t.data_ptr() for t in row] for row in tensors], dtype=np.int64)
    element_bytes = tuple(t.element_size() for t in tensors[0])
    numels = tuple(p.numel() for p in params)
    corrections = corrections_of(steps, beta1, beta2, device)
    tables, uploaded = launches(pointers.tobytes(), element_bytes, numels, group_size, device)
    if uploaded is not None and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        # another stream may have asked for them first, and may give them up first
        stream.wait_event(uploaded)
        for table, _ in tables:
            table.record_stream(stream)
    for table, tiles in tables:
        with torch.cuda.device_of(params[0]):
            adamw_kernel[(len(table) * tiles,)](
                table,
                corrections,
                lr if isinstance(lr, torch.Tensor) else None,
                grad_scale,
                found_inf,
                tiles.bit_length() - 1,
                seed,
                lr=0.0 if isinstance(lr, torch.Tensor) else lr,
                weight_decay=weight_decay,
                rate1=1 - beta1,
                rate2=1 - beta2,
                # subnormal roots count as zero, and zero moments must not divide by zero
                eps=max(eps, 2.0**-120),
                PARAM=TRITON_DTYPES[params[0].dtype],
                GRAD=TRITON_DTYPES[grads[0].dtype],
                M_CODES=TRITON_DTYPES[exp_avg_codec.dtype],
                V_CODES=TRITON_DTYPES[exp_avg_sq_codec.dtype],
                M_FROM=exp_avg_codec.from_codes_tile,
                M_STATISTICS=exp_avg_codec.statistics_tile,
                M_TO=exp_avg_codec.to_codes_tile,
                M_SCALE=exp_avg_codec.has_scale,
                M_EXPONENT=exp_avg_codec.has_exponent,
                M_E5M2=exp_avg_codec.is_e5m2,
                V_FROM=exp_avg_sq_codec.from_codes_tile,
                V_STATISTICS=exp_avg_sq_codec.statistics_tile,
                V_TO=exp_avg_sq_codec.to_codes_tile,
                V_SCALE=exp_avg_sq_codec.has_scale,
                V_EXPONENT=exp_avg_sq_codec.has_exponent,
                V_E5M2=exp_avg_sq_codec.is_e5m2,
                V_ROOTS=exp_avg_sq_codec.roots_tile,
                V_LOG_ROOTS=exp_avg_sq_codec.log_roots_tile,
                M_RATIO=exp_avg_codec.ratio_tile,
                RELATIVE=exp_avg_codec.relative,
                EXTRA="remainder" if remainders else "weight" if weights else "none",
                STOCHASTIC=stochastic,
                DITHER=dither,
                MAXIMIZE=maximize,
                # views into flat buffers may start anywhere
                ALIGNED=not (pointers[:, (0, 1, 2, 5, 8)] % 16).any(),
                MASKED=tiles == 1,
                WHOLE=tiles not in (CHUNKS[-1], 1),
                ROWS=ROWS,
                G=group_size,
                num_warps=WARPS,
            )


@torch.no_grad()
def adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[Storage],
    exp_avg_sqs: Sequence[Storage],
    steps: Sequence[float] | torch.Tensor,
    remainders: Sequence[torch.Tensor] | None = None,
    weights: Sequence[torch.Tensor] | None = None,
    *,
    found_inf: torch.Tensor | None = None,
    compiled: bool = False,
    **options,
) -> None:
    """One AdamW step in place for every tensor of the lists.

    Args:
        params: FP32 or BF16, contiguous, of one type and one device.
        grads: FP32, BF16 or FP16, contiguous, of one type.
        steps: counts from 1, of each tensor, as numbers or as one FP32 tensor on the device.
        remainders: int16, for BF16 parameters: the 16 bits that make each of them an exact FP32 master.
        weights: BF16, for FP32 parameters: copies to be written too.
        lr: a number, or an FP32 tensor of one element on the device.
        grad_scale: FP32 tensor of one element on the device, by which gradients are multiplied.
        found_inf: the same; unless it holds zero, nothing is changed.
        stochastic: rounds BF16 parameters without remainders stochastically.
        dither: rounds exp_avg_sq up or down in turn, `dither_reference`.
        seed: of stochastic rounding, 31 bits; every step, tensor and element has its own noise.
        compiled: on the CPU, step in C++ where it can (`adamw_cpu`), equal but for FP32 rounding.
        options: codecs, group size and hyper-parameters, as `adamw_reference` has them.

    CUDA tensors take the kernel and never wait for the device, others the reference, in pieces.
    """
    if params and params[0].is_cuda:
        adamw_triton(
            params, grads, exp_avgs, exp_avg_sqs, steps, remainders, weights, found_inf=found_inf, **options
        )
        return
    if found_inf is not None and found_inf.item():
        return
    options["lr"] = float(options["lr"])
    nothing = [None] * len(params)
    lists = (params, grads, exp_avgs, exp_avg_sqs, steps, remainders or nothing, weights or nothing)
    function = compiled_step() if compiled else None
    for i, (param, grad, m, v, step, remainder, weight) in enumerate(zip(*lists, strict=True)):
        plain = remainder is None and weight is None
        if function is not None and plain and compiled_can(param, grad, **options):
            adamw_compiled(function, param, grad, m, v, float(step), **options)
        else:
            _in_pieces(param, grad, m, v, float(step), remainder, weight, tensor=i, **options)


def _in_pieces(param, grad, m, v, step, remainder, weight, *, group_size, seed=0, **options) -> None:
    """`adamw_reference` on one piece of the tensor after another: its temporaries stay in the cache."""

    def cut(x, a, b):
        return None if x is None else x.view(-1)[a:b]

    for a in range(0, param.numel(), PIECE):
        b = a + PIECE
        adamw_reference(
            cut(param, a, b),
            cut(grad, a, b),
            *(s.groups(a // group_size, -(-b // group_size), group_size) for s in (m, v)),
            step,
            cut(remainder, a, b),
            cut(weight, a, b),
            group_size=group_size,
            # the noise of an element is of its place in the tensor
            seed=seed + a,
            **options,
        )


# elements of a piece of PyTorch's step, whose dozen temporaries stay in the cache
PIECE = 2**16
