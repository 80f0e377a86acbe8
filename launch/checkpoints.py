"""Checkpoints that stay valid when processes are killed while writing them.

    checkpoints/
        step300/                   complete: DeepSpeed's files
        step400.5e1a7c2f.partial/  incomplete; removed before the next save
        latest                     the name of the newest complete one, for DeepSpeed's own tools

A checkpoint is written under another name, and renamed once its files are on the disk. Only then `latest` is
updated and old checkpoints are removed. So at any moment a name without a suffix is a complete checkpoint,
even if a process is killed. No two saves write under the same name. All ranks have to share the folder.

Nothing in a checkpoint is executed: torch reads tensors, plain containers, and the types in
`_framework_types`.
"""

import contextlib
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from coat_launch.errors import LaunchError
from coat_launch.files import atomic_write
from coat_launch.process_group import from_main, is_main

PARTIAL = ".partial"
_NAME = re.compile(r"step(\d+)")


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 if `path` is no complete checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and path.is_dir() else -1


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in the folder, or the folder itself if it is one; None without. Collective."""
    return from_main(lambda: folder if step_of(folder) >= 0 else next(iter(_complete(folder)), None))


def _complete(folder: Path) -> list[Path]:
    """The newest first."""
    found = [path for path in folder.iterdir() if step_of(path) >= 0] if folder.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def save(engine, folder: Path, client_state: dict, *, keep: int | None = None) -> None:
    """Writes `folder`/step`client_state["step"]` and points `latest` to it. Collective over all ranks.

    client_state: what `load` returns in addition to DeepSpeed's own; plain containers, numbers and tensors.
    keep: how many of the newest checkpoints stay; all without it.

    Raises LaunchError, on the rank on which it happens, if a file cannot be written.
    """
    name = f"step{client_state['step']}"
    partial = folder / from_main(lambda: f"{name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    with _writing(folder):
        if is_main():
            for rest in folder.glob("*" + PARTIAL):
                shutil.rmtree(rest)
        # begins and ends with a barrier
        engine.save_checkpoint(str(folder), tag=partial.name, client_state=client_state, save_latest=False)
        if is_main():
            for path in (*partial.iterdir(), partial):
                _sync(path)
            partial.rename(folder / name)
            _sync(folder)
            atomic_write(folder / "latest", name.encode())
            for old in _complete(folder)[keep:] if keep else ():
                # a half-removed checkpoint must not look like a complete one
                shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)))
    dist.barrier()


def load(engine, path: Path) -> dict:
    """Restores the engine; returns the client state. Collective.

    Raises LaunchError if a file contains more than data, and if it lacks what this run needs.
    """
    with reading(path):
        with _data_only():
            _, state = engine.load_checkpoint(str(path.parent), tag=path.name)
        if state["step"] != step_of(path):
            raise ValueError(f"the files are of step {state['step']}")
    return state


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save reports a full disk as one of these RuntimeErrors
        known = any(name in str(error) for name in ("PytorchStreamWriter", "inline_container", "iostream"))
        if isinstance(error, RuntimeError) and not known:
            raise
        raise LaunchError(
            f"cannot write a checkpoint to {folder} ({error}): make room, or choose another folder with "
            "--output. The checkpoints there are whole"
        ) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns every error that torch and DeepSpeed raise over the content of a checkpoint into a
    LaunchError."""
    try:
        yield
    except (LaunchError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        # the text before it is torch's advice to trust a file that holds more than data
        why = str(error).rpartition("WeightsUnpickler error:")[2].strip()
        raise LaunchError(
            f"{path}: it does not hold what this run can load ({type(error).__name__}: {why}). Go on with "
            "the model, the optimizer, the ZeRO stage and the number of ranks that it was written with, or "
            "remove it: --resume then takes the one before it"
        ) from error


@contextlib.contextmanager
def _data_only() -> Iterator[None]:
    """Within this context every `torch.load` of DeepSpeed, which requests pickles, reads data only."""
    forced = mock.patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1")
    with forced, torch.serialization.safe_globals(_framework_types()):
        yield


def _framework_types() -> list[Callable | tuple[Callable, str]]:
    """The types in DeepSpeed's and COAT's files other than tensors and containers; with the name in the file,
    if it differs."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # makes torch accept moments of the compressed layout, whose parts are checked at construction
    import coat_ds.state  # noqa: F401

    # Python 3.11.0 to 3.11.3, Debian 12's among them, pickle an enum member as a call of getattr
    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, (_stage, "builtins.getattr")]


def _stage(kind: object, name: str) -> object:
    """A stage of ZeRO by its name. Raises UnpicklingError for an attribute of anything else."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"expected a stage of ZeRO, found {name!r} of {kind}")
    return ZeroStageEnum[name]
