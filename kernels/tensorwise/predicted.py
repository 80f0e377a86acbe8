"""Quantizing with a predicted scale.

Scales are just in time, so they are unknown while the producer runs. The producer quantizes with the last
scale of the same tensor of the same module, and finds the amax meanwhile. A second launch reads that amax. If
the scale was right, the programs of the second launch return at once; else they write the codes again. So the
prediction changes time, never a code. Scales differ by a factor of at least two and seldom change. An
existing tensor, such as a weight, is quantized in the same way, with one read.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from coat_kernels.fp8 import Fp8Format
from coat_kernels.parallel import all_reduce_amax
from coat_kernels.tensorwise.quantize import Quantized, empty_operands, to_tensor_codes_reference
from coat_kernels.tensorwise.scale import (
    Scales,
    amax_of_maxima,
    amax_of_maxima_reference,
    maxima_reference,
    tensor_scale_reference,
)
from coat_kernels.tensorwise.transpose import transpose_codes_reference


class PredictedScale:
    """The last scale of one tensor of a module, with which the tensor is quantized in `fmt`.

    It belongs to the module. Copies and checkpoints of the module do not contain it. All calls that share it
    must run in one stream.
    """

    def __init__(self, fmt: Fp8Format):
        self.fmt = fmt
        self._scales: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """The scale, FP32 [1], always at the same address, which CUDA graphs require."""
        try:
            return self._scales[device]
        except KeyError:
            # training writes to it later, and could not write to an inference tensor
            with torch.inference_mode(False):
                scale = self._scales[device] = torch.ones(1, dtype=torch.float32, device=device)
            return scale

    def __reduce__(self):
        return type(self), (self.fmt,)


def write_reference(x: torch.Tensor, out: Quantized, scales: Scales, fmt: Fp8Format) -> torch.Tensor | None:
    """The work of a producer of `x` [m, n] in each launch. The first launch returns maxima and writes column
    sums."""
    if not scales.corrects:
        scales.used.copy_(scales.predicted)
        if out.sums is not None:
            torch.sum(x, 0, dtype=torch.float32, out=out.sums)
    else:
        amax = amax_of_maxima_reference(scales.maxima)
        if scales.amax is not None:
            scales.amax.copy_(amax)
        scales.true.copy_(tensor_scale_reference(amax, fmt))
        scales.predicted.copy_(scales.true)
        if scales.used.equal(scales.true):
            return None
    codes = to_tensor_codes_reference(x, scales.predicted, fmt)
    if out.rows is not None:
        out.rows.copy_(codes)
    if out.columns is not None:
        out.columns.copy_(transpose_codes_reference(codes))
    return None if scales.corrects else maxima_reference(x)


def quantize_predicted(
    write: Callable[[Quantized, Scales], torch.Tensor | None],
    prediction: PredictedScale,
    shape: tuple[int, int],
    device: torch.device,
    *,
    rows: bool = True,
    columns: bool = False,
    sums: bool = False,
    into: tuple[Quantized, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    returns_amax: bool = True,
) -> tuple[Quantized, torch.Tensor | None]:
    """FP8 operands of a tensor of this `shape`, and, if requested, its amax over the ranks of `group`.

    write: launches the producer of the tensor, `write(operands, scales)`. It is called twice, for the first
        launch of `Scales`, which returns maxima, and for the second.
    into: earlier operands and their amax, whose memory is written; new memory by default.
    """
    predicted = prediction.on(device)
    out, amax = into or (empty_operands(*shape, prediction.fmt, device, rows, columns, sums), None)
    if amax is None and returns_amax:
        amax = torch.empty_like(out.scale)
    used = torch.empty_like(out.scale)
    maxima = write(out, Scales(predicted, used))
    if group is not None:
        maxima = all_reduce_amax(amax_of_maxima(maxima), group)
    write(out, Scales(predicted, used, maxima, maxima.numel(), amax, out.scale))
    return out, amax
