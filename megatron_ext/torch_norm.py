"""torch's norms under sequence parallelism, which Megatron leaves to Transformer Engine and apex.

Megatron's `WrappedTorchNorm` refuses sequence parallelism, because it does not mark its parameters: each rank
sees its own part of the sequence, so that their gradients have to be summed over the tensor-parallel ranks.
"""

import inspect
import logging

import torch
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm

logger = logging.getLogger(__name__)


class ParallelTorchNorm:
    """What `WrappedTorchNorm` makes; under sequence parallelism torch's RMSNorm or LayerNorm, with parameters
    marked for Megatron.

    Raises ValueError there for another normalization, or zero-centered gamma.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **kwargs) -> torch.nn.Module:
        if not config.sequence_parallel:
            return WrappedTorchNorm(config, hidden_size, eps, **kwargs)
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
            parameter.sequence_parallel = True
        return norm


_NAME = "LayerNormImpl"


def replace_final_norm() -> None:
    """Makes Megatron's final norm a `ParallelTorchNorm` where it would be a `WrappedTorchNorm`.

    There is no other way in: `TransformerBlock` takes the class from a global of its module, and does so
    before it builds a layer. A norm by Transformer Engine or apex, or one that somebody else put there,
    stays. May be called again.
    Raises RuntimeError if this Megatron has no such global.
    """
    found = getattr(transformer_block, _NAME, None)
    if found is None or "LayerNormImpl" not in inspect.getsource(transformer_block):
        raise RuntimeError(
            f"megatron.core.transformer.transformer_block.{_NAME}: expected the class of the final norm, "
            "found nothing. Use a supported version of megatron-core."
        )
    if found is WrappedTorchNorm:
        setattr(transformer_block, _NAME, ParallelTorchNorm)
        logger.info("replaced transformer_block.%s by %s", _NAME, ParallelTorchNorm.__name__)


def restore_final_norm() -> None:
    """Undoes `replace_final_norm`."""
    if getattr(transformer_block, _NAME, None) is ParallelTorchNorm:
        setattr(transformer_block, _NAME, WrappedTorchNorm)
