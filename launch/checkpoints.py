"""Checkpoints that stay valid when processes are killed while writing them.

    checkpoints/
        step300/                   complete: DeepSpeed's files, and manifest.json with their sizes and SHA-256
        step400.5e1a7c2f.partial/  incomplete; removed before the next save
        step200.damaged/           its files differ from its manifest
        latest                     the name of the newest complete one, for DeepSpeed's own tools

A checkpoint is written under another name, read back, and renamed. Only then `latest` is updated and old
checkpoints are removed. So at any moment a name without a suffix is a complete checkpoint, even if a process
is killed. No two saves write under the same name. All ranks have to share the folder.

Nothing in a checkpoint is executed: torch reads tensors, plain containers, and the types in
`_framework_types`.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import re
import shutil
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from coat_launch.errors import LaunchError
from coat_launch.files import atomic_write, read_object

MANIFEST = "manifest.json"
PARTIAL, DAMAGED = ".partial", ".damaged"
_NAME = re.compile(r"step(\d+)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is distributed. ZeRO checkpoints can only be read with the layout that wrote them."""

    data_parallel_size: int
    tensor_parallel_size: int
    zero_stage: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files equal its manifest."""

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
    """The newest checkpoint in the folder, not verified. Collective."""
    return from_main(lambda: next(iter(_named(folder)), None))


def _named(folder: Path) -> list[Path]:
    """The paths that have a checkpoint's name, the newest first. One without a manifest is damaged, or
    another program's: a run must not ignore it and overwrite it."""
    found = [path for path in folder.iterdir() if _step(path) >= 0] if folder.is_dir() else []
    return sorted(found, key=_step, reverse=True)


def save(
    engine, folder: Path, step: int, layout: Layout, client_state: dict, *, keep: int | None = None
) -> None:
    """Writes `folder`/step`step` and points `latest` to it. Collective over all ranks.

    client_state: what `load` returns in addition to DeepSpeed's own; plain containers, numbers and tensors.
    keep: how many of the newest checkpoints stay; all without it.

    Raises LaunchError, on the rank on which it happens, if a file cannot be written, or is read back with
    other bits.
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
        written = from_main(lambda: sorted(path for path in partial.iterdir() if path.is_file()))
        files = _each_its_share(written, _read_back)
        if is_main():
            manifest = {"step": step, "layout": dataclasses.asdict(layout), "files": files}
            atomic_write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
            _sync(partial)
            partial.rename(folder / name)
            _sync(folder)
            atomic_write(folder / "latest", name.encode())
            whole = [path for path in _named(folder) if (path / MANIFEST).is_file()]
            for old in whole[keep:] if keep else ():
                # a half-removed checkpoint must not look like a complete one
                shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)))
    dist.barrier()


def find(folder: Path, *, set_aside: bool = False) -> Checkpoint | None:
    """The newest checkpoint in the folder, or the folder itself if it is one, that verifies. Collective.

    Rank 0 reports damaged checkpoints on stderr, and the previous one is tried. With `set_aside` damaged ones
    are then also renamed, so that they neither count for `keep` nor block the name of a new one.

    Returns None if there is no checkpoint. Raises LaunchError if all are damaged.
    """
    candidates = from_main(lambda: [folder] if _step(folder) >= 0 else _named(folder))
    for number, path in enumerate(candidates):
        found = _verify(path)
        if isinstance(found, Checkpoint):
            # not before: if all are damaged, the next start would treat the folder as empty
            for damaged in candidates[:number] if set_aside and is_main() else ():
                aside = damaged.with_name(damaged.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                damaged.rename(aside)
            return found
        if is_main():
            then = ". The one before it is tried" if path != candidates[-1] else ""
            print(f"checkpoint {path} is damaged: {found}{then}", file=sys.stderr)
    if candidates:
        raise LaunchError(
            f"{folder}: every checkpoint in it is damaged. Restore one from a copy, or remove them to "
            "start from step 0"
        )
    return None


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


def _verify(path: Path) -> Checkpoint | str:
    """The checkpoint, or what is wrong with it. Collective."""
    manifest = from_main(lambda: _read_manifest(path))
    if isinstance(manifest, str):
        return manifest
    layout, digests = manifest

    def fault(file: Path) -> str | None:
        try:
            return None if _sha256(file) == digests[file.name] else f"{file.name} has another SHA-256"
        except (OSError, ValueError) as error:
            return f"{file.name} cannot be read ({error})"

    faults = _each_its_share([path / name for name in digests], fault).values()
    return next(filter(None, faults), Checkpoint(path, layout))


def _read_manifest(path: Path) -> tuple[Layout, dict[str, str]] | str:
    """The layout of a checkpoint and the SHA-256 of its files, or why it has none."""
    try:
        manifest = read_object(path / MANIFEST)
        layout = Layout(**manifest["layout"])
        digests = {name: wanted["sha256"] for name, wanted in manifest["files"].items()}
        step = manifest["step"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {MANIFEST} cannot be used ({error})"
    # a folder that was renamed by hand would resume at a wrong step
    if step != _step(path):
        return f"{MANIFEST} is of step {step}"
    # DeepSpeed would read it regardless
    if extra := {file.name for file in path.glob("*.pt")} - digests.keys():
        return f"{MANIFEST} has no {min(extra)}"
    return layout, digests


def _read_back(file: Path) -> dict:
    """A file's entry in the manifest, after the file is on the disk and equals what was in memory."""
    _sync(file)
    if zipfile.is_zipfile(file) and (record := zipfile.ZipFile(file).testzip()):
        raise OSError(f"{file}: {record} was read back with another checksum than it was written with")
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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
            f"{path}: its files are whole, but do not hold what this run can load ({type(error).__name__}: "
            f"{why}). Go on with the model and the optimizer that it was written with, or take another"
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


def _each_its_share(files: list[Path], action: Callable) -> dict:
    """`action` of every file by name; each rank processes its share of them."""
    mine = {file.name: action(file) for file in files[dist.get_rank() :: dist.get_world_size()]}
    return {name: done for part in _gather(mine) for name, done in part.items()}
