"""The grouped GEMMs of experts: E4M3 times E4M3, summed in FP32, rounded to BF16.

On Hopper by torch's FP8 kernel. It takes a scale for each row of the first operand and for each column of the
second; one number for all of them is a scale per tensor. Elsewhere the codes, which BF16 holds exactly, are
multiplied in BF16, and on a CPU in FP32.
"""

import torch
import torch.nn.functional as F

from coat_kernels.device import capability
from coat_kernels.experts.kernels import repeat_scales

Scaled = tuple[torch.Tensor, torch.Tensor]
"""FP8 codes [n, m] and their scale, FP32 [1], or [n] for a scale of each row."""


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device) == (9, 0)


def _by_codes(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The grouped GEMM without FP8 instructions."""
    dtype = torch.bfloat16 if a.is_cuda else torch.float32
    with torch.autocast(a.device.type, enabled=False):
        return (F.grouped_mm(a.to(dtype), b.to(dtype), offs=offs) * scale).to(torch.bfloat16)


def grouped_matmul(rows: Scaled, weights: Scaled, offs: torch.Tensor, fast: bool) -> torch.Tensor:
    """Rows [n, k], in the order of experts, each times its expert's matrix transposed, of [e, m, k]: [n, m]
    in BF16.

    k has stride 1 in both. The weights have one scale. offs: the end of each expert's rows, int32 [e].
    """
    (a, scale_a), (b, scale_b) = rows, weights
    if not _multiplies_fp8(a.device):
        return _by_codes(a, b.transpose(1, 2), (scale_a * scale_b)[:, None], offs)
    of_each = len(scale_a) > 1
    # scales of each row are used as they are
    of_a, of_b = repeat_scales(scale_a, 0 if of_each else len(a), scale_b, b.shape[0] * b.shape[1])
    return torch._scaled_grouped_mm(
        a,
        b.transpose(1, 2),
        scale_a if of_each else of_a,
        of_b.view(b.shape[:2]),
        offs=offs,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def grouped_wgrad(columns_a: Scaled, columns_b: Scaled, offs: torch.Tensor, fast: bool) -> torch.Tensor:
    """Codes [m, p] times codes [l, p] transposed, summed over the places of each expert: [e, m, l] in BF16.

    Codes are contiguous and have one scale. offs: the end of each expert's places, int32 [e]; each expert
    has a multiple of 16 places, and at least 16.
    """
    (a, scale_a), (b, scale_b) = columns_a, columns_b
    if not _multiplies_fp8(a.device):
        return _by_codes(a, b.t(), scale_a * scale_b, offs)
    of_a, of_b = repeat_scales(scale_a, len(offs) * len(a), scale_b, len(offs) * len(b))
    return torch._scaled_grouped_mm(
        a, b.t(), of_a, of_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
