"""torch's norms, for a Megatron without Transformer Engine.

Megatron's own choices fail in places. `WrappedTorchNorm`, torch's norms, refuses sequence parallelism,
because it does not mark its parameters: each rank processes its own part of the sequence, so their gradients
have to be summed over the tensor-parallel ranks. It refuses persistent norms, the default of Megatron-LM's
scripts, too. Megatron uses `FusedLayerNorm` wherever a package called apex can be imported. It fails if that
package is not NVIDIA's or has no kernels, or if the model uses RMSNorm.
"""

import importlib.util

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from coat_ds.patches import Patch


class LocalNorm:
    """torch's RMSNorm or LayerNorm, marked for Megatron.

    Raises ValueError for zero-centered gamma.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "--apply-layernorm-1p: torch's norms have no zero-centered gamma; remove it or install "
                "Transformer Engine"
            )
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def local_norm(found: type) -> type:
    """`LocalNorm` if `found` is a norm that Megatron uses without Transformer Engine; else `found`."""
    without_te = (WrappedTorchNorm, FusedLayerNorm) if HAVE_TE else (WrappedTorchNorm, FusedLayerNorm, TENorm)
    return LocalNorm if found in without_te else found


# there is no other extension point: a block of layers reads the class of its final norm from a global
_IN_OLD = importlib.util.find_spec("megatron.core.models.hybrid") is None
_STACKS = "megatron.core.ssm.mamba_block" if _IN_OLD else "megatron.core.models.hybrid.hybrid_block"
OF_BLOCKS, OF_STACKS = (
    Patch(
        "Megatron's final norm",
        target,
        "norms that run without Transformer Engine, also under sequence parallelism",
        expected="the class of the final norm",
        used_by="",
    )
    for target in ("megatron.core.transformer.transformer_block:LayerNormImpl", f"{_STACKS}:TENorm")
)


def replace_final_norm(patch: Patch) -> None:
    """Applies `OF_BLOCKS` or `OF_STACKS` where there is no Transformer Engine. A norm of Transformer Engine,
    or one that other code has set, stays. May be called repeatedly.

    Raises RuntimeError if this Megatron has no such global.
    """
    patch.check()
    if local_norm(patch.original()) is not patch.original():
        patch.apply(local_norm)
