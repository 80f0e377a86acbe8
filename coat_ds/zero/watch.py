"""`coat_ds.watch` in a DeepSpeed engine: the end of a step, and monitors."""

import functools
from collections.abc import Callable
from typing import Any

from coat_ds.config import CoatConfigError, WatchConfig
from coat_ds.patches import Patch, wrapping
from coat_ds.watch.readings import Reading
from coat_ds.watch.watch import Watch

STEP = Patch(
    "watch",
    "deepspeed.runtime.engine:DeepSpeedEngine.step",
    "a reading ends with a step",
    parameters=("lr_kwargs",),
)


def watch_engine(engine, config: WatchConfig, with_optimizer: bool) -> Watch | None:
    """Watches `engine`, whose layers and optimizer are complete. Returns None if nothing is measured: "every"
    is 0, or the engine is a pipeline engine, which has its own steps.

    Raises CoatConfigError if `config` has a folder for the readings of a pipeline engine.
    """
    if not config.every:
        return None
    if hasattr(engine, "train_batch"):
        if config.folder:
            raise CoatConfigError(
                f"coat.watch.folder: found {config.folder!r}, but DeepSpeed's pipeline engine is not "
                'watched. Set "watch": false, or build the model without PipelineModule.'
            )
        return None
    watch = Watch(
        engine.module,
        engine.basic_optimizer if with_optimizer else None,
        config,
        [functools.partial(_to_monitors, engine)] if engine.monitor.enabled else (),
    )
    STEP.apply(wrapping(_step, engine, watch), on=engine)
    return watch


def _to_monitors(engine, reading: Reading) -> None:
    """DeepSpeed's own events are over the samples seen, too."""
    samples = reading.step * engine.train_batch_size()
    engine.monitor.write_events([(name, value, samples) for name, value in reading.flat().items()])


def _step(engine, watch: Watch, step: Callable, *args, **kwargs) -> Any:
    before = engine.global_steps
    result = step(*args, **kwargs)
    if engine.global_steps != before:
        watch.end_step(engine.global_steps)
    return result
