"""FP8 GEMMs in plain PyTorch."""

import torch


def scaled_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`a` [m, k] times `b` [n, k] transposed, both FP8, accumulated in FP32, rounded once to `dtype`."""
    with torch.autocast(a.device.type, enabled=False):
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(dtype)


def accumulate_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> None:
    """Adds `a` [n, t] times `b` [k, t] transposed, both FP8, to `out` [n, k], FP32."""
    out.add_(scaled_matmul_reference(a, b, scale_a, scale_b, torch.float32))
