"""`coat_ds.watch` in Megatron: chains of optimizers, the end of a step, and Megatron-LM's writers.

`patches.watch` makes Megatron run `watching`. From then on a chain of optimizers has `coat_watch`, a `Watch`
or None.

Sums are over all ranks, under pipeline parallelism by the names of the whole model, so that all ranks have
the same readings.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer

from coat_ds.config import WatchConfig
from coat_ds.layers.inventory import layers_of
from coat_ds.log import listed, log_rank_0
from coat_ds.patches import Patch, wrapping
from coat_ds.watch.readings import Reading, ReadingCallback
from coat_ds.watch.watch import Watch
from megatron_ext import options
from megatron_ext.optimizer.adamw import MegatronAdamW
from megatron_ext.optimizer.model_chunks import models_of, whole_model

_CHAIN = "megatron.core.optimizer.optimizer:ChainedOptimizer"
_BEFORE = "the last reading is written before a checkpoint"
# patched on one chain
STEP, SAVE, SAVE_SHARDED = (
    Patch("watch of Megatron", f"{_CHAIN}.{name}", why, parameters=parameters)
    for name, why, parameters in (
        ("step", "a reading ends with a step", ()),
        ("state_dict", _BEFORE, ()),
        ("sharded_state_dict", _BEFORE, ("model_sharded_state_dict", "...")),
    )
)
# an attribute of a model whose layers the log has counted
LOGGED = "coat_layers_logged"


def init_watched(init: Callable, self: ChainedOptimizer, chained_optimizers: list) -> None:
    """Watches the model of a chain that Megatron constructs."""
    init(self, chained_optimizers)
    # a subclass that distributes layers over ranks is a part of another chain
    if type(self) is ChainedOptimizer:
        chunks, config = models_of(self)
        self.coat_watch = watch_optimizer(self, config) if chunks else None
        _log_layers(chunks)


def _log_layers(chunks: list[torch.nn.Module]) -> None:
    """Logs a list on the layers of this rank, as DeepSpeed's engines do, if any is COAT's; once per model,
    though Megatron may build several chains for it."""
    layers = layers_of(whole_model(chunks), "Megatron's own")
    if layers.made and not hasattr(chunks[0], LOGGED):
        setattr(chunks[0], LOGGED, True)
        log_rank_0(listed("layers of rank 0", layers.lines()))


def watch_optimizer(chain: ChainedOptimizer, config: WatchConfig) -> Watch | None:
    """Watches the model of a chain of optimizers, by `config`. None if the model was not noted on the
    optimizers (`model_chunks.note_model`), or if "every" is 0.

    Call it on every rank. If the chain's optimizers are watched already, that watch ends.
    """
    chunks, _ = models_of(chain)
    if not chunks or not config.every:
        return None
    parts = chain.chained_optimizers
    # an earlier watch: Megatron builds a second chain for some optimizers
    for patch in (STEP, SAVE, SAVE_SHARDED):
        patch.remove(on=chain)
    for part in parts:
        if getattr(part, "coat_watch", None) is not None:
            part.coat_watch.close()
    ours = [part.optimizer for part in parts if isinstance(part.optimizer, MegatronAdamW)]
    watch = Watch(whole_model(chunks), ours, config, _writers(), union=_union)
    for part in parts:
        part.coat_watch = watch
    STEP.apply(wrapping(_step, watch), on=chain)
    for patch in (SAVE, SAVE_SHARDED):
        patch.apply(wrapping(_save, watch), on=chain)
    return watch


def _step(watch: Watch, step: Callable, *args, **kwargs) -> Any:
    result = step(*args, **kwargs)
    # Megatron-LM counts steps; in a user's own loop the watch does
    script = options.megatron_lm()
    before = None if script is None else getattr(script.get_args(), "curr_iteration", None)
    watch.end_step(None if before is None else before + 1)
    return result


def _save(watch: Watch, save: Callable, *args, **kwargs) -> Any:
    watch.flush()
    return save(*args, **kwargs)


def _union(names: list[str]) -> list[str]:
    """The names of all ranks, in the same order on each."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return list(dict.fromkeys(itertools.chain.from_iterable(gathered)))


def _writers() -> list[ReadingCallback]:
    """An out to Megatron-LM's writers, if its arguments name any. The last rank has the writers."""
    script = options.megatron_lm()
    named = ("tensorboard_dir", "wandb_project")
    if script is None or not any(getattr(script.get_args(), name, None) for name in named):
        return []
    return [functools.partial(_to_writers, script.get_tensorboard_writer(), script.get_wandb_writer())]


def _to_writers(tensorboard: Any, wandb: Any, reading: Reading) -> None:
    numbers = reading.flat()
    if tensorboard is not None:
        for name, value in numbers.items():
            tensorboard.add_scalar(name, value, reading.step)
    if wandb is not None:
        wandb.log(numbers, step=reading.step)
