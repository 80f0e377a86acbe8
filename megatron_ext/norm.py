"""RMSNorm for Megatron's norm slots that keeps its input in FP8 and its output not at all."""

import torch

from coat_kernels.norm import rms_norm

from .settings import activations_of


class CoatNorm(torch.nn.Module):
    """RMSNorm over `hidden_size`; `config.layernorm_zero_centered_gamma` means a weight of w + 1.

    Raises ValueError at construction for a normalization other than RMSNorm.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"CoatNorm: normalization is {config.normalization!r}, only RMSNorm is supported so far. "
                "Use --normalization RMSNorm, or megatron_ext.layer_specs sdpa_layer_spec for BF16 layers."
            )
        self.eps = eps
        self.group_size = activations_of(config).group_size
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype, device=device))
        # each rank sees its own part of the sequence: Megatron then sums this gradient over the ranks
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size], BF16 or FP32 -> the same shape and dtype, carrying its origin."""
        return rms_norm(
            x, self.weight, self.eps, zero_centered=self.zero_centered, group_size=self.group_size
        )

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, zero_centered={self.zero_centered}"
