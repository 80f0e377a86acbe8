"""`coat_ds.watch` in a DeepSpeed engine: the end of a step, the contents of flat tensors, the engine's
monitors, and the fallback's state in checkpoints."""

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from coat_ds.config import CoatConfigError, WatchConfig
from coat_ds.patches import Patch
from coat_ds.watch.fallback import KEY
from coat_ds.watch.outs import monitor
from coat_ds.watch.states import Places
from coat_ds.watch.watch import Watch
from coat_ds.zero.guards import link_states
from coat_ds.zero.log import say
from coat_ds.zero.partitions import link_partitions, partitions

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
STEP = Patch(
    "watch",
    "deepspeed",
    f"{_ENGINE}.step",
    "a reading ends with a step",
    parameters=("lr_kwargs",),
)
SAVE = Patch(
    "watch",
    "deepspeed",
    f"{_ENGINE}.save_checkpoint",
    "what has fallen back is saved with the states",
    parameters=("save_dir", "tag", "..."),
)
LOAD = Patch(
    "watch",
    "deepspeed",
    f"{_ENGINE}.load_checkpoint",
    "what had fallen back does so before states are loaded",
    parameters=("load_dir", "tag", "..."),
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
    optimizer = engine.basic_optimizer if with_optimizer else None
    names = {p: name for name, p in engine.module.named_parameters()}

    def places() -> Places:
        found = {
            p: [(names[p], 0, p.numel())] for g in optimizer.param_groups for p in g["params"] if p in names
        }
        for _, flat, placed in partitions(engine.optimizer, len(optimizer.param_groups)):
            found[flat] = [(names[p], start, numel) for p, start, numel, _ in placed if p in names]
        return found

    def masters():
        groups = len(optimizer.param_groups) if optimizer is not None else 0
        return [flat for _, flat, _ in partitions(engine.optimizer, groups)] if groups else ()

    named = {name: p for p, name in names.items()}

    def keep(name: str, whether: bool) -> None:
        optimizer.keep(named[name], whether)
        link_partitions(engine.optimizer, optimizer)
        link_states(engine)

    watch = Watch(
        engine.module,
        optimizer,
        config,
        [monitor(engine.monitor)] if engine.monitor.enabled else (),
        places=places,
        masters=masters,
        steps_done=lambda: engine.global_steps,
        samples_done=lambda: engine.global_samples,
        keep=keep,
        say=say,
    )
    STEP.apply(lambda step: _stepping(engine, watch, step), on=engine)
    SAVE.apply(lambda save: _saving(engine, watch, save), on=engine)
    LOAD.apply(lambda load: _loading(engine, watch, load), on=engine)
    return watch


def _stepping(engine, watch: Watch, step: Callable) -> Callable:
    @functools.wraps(step)
    def stepping(*args, **kwargs):
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps != before:
            watch.end_step()
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
        remembered = _remembered(load_dir, tag, engine.load_universal_checkpoint(), watch.config.act)
        # without a checkpoint DeepSpeed continues unchanged
        if remembered is not None:
            watch.resume(remembered)
        return load(load_dir, tag, *args, **kwargs)

    return load_checkpoint


def _remembered(folder: str, tag: str | None, universal: bool, act: str) -> dict[str, list[str]] | None:
    """What had fallen back in the run that wrote a checkpoint. Rank 0 reads it for all ranks, which may have
    other folders. Empty for a checkpoint without the file, None without a checkpoint.

    Raises ValueError, on all ranks, for a file with other contents than expected.
    """
    found: list = [None]
    if dist.get_rank() == 0:
        latest = Path(folder) / ("latest_universal" if universal else "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text().strip()
        found = [_read(Path(folder) / str(tag), universal and act == "act")]
    dist.broadcast_object_list(found)
    if isinstance(found[0], str):
        raise ValueError(found[0])
    return found[0]


def _read(checkpoint: Path, should_say: bool) -> dict[str, list[str]] | str | None:
    """The fallback's state in a checkpoint, or an error message; None if there is no checkpoint.

    should_say: whether to log a missing file: DeepSpeed's conversion does not copy it.
    """
    path = checkpoint / FILE
    if not checkpoint.is_dir():
        return None
    if not path.is_file():
        if should_say:
            say(
                f"COAT: {checkpoint} has no {FILE}: nothing has fallen back. ds_to_universal leaves it out: "
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
