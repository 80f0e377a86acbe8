"""Megatron's gated feed-forward layer keeping gate and up in FP8 and the product not at all."""

import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from coat_kernels.swiglu import swiglu

from .linear import CoatColumnParallelLinear, CoatRowParallelLinear
from .settings import activations_of


def _require_swiglu(config) -> None:
    wrong = {
        "gated_linear_unit is False (use --swiglu)": not config.gated_linear_unit,
        "activation_func is not SiLU (use --swiglu)": config.activation_func is not F.silu,
        "add_bias_linear is True (use --disable-bias-linear)": config.add_bias_linear,
        "activation_func_clamp_value is set (leave it unset)": config.activation_func_clamp_value is not None,
        "glu_linear_offset is not 0 (leave it unset)": config.glu_linear_offset != 0,
        "use_te_activation_func is True (remove --use-te-activation-func)": config.use_te_activation_func,
        "activation_func_fp8_input_store is True (remove --activation-func-fp8-input-store: gate and up are "
        "kept in FP8 anyway)": config.activation_func_fp8_input_store,
    }
    for reason, found in wrong.items():
        if found:
            raise ValueError(f"CoatMLP: only SwiGLU without biases is supported so far, and {reason}.")


class CoatMLP(MLP):
    """Megatron's MLP with SwiGLU and FP8 linears; parameter names and checkpoints stay Megatron's.

    Can stand in a layer's `mlp` slot as it is. Raises ValueError at construction for another activation,
    for biases, and for experts.
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
        _require_swiglu(config)
        if is_expert:
            raise ValueError("CoatMLP: experts are not supported yet; remove --num-experts")
        super().__init__(
            config=config,
            submodules=submodules
            or MLPSubmodules(linear_fc1=CoatColumnParallelLinear, linear_fc2=CoatRowParallelLinear),
            ffn_hidden_size=ffn_hidden_size or config.ffn_hidden_size,
            tp_group=pg_collection.tp if tp_group is None and pg_collection is not None else tp_group,
        )

    def forward(self, hidden_states, per_token_scale=None, **_):
        """hidden_states [s, b, h] -> ([s, b, h], None: there is no bias)."""
        if per_token_scale is not None:
            raise ValueError("CoatMLP: per_token_scale belongs to experts, which are not supported yet")
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_up, group_size=activations_of(self.config).group_size))
