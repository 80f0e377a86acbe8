"""Installs what the module of a spec stands for when Megatron imports it."""

from coat_ds.config import CoatConfigError
from megatron_ext import options
from megatron_ext.layers import recompute
from megatron_ext.optimizer import seam


def install(*, optimizer: bool = False, checkpoints: bool = False) -> None:
    """Installs what a spec's module stands for. Such modules call it on import.

    Raises CoatConfigError if the file of `COAT_CONFIG` contradicts the module, RuntimeError for an
    unsupported Megatron.
    """
    config = options.coat_config()
    if optimizer:
        if not config.optimizer.enabled:
            raise CoatConfigError(
                f"{options.VARIABLE}: coat.optimizer.enabled: found false with megatron_ext.with_optimizer."
                " Set it to true, or take the spec from another module."
            )
        seam.install(config)
    if checkpoints or config.fp8_activation_checkpointing:
        recompute.install()
