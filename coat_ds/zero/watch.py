"""`coat_ds.watch` in a DeepSpeed engine: the end of a step, monitors, the fallback's state in checkpoints."""

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from coat_ds.config import CoatConfigError, WatchConfig
from coat_ds.log import say
from coat_ds.patches import Patch
from coat_ds.watch.fallback import KEY
from coat_ds.watch.readings import Reading
from coat_ds.watch.watch import Watch
from coat_ds.zero.guards import link_states

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
STEP, SAVE, LOAD = (
    Patch("watch", "deepspeed", f"{_ENGINE}.{name}", why, parameters=parameters)
    for name, why, parameters in (
        ("step", "a reading ends with a step", ("lr_kwargs",)),
        ("save_checkpoint", "what has fallen back is saved with the states", ("save_dir", "tag", "...")),
        (
            "load_checkpoint",
            "what had fallen back does so before states are loaded",
            ("load_dir", "tag", "..."),
        ),
    )
)
FILE = f"{KEY}.json"


def watch_engine(engine, config: WatchConfig, with_optimizer: bool) -> Watch | None:
    """Watches `engine`, whose layers and optimizer are complete. Returns None if nothing is measured: "every"
    is 0, or the engine is a pipeline engine, which has its own steps.

    Raises CoatConfigError if `config` has keys that a pipeline engine does not support.
    """
    if not config.every:
        return None
    if hasattr(engine, "train_batch"):
        for key, unset in (("folder", ""), ("act", "off")):
            if getattr(config, key) != unset:
                raise CoatConfigError(
                    f"coat.watch.{key}: found {getattr(config, key)!r}, but DeepSpeed's pipeline engine is "
                    'not watched. Set "watch": false, or build the model without PipelineModule.'
                )
        return None
    watch = Watch(
        engine.module,
        engine.basic_optimizer if with_optimizer else None,
        config,
        [functools.partial(_to_monitors, engine)] if engine.monitor.enabled else (),
        relink=functools.partial(link_states, engine),
    )
    for patch, around in ((STEP, _stepping), (SAVE, _saving), (LOAD, _loading)):
        patch.apply(functools.partial(around, engine, watch), on=engine)
    return watch


def _to_monitors(engine, reading: Reading) -> None:
    """DeepSpeed's own events are over the samples seen, too."""
    samples = reading.step * engine.train_batch_size()
    engine.monitor.write_events([(name, value, samples) for name, value in reading.flat().items()])


def _stepping(engine, watch: Watch, step: Callable) -> Callable:
    @functools.wraps(step)
    def stepping(*args, **kwargs):
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps != before:
            watch.end_step(engine.global_steps)
        return result

    return stepping


def _saving(engine, watch: Watch, save: Callable) -> Callable:
    @functools.wraps(save)
    def save_checkpoint(save_dir, tag=None, *args, **kwargs):
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        watch.take_in()
        result = save(save_dir, tag, *args, **kwargs)
        if engine.global_rank == 0:
            path, state = Path(save_dir) / name / FILE, watch.fallback.state()
            if any(state.values()):
                path.write_text(json.dumps(state, indent=2) + "\n")
            else:
                # the file of an earlier checkpoint of this name
                path.unlink(missing_ok=True)
        return result

    return save_checkpoint


def _loading(engine, watch: Watch, load: Callable) -> Callable:
    @functools.wraps(load)
    def load_checkpoint(load_dir, tag=None, *args, **kwargs):
        found: list = [None]
        if engine.global_rank == 0:
            # ranks may have other folders
            found = [_read(load_dir, tag, engine.load_universal_checkpoint(), watch.config.act == "act")]
        dist.broadcast_object_list(found)
        if isinstance(found[0], str):
            raise ValueError(found[0])
        # without a checkpoint DeepSpeed continues unchanged
        if found[0] is not None:
            watch.resume(found[0])
        result = load(load_dir, tag, *args, **kwargs)
        watch.go_on_from(engine.global_steps)
        return result

    return load_checkpoint


def _read(folder: str, tag: str | None, universal: bool, acts: bool) -> dict[str, list[str]] | str | None:
    """What had fallen back in a checkpoint's run: empty if nothing, None without a checkpoint, or an error
    message for a file with other contents than expected."""
    latest = Path(folder) / ("latest_universal" if universal else "latest")
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    checkpoint = Path(folder) / str(tag)
    path = checkpoint / FILE
    if not checkpoint.is_dir():
        return None
    if not path.is_file():
        if universal and acts:
            say(
                f"{checkpoint} has no {FILE}: nothing has fallen back. ds_to_universal leaves it out: "
                "if the checkpoint that was converted has one, copy it, and load again.",
                logging.WARNING,
            )
        return {}
    try:
        state = json.loads(path.read_text())
        if state.keys() <= {"layers", "states"} and all(isinstance(names, list) for names in state.values()):
            return state
        why = f"found {state!r}"
    except (OSError, ValueError, AttributeError) as error:
        why = str(error)
    return f"{path}: expected the layers and states that had fallen back ({why}). Remove it to go on without."
