"""Megatron's feed-forward layer. It saves the input of its activation in 8 bits, and not the output."""

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from coat_ds.config import ActivationsConfig
from coat_ds.layers.conversion import describe_saved
from coat_ds.layers.inventory import Part
from coat_ds.layers.modules.hooks import forget_if_pre_hooked
from coat_kernels.activation import ActivationOptions, activation
from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear, add_bias_in_gemm
from megatron_ext.layers.settings import Configurable


def kernel_kind(config) -> str | None:
    """The activation's name in `coat_kernels.activation`; None where there is no kernel. Experts' kernels
    also clamp gate and up, and add an offset to up."""
    if config.activation_func is F.gelu:
        # Megatron's fused GELU is the tanh approximation, torch's own is exact
        return "gelu_tanh" if config.bias_activation_fusion else "gelu"
    kinds = ((F.silu, "silu"), (squared_relu, "squared_relu"), (quick_gelu, "quick_gelu"))
    return next((kind for function, kind in kinds if config.activation_func is function), None)


def _kind_of(config) -> str:
    """As `kernel_kind`. Raises ValueError where there is no kernel."""
    kind = kernel_kind(config)
    if kind is None or config.activation_func_clamp_value is not None or config.glu_linear_offset:
        raise ValueError(
            "CoatMLP: expected SiLU, GELU or squared ReLU, without activation_func_clamp_value and "
            f"glu_linear_offset, found {config.activation_func!r}, {config.activation_func_clamp_value} and "
            f'{config.glu_linear_offset}. Use --swiglu, --squared-relu or neither, or "activations": false '
            "for Megatron's own layers."
        )
    return kind


def fp8_linears() -> MLPSubmodules:
    """The linear layers of a feed-forward layer."""
    return MLPSubmodules(linear_fc1=CoatColumnParallelLinear, linear_fc2=CoatRowParallelLinear)


class CoatMLP(Configurable, MLP):
    """Megatron's MLP with FP8 linears; parameter names and checkpoints stay Megatron's.

    Fits a layer's `mlp` slot. Raises ValueError at construction for an activation without a kernel.
    """

    def __init__(
        self,
        config,
        submodules: MLPSubmodules | None = None,
        is_expert: bool = False,
        ffn_hidden_size: int | None = None,
        pg_collection=None,
        tp_group=None,
        **_,
    ):
        super().__init__(
            config=config,
            submodules=submodules or fp8_linears(),
            is_expert=is_expert,
            ffn_hidden_size=ffn_hidden_size or config.ffn_hidden_size,
            tp_group=pg_collection.tp if tp_group is None and pg_collection is not None else tp_group,
        )
        self._complete()

    @classmethod
    def take_over(cls, mlp: MLP) -> None:
        """Turns Megatron's MLP into a CoatMLP, where Megatron hard-codes the class."""
        mlp.__class__ = cls
        mlp._complete()

    def _complete(self) -> None:
        self._kind = _kind_of(self.config)
        # Megatron passes fc1's bias to the activation; here the GEMM adds it
        self.linear_fc1.skip_bias_add = False
        add_bias_in_gemm(self.linear_fc2)
        self.apply_activations(ActivationsConfig())

    def coat_part(self) -> Part:
        return Part("feed_forward", describe_saved(self.activations))

    def apply_activations(self, activations: ActivationsConfig) -> None:
        super().apply_activations(activations)
        self.options = ActivationOptions(self._kind, self.config.gated_linear_unit, activations.saved_format)

    def forward(self, hidden_states, per_token_scale=None, **_) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s, b, h] -> [s, b, h] and the bias that is still to be added, [h] or None. For an
        expert: [tokens, h] and the router's weights [tokens] -> the weighted output, and None.
        """
        forget_if_pre_hooked(self, hidden_states)
        intermediate, _ = self.linear_fc1(hidden_states)
        if intermediate.numel():
            activated = activation(intermediate, self.options)
        else:
            # an expert without tokens: its weights still get gradients, of zeros
            activated = intermediate[..., : self.linear_fc2.weight.shape[1]]
        output, bias = self.linear_fc2(activated)
        if per_token_scale is None:
            return output, bias
        # Scaling fc2's output by the router weight equals scaling its input (fc2 is linear) and keeps that
        # input recomputable.
        if bias is not None:
            output = output + bias
        return (output * per_token_scale.unsqueeze(-1)).to(output.dtype), None
