"""Megatron's mixture of experts with FP8 experts, routed ones and shared ones.

The router, the dispatcher and every name in a checkpoint stay Megatron's. Experts run one after another, or
with `--moe-grouped-gemm` in one grouped FP8 GEMM (`grouped_experts.py`). An expert's tensor has the scale of
this rank's part: a common scale would need an all-reduce for each of many small GEMMs.
"""

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from coat_ds.patches import Patch
from megatron_ext.layers.grouped_experts import CoatGroupedMLP
from megatron_ext.layers.mlp import CoatMLP, fp8_linears


def is_moe_layer(config, index: int) -> bool:
    """Whether the model's layer `index`, from 0, has experts: `--num-experts` and `--moe-layer-freq`."""
    if not config.num_moe_experts:
        return False
    every = config.moe_layer_freq
    return index % every == 0 if isinstance(every, int) else bool(every[index])


GEMM = Patch(
    "router without Transformer Engine",
    "megatron.core.transformer.moe.moe_utils:te_general_gemm",
    "megatron-core 0.16 reads the name, and lacks it without Transformer Engine",
    missing=True,
)


def repair_router() -> None:
    """Adds to the router module of megatron-core 0.16 a name that it reads and lacks without Transformer
    Engine. May be called repeatedly.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        # None stands for torch's GEMM, as in later versions
        GEMM.apply(lambda _: None)


class CoatSequentialMLP(SequentialMLP):
    """Megatron's experts, one after another, each a `CoatMLP`."""

    def __init__(self, num_local_experts: int, config, submodules=None, *args, **kwargs):
        super().__init__(num_local_experts, config, submodules or fp8_linears(), *args, **kwargs)
        for expert in self.local_experts:
            CoatMLP.take_over(expert)


class CoatSharedExpertMLP(SharedExpertMLP, CoatMLP):
    """Megatron's shared experts as a `CoatMLP`."""

    def __init__(self, config, submodules=None, *args, **kwargs):
        super().__init__(config, submodules or fp8_linears(), *args, **kwargs)


class CoatMoELayer(MoELayer):
    """Megatron's MoELayer with experts in FP8, by `--moe-grouped-gemm` in grouped GEMMs.

    Fits a layer's `mlp` slot. Raises Megatron's ImportError for a dispatcher whose package is missing.
    """

    def __init__(self, config, submodules=None, *args, **kwargs):
        repair_router()
        experts = CoatGroupedMLP if config.moe_grouped_gemm else CoatSequentialMLP
        submodules = submodules or MoESubmodules(experts=experts, shared_experts=CoatSharedExpertMLP)
        super().__init__(config, submodules, *args, **kwargs)
