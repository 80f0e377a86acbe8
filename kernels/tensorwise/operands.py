"""The FP8 operands of a GEMM, from a tensor in BF16 or FP32."""

import functools

import torch
import torch.distributed as dist

from coat_kernels.autograd.origin import maxima_of
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import Fp8Format
from coat_kernels.parallel import all_reduce_amax
from coat_kernels.tensorwise.predicted import PredictedScale, quantize_predicted
from coat_kernels.tensorwise.quantize import (
    Quantized,
    launch_quantize,
    quantize_tensor,
    quantize_tensor_triton,
)
from coat_kernels.tensorwise.scale import tensor_amax

# with at most this many maxima, each program of a launch over all tiles reads all of them
FEW_MAXIMA = 1024


def fp8_operands(
    x: torch.Tensor,
    fmt: Fp8Format,
    rows: bool = True,
    columns: bool = False,
    group: dist.ProcessGroup | None = None,
    sums: bool = False,
    predicted: PredictedScale | None = None,
) -> tuple[Quantized, torch.Tensor]:
    """Quantizes `x` [..., n], as [m, n], row-major, column-major or both.

    The column sums of `sums` are over this rank's rows. If no maxima are noted on `x`, the kernels quantize
    with the scale in `predicted`, if it is a scale of `fmt`.

    Returns the operands, and the amax of `x` over the ranks of `group`, FP32 [1].
    """
    n = x.shape[-1]
    maxima, plain = maxima_of(x), x.reshape(-1, n).contiguous()
    if uses_kernels(x) and not torch.compiler.is_compiling():
        if maxima is None and predicted is not None and predicted.fmt.dtype is fmt.dtype:
            write = functools.partial(launch_quantize, plain)
            how = {"rows": rows, "columns": columns, "sums": sums, "group": group}
            return quantize_predicted(write, predicted, plain.shape, x.device, **how)
        if maxima is not None and maxima.numel() <= FEW_MAXIMA and group is None:
            amax = torch.empty(1, dtype=torch.float32, device=x.device)
            return quantize_tensor_triton(plain, maxima, fmt, rows, columns, sums, amax), amax
    amax = tensor_amax(x)
    if group is not None:
        all_reduce_amax(amax, group)
    return quantize_tensor(plain, amax, fmt, rows, columns, sums), amax
