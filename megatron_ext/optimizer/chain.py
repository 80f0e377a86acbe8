"""What COAT does once Megatron has built the optimizers of a model: log lines, and the watch.

`seam.watch` puts both functions here into Megatron. From then on a chain of optimizers has `coat_watch`, a
`Watch` or None.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from coat_ds.config import CoatConfigError
from coat_ds.layers.inventory import layers_of
from coat_ds.log import listed, log_rank_0
from megatron_ext import options
from megatron_ext.optimizer.chunks import CHUNKS, chunks_of_chain, whole_model
from megatron_ext.optimizer.watch import watch_optimizer

# an attribute of a model whose layers the log has counted
SAID = "coat_layers_said"


def _can_be_watched(model_chunks: Iterable[torch.nn.Module]) -> bool:
    """Whether a model of these chunks can be watched. Raises CoatConfigError if it cannot, and `COAT_CONFIG`
    configures the watch."""
    config = options.coat_config().watch
    sharded = [chunk for chunk in model_chunks if getattr(chunk.ddp_config, "use_megatron_fsdp", False)]
    if sharded and config.every and config.folder:
        raise CoatConfigError(
            f"coat.watch.folder: found {config.folder!r} with --use-megatron-fsdp, whose parameters come and "
            'go. Set "watch": false, or remove --use-megatron-fsdp.'
        )
    return not sharded


def noting_chunks(build: Callable) -> Callable:
    """Notes the model on the optimizers that Megatron's function builds for it."""

    @functools.wraps(build)
    def coat_build(config, model_chunks, *args, **kwargs):
        built = build(config, model_chunks, *args, **kwargs)
        if isinstance(built, MegatronOptimizer) and _can_be_watched(model_chunks):
            setattr(built, CHUNKS, list(model_chunks))
        return built

    return coat_build


def watching(init: Callable) -> Callable:
    """Watches the model of a chain that Megatron constructs."""

    @functools.wraps(init)
    def coat_init(self, chained_optimizers):
        init(self, chained_optimizers)
        # a subclass that distributes layers over ranks is a part of another chain
        if type(self) is ChainedOptimizer:
            given = [part.coat_config for part in chained_optimizers if hasattr(part, "coat_config")]
            self.coat_watch = watch_optimizer(self, (given or [options.coat_config()])[0].watch)
            _log_layers(chunks_of_chain(self))

    return coat_init


def _log_layers(chunks: list[torch.nn.Module]) -> None:
    """Logs a list on the layers of this rank, as DeepSpeed's engines do, if any is COAT's; once per model,
    though Megatron may build several chains for it."""
    layers = layers_of(whole_model(chunks), "Megatron's own")
    if layers.made and not hasattr(chunks[0], SAID):
        setattr(chunks[0], SAID, True)
        log_rank_0(listed("layers of rank 0", layers.lines()))
