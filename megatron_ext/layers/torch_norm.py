"""Norms for a Megatron without Transformer Engine: apex's where it can run, else torch's.

Megatron's own choices fail in places. `WrappedTorchNorm`, torch's norms, refuses sequence parallelism,
because it does not mark its parameters: each rank processes its own part of the sequence, so their gradients
have to be summed over the tensor-parallel ranks. It refuses persistent norms, the default of Megatron-LM's
scripts, too. Megatron uses `FusedLayerNorm` wherever a package called apex can be imported. It fails if that
package is not NVIDIA's or has no kernels, or if the model uses RMSNorm.
"""

import importlib.util
from types import ModuleType

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.fusions.fused_layer_norm import HAVE_FUSED_LAYER_NORM, FusedLayerNorm
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from coat_ds.patches import Patch, all_declared, declared


def apex_has_layer_norm() -> bool:
    """Whether NVIDIA's apex is installed with the kernel of its LayerNorm.

    Another project on the package index is called apex, and apex can be built without kernels.
    """
    return HAVE_FUSED_LAYER_NORM and importlib.util.find_spec("fused_layer_norm_cuda") is not None


class LocalNorm:
    """apex's LayerNorm where it can run, else torch's RMSNorm or LayerNorm, marked for Megatron.

    Raises ValueError for another normalization, and for zero-centered gamma without apex.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        if config.normalization == "LayerNorm" and apex_has_layer_norm():
            return FusedLayerNorm(config, hidden_size, eps)
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"--normalization: expected RMSNorm or LayerNorm, found {config.normalization!r}"
            )
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "--apply-layernorm-1p: torch's norms have no zero-centered gamma; remove it or install "
                "Transformer Engine"
            )
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def local_norm(found: type) -> type:
    """`LocalNorm` if `found` is a norm that Megatron uses without Transformer Engine; else `found`."""
    without_te = (WrappedTorchNorm, FusedLayerNorm) if HAVE_TE else (WrappedTorchNorm, FusedLayerNorm, TENorm)
    return LocalNorm if found in without_te else found


def _final_norm(module: ModuleType, name: str) -> Patch:
    """The patch of the global in `module` that holds the class of its blocks' final norm."""
    what, target = "Megatron's final norm", f"{module.__name__}:{name}"
    return declared(what, target) or Patch(
        what,
        "megatron-core",
        target,
        "norms that run without Transformer Engine, also under sequence parallelism",
        expected="the class of the final norm",
        used_by="",
    )


FINAL_NORM = _final_norm(transformer_block, "LayerNormImpl")


def replace_final_norm(module: ModuleType = transformer_block, name: str = "LayerNormImpl") -> None:
    """Patches the final norm of Megatron's blocks of layers with `LocalNorm` where there is no Transformer
    Engine.

    There is no other extension point: a block reads the class from a global of its `module`. A norm of
    Transformer Engine's, or one that other code has set, stays. May be called repeatedly.
    Raises RuntimeError if this Megatron has no such global.
    """
    patch = _final_norm(module, name)
    patch.check()
    if local_norm(patch.original()) is not patch.original():
        patch.apply(local_norm)


def restore_final_norm() -> None:
    """Undoes every `replace_final_norm`."""
    for patch in all_declared(FINAL_NORM.name):
        patch.remove()
