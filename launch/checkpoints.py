"""Checkpoints that stay valid when processes are killed while writing them.

    checkpoints/
        step300/                   complete: DeepSpeed's files, and manifest.json with the layout of the run
        step400.5e1a7c2f.partial/  incomplete; removed before the next save
        latest                     the name of the newest complete one, for DeepSpeed's own tools

A checkpoint is written under another name, and renamed once its files are on the disk. Only then `latest` is
updated and old checkpoints are removed. So at any moment a name without a suffix is a complete checkpoint,
even if a process is killed. No two saves write under the same name. All ranks have to share the folder.

Nothing in a checkpoint is executed: torch reads tensors, plain containers, and the types in
`_framework_types`.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from coat_launch.errors import LaunchError
from coat_launch.files import atomic_write, read_object

MANIFEST = "manifest.json"
PARTIAL = ".partial"
_NAME = re.compile(r"step(\d+)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is distributed. ZeRO checkpoints can only be read with the layout that wrote them."""

    data_parallel_size: int
    zero_stage: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    layout: Layout

    @property
    def step(self) -> int:
        return _step(self.path)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and path.is_dir() else -1


def leave_out_empty_states(model: torch.nn.Module) -> None:
    """Keeps None, Megatron's extra state of a layer without extra state, out of checkpoints.

    DeepSpeed's conversion to universal checkpoints treats it as a tensor; Megatron adds it on load if
    missing.
    """

    def drop(module, state, prefix, metadata):
        for name in [name for name, value in state.items() if value is None]:
            del state[name]

    model.register_state_dict_post_hook(drop)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in the folder. Collective."""
    return from_main(lambda: next(iter(_named(folder)), None))


def _named(folder: Path) -> list[Path]:
    """The paths that have a checkpoint's name, the newest first. One without a manifest is another program's:
    a run must not ignore it and overwrite it."""
    found = [path for path in folder.iterdir() if _step(path) >= 0] if folder.is_dir() else []
    return sorted(found, key=_step, reverse=True)


def save(
    engine, folder: Path, step: int, layout: Layout, client_state: dict, *, keep: int | None = None
) -> None:
    """Writes `folder`/step`step` and points `latest` to it. Collective over all ranks.

    client_state: what `load` returns in addition to DeepSpeed's own; plain containers, numbers and tensors.
    keep: how many of the newest checkpoints stay; all without it.

    Raises LaunchError, on the rank on which it happens, if a file cannot be written.
    """
    name = f"step{step}"
    partial = folder / from_main(lambda: f"{name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    with _writing(folder):
        if is_main():
            folder.mkdir(parents=True, exist_ok=True)
            for rest in folder.glob("*" + PARTIAL):
                shutil.rmtree(rest)
        # collective: no rank makes the new folder before
        state = {**client_state, "rng": _gather(_rng_state())}
        engine.save_checkpoint(str(folder), tag=partial.name, client_state=state, save_latest=False)
        # all ranks have written their files
        dist.barrier()
        if is_main():
            manifest = {"layout": dataclasses.asdict(layout)}
            atomic_write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
            for path in (*partial.iterdir(), partial):
                _sync(path)
            partial.rename(folder / name)
            _sync(folder)
            atomic_write(folder / "latest", name.encode())
            whole = [path for path in _named(folder) if (path / MANIFEST).is_file()]
            for old in whole[keep:] if keep else ():
                # a half-removed checkpoint must not look like a complete one
                shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)))
    dist.barrier()


def find(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in the folder, or the folder itself if it is one; None without any. Collective.

    Raises LaunchError for one without a manifest.
    """
    path = folder if _step(folder) >= 0 else newest(folder)
    if path is None:
        return None
    try:
        saved = read_object(path / MANIFEST)["layout"]
        return Checkpoint(path, Layout(saved["data_parallel_size"], saved["zero_stage"]))
    except (ValueError, TypeError, KeyError) as error:
        raise LaunchError(
            f"{path}: its {MANIFEST} cannot be used ({error}). Remove this checkpoint: --resume then takes "
            "the one before it"
        ) from error


def load(engine, found: Checkpoint, layout: Layout) -> dict:
    """Restores the engine and the random states; returns the client state. Collective.

    Raises LaunchError for a checkpoint of another layout, if a file contains more than data, and if it lacks
    what this model and this optimizer need.
    """
    if found.layout != layout:
        raise LaunchError(
            f"{found.path} was written by {found.layout}, this is {layout}. Go on with the sizes and the "
            "stage it was written with"
        )
    with reading(found.path):
        with _data_only():
            _, state = engine.load_checkpoint(str(found.path.parent), tag=found.path.name)
        _set_rng_state(state["rng"][dist.get_rank()])
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
            "the model and the optimizer that it was written with, or remove it: --resume then takes the one "
            "before it"
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


def _rng_state() -> dict:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def is_main() -> bool:
    return dist.get_rank() == 0


def from_main(make: Callable):
    """The value that rank 0 computes, on every rank. Collective."""
    box = [make() if is_main() else None]
    dist.broadcast_object_list(box)
    return box[0]


def _gather(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
