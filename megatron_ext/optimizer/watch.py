"""`coat_ds.watch` in Megatron: the end of a step, and Megatron-LM's writers.

Sums are over all ranks, under pipeline parallelism by the names of the whole model, so that all ranks have
the same readings.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer

from coat_ds.config import WatchConfig
from coat_ds.patches import Patch
from coat_ds.watch.readings import Out, Reading
from coat_ds.watch.watch import Watch
from megatron_ext import options
from megatron_ext.optimizer.adamw import MegatronAdamW
from megatron_ext.optimizer.chunks import models_of, whole_model

# patched on one chain
STEP = Patch(
    "watch of Megatron",
    "megatron-core",
    "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
    "a reading ends with a step",
    parameters=(),
)


def watch_optimizer(chain: ChainedOptimizer, config: WatchConfig) -> Watch | None:
    """Watches the model of a chain of optimizers, by `config`. None if the model was not noted on the
    optimizers (`chain.note_model`), or if "every" is 0.

    Call it on every rank. If the chain's optimizers are watched already, that watch ends.
    """
    chunks, _ = models_of(chain)
    if not chunks or not config.every:
        return None
    parts = chain.chained_optimizers
    ours = [part.optimizer for part in parts if isinstance(part.optimizer, MegatronAdamW)]
    watch = Watch(whole_model(chunks), ours, config, _writers(), union=_union)
    # of an earlier watch: Megatron builds a second chain for some optimizers
    STEP.remove(on=chain)
    for part in parts:
        if getattr(part, "coat_watch", None) is not None:
            part.coat_watch.close()
        part.coat_watch = watch
    STEP.apply(functools.partial(_stepping, watch), on=chain)
    return watch


def _stepping(watch: Watch, step: Callable) -> Callable:
    # Megatron-LM counts steps; in a user's own loop the watch does
    host = options.megatron_lm()

    @functools.wraps(step)
    def coat_step(*args, **kwargs):
        result = step(*args, **kwargs)
        before = None if host is None else getattr(host.get_args(), "curr_iteration", None)
        watch.end_step(None if before is None else before + 1)
        return result

    return coat_step


def _union(names: list[str]) -> list[str]:
    """The names of all ranks, in the same order on each."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return list(dict.fromkeys(itertools.chain.from_iterable(gathered)))


def _writers() -> list[Out]:
    """An out to Megatron-LM's writers, if its arguments name any. The last rank has the writers."""
    host = options.megatron_lm()
    named = ("tensorboard_dir", "wandb_project")
    if host is None or not any(getattr(host.get_args(), name, None) for name in named):
        return []
    return [functools.partial(_to_writers, host.get_tensorboard_writer(), host.get_wandb_writer())]


def _to_writers(tensorboard: Any, wandb: Any, reading: Reading) -> None:
    numbers = reading.flat()
    if tensorboard is not None:
        for name, value in numbers.items():
            tensorboard.add_scalar(name, value, reading.step)
    if wandb is not None:
        wandb.log(numbers, step=reading.step)
