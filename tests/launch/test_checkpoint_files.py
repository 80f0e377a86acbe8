"""The file operations of a save, and how the next save and a load treat the files, with a small engine."""

import datetime
import os
import sys
from unittest import mock

import deepspeed
import pytest
import torch

from coat_launch import checkpoints
from coat_launch.errors import LaunchError
from coat_launch.process_group import start_process_group
from tests.launch.ranks import full_disk
from tests.util import run_distributed


def small_engine(**sections):
    from megatron_ext.model import initialize_model_parallel

    if not torch.distributed.is_initialized():
        start_process_group(datetime.timedelta(seconds=60))
        initialize_model_parallel(1, seed=1234)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "coat": {"enabled": True},
        **sections,
    }
    return deepspeed.initialize(model=torch.nn.Linear(64, 64), config=config)[0]


# torch reports another error when the close of a small file fails
@pytest.mark.parametrize("numbers", [10, 10**5])
def test_a_full_disk_is_told_from_other_errors(tmp_path, numbers):
    with (
        pytest.raises(LaunchError, match=f"cannot write a checkpoint to {tmp_path} .*: make room"),
        full_disk(1000),
        checkpoints._writing(tmp_path),
    ):
        torch.save(torch.ones(numbers), tmp_path / "states.pt")
    with pytest.raises(RuntimeError, match="^inconsistent tensor size"), checkpoints._writing(tmp_path):
        torch.ones(2).dot(torch.ones(numbers))


def writes_of_a_save(folder):
    """What the third of three saves writes to disk, renames and removes, and what is left if one checkpoint
    is kept."""
    engine, events = small_engine(), []
    for step in (1, 2):
        checkpoints.save(engine, folder, {"step": step})
    sync = os.fsync

    def synced(descriptor):
        sync(descriptor)
        events.append(("synced", os.readlink(f"/proc/self/fd/{descriptor}")))

    def noted(event, args):
        if event in ("os.rename", "shutil.rmtree"):
            events.append((event, *map(str, args[: 2 if event == "os.rename" else 1])))

    sys.addaudithook(noted)
    with mock.patch.object(os, "fsync", synced):
        checkpoints.save(engine, folder, {"step": 3}, keep=1)
    return events, sorted(path.name for path in folder.iterdir() if path.suffix != ".py")


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path):
    """So neither a kill nor a power cut leaves a name whose files are missing."""
    ((events, left),) = run_distributed(writes_of_a_save, 1, tmp_path)
    folder = str(tmp_path)

    def renamed(target: str) -> int:
        (found,) = (i for i, event in enumerate(events) if event[0] == "os.rename" and event[2] == target)
        return found

    named, latest = renamed(f"{folder}/step3"), renamed(f"{folder}/latest")
    partial = events[named][1]
    states = {file.name for file in (tmp_path / "step3").glob("*.pt")}
    assert len(states) == 2
    assert {("synced", f"{partial}/{name}") for name in states} <= {*events[:named]}
    assert ("synced", partial) in events[:named]
    assert ("synced", folder) in events[named:latest]
    # old checkpoints lose their names before their files, after all of these events
    removed = [event[1] for event in events[latest:] if event[0] == "shutil.rmtree"]
    assert removed == [f"{folder}/step{step}.partial" for step in (2, 1)]
    assert left == ["latest", "step3"]
