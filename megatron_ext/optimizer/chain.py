"""What COAT does once Megatron has built the optimizers of a model: log lines, and the watch.

`seam.watch` puts both functions here into Megatron. From then on a chain of optimizers has `coat_watch`, a
`Watch` or None.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from coat_ds.config import CoatConfig, CoatConfigError
from coat_ds.layers.inventory import layers_of
from coat_ds.log import listed, log_rank_0
from megatron_ext.optimizer.chunks import MODEL, models_of, whole_model
from megatron_ext.optimizer.watch import watch_optimizer

# an attribute of a model whose layers the log has counted
SAID = "coat_layers_said"


def note_model(
    optimizer: MegatronOptimizer, model_chunks: Iterable[torch.nn.Module], coat: CoatConfig
) -> None:
    """Notes on an optimizer the model that Megatron built it for, unless the model cannot be watched.

    Raises CoatConfigError if it cannot, and `coat` configures the watch.
    """
    if any(getattr(chunk.ddp_config, "use_megatron_fsdp", False) for chunk in model_chunks):
        if coat.watch.every and coat.watch.folder:
            raise CoatConfigError(
                f"coat.watch.folder: found {coat.watch.folder!r} with --use-megatron-fsdp, whose parameters "
                'come and go. Set "watch": false, or remove --use-megatron-fsdp.'
            )
        return
    setattr(optimizer, MODEL, (list(model_chunks), coat.watch))


def watching(init: Callable) -> Callable:
    """Watches the model of a chain that Megatron constructs."""

    @functools.wraps(init)
    def coat_init(self, chained_optimizers):
        init(self, chained_optimizers)
        # a subclass that distributes layers over ranks is a part of another chain
        if type(self) is ChainedOptimizer:
            chunks, config = models_of(self)
            self.coat_watch = watch_optimizer(self, config) if chunks else None
            _log_layers(chunks)

    return coat_init


def _log_layers(chunks: list[torch.nn.Module]) -> None:
    """Logs a list on the layers of this rank, as DeepSpeed's engines do, if any is COAT's; once per model,
    though Megatron may build several chains for it."""
    layers = layers_of(whole_model(chunks), "Megatron's own")
    if layers.made and not hasattr(chunks[0], SAID):
        setattr(chunks[0], SAID, True)
        log_rank_0(listed("layers of rank 0", layers.lines()))
