"""FP8 GEMMs in plain PyTorch."""

import torch


def scaled_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`a` [m, k] times `b` [n, k] transposed, both FP8, accumulated in FP32, rounded once to `dtype`.

    One of the two may be padded along k; its extra elements are zero.
    """
    k = min(a.shape[1], b.shape[1])
    with torch.autocast(a.device.type, enabled=False):
        return ((a[:, :k].float() @ b[:, :k].float().t()) * (scale_a * scale_b)).to(dtype)


def accumulate_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> None:
    """Adds `a` [n, t] times `b` [k, t] transposed, both FP8, to `out` [n, k], FP32."""
    out.add_(scaled_matmul_reference(a, b, scale_a, scale_b, torch.float32))
