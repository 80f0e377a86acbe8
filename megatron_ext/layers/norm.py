"""RMSNorm and LayerNorm for Megatron's norm slots, which save their input in 8 bits and do not save their
output, and the residual additions before and after them."""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

from coat_ds.config import ActivationsConfig
from coat_ds.layers.conversion import describe_saved
from coat_ds.layers.inventory import Part
from coat_ds.layers.modules.hooks import forget_if_hooked
from coat_kernels.autograd.origin import take_passthrough, with_passthrough
from coat_kernels.head_norm import head_norm
from coat_kernels.norm import NormOptions, normalize
from megatron_ext.layers.settings import Configurable


class CoatNorm(Configurable, torch.nn.Module):
    """RMSNorm or LayerNorm over `hidden_size`, by `config.normalization`;
    `config.layernorm_zero_centered_gamma` means a weight of w + 1."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        settings = {"dtype": config.params_dtype, "device": device}
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, **settings))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **settings))
        for parameter in self.parameters():
            # each rank processes its own part of the sequence: Megatron then sums this gradient over the
            # ranks
            parameter.sequence_parallel = config.sequence_parallel
        self.apply_activations(ActivationsConfig())

    def apply_activations(self, activations: ActivationsConfig) -> None:
        super().apply_activations(activations)
        layer_norm, saved = self.bias is not None, activations.saved_format
        self.options = NormOptions(self.eps, layer_norm, self.zero_centered, saved)

    def coat_part(self) -> Part:
        return Part("norm", describe_saved(self.activations))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size], BF16 or FP32 -> the same shape and dtype, carrying its origin."""
        adds = torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling()
        y = normalize(x, self.weight, self.bias, self.options, residual=adds)
        if adds:
            # Megatron adds x to the branch after this norm. It reads x through this node, so that both
            # gradients of x are added in the norm's backward, without another pass.
            y, passthrough = y
            with_passthrough(x, passthrough, y)
        forget_if_hooked(self, y)
        return y

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, zero_centered={self.zero_centered}"


class CoatHeadNorm(CoatNorm):
    """RMSNorm over the channels of every head of queries or of keys (`--qk-layernorm`)."""

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [s, b, heads, hidden_size], BF16 or FP32 -> the same, and rotated by `cos` and `sin` if given
        (see `coat_kernels.head_norm`)."""
        if cos is None:
            return normalize(x, self.weight, None, self.options)
        return head_norm(x, self.weight, cos, sin, self.options)


def coat_bias_dropout_add(training: bool, fused: bool):
    """Megatron's bias-dropout-add, which reads the residual through the norm at the start of the branch."""
    stock = get_bias_dropout_add(training, fused)

    def bias_dropout_add(x_with_bias, residual, prob):
        return stock(x_with_bias, take_passthrough(residual), prob)

    return bias_dropout_add
