"""`"offload": "cpu"` in Megatron's optimizers on two ranks: the bits of resident states, and checkpoints."""

import pytest
import torch

from coat_ds.optim import host_states
from tests.hosts import TEST_ALL
from tests.megatron_ext.ranks import join
from tests.megatron_ext.trainer import MODES, SHARDINGS, Trainer, installed
from tests.util import run_distributed

# the precision-aware optimizer is a distributed one
HERE = list(MODES) if TEST_ALL else ["distributed", "plain"]


def _same(xs, ys):
    return len(xs) == len(ys) and all(map(torch.equal, xs, ys))


def _allocations(trainer):
    return [
        len(o.optimizer._host._pages)
        for o in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    ]


def _run(mode, folder):
    with installed(optimizer={"offload": "none"}):
        resident = Trainer(mode)
        losses = resident.steps(0, 1, 2)
    with installed(optimizer={"offload": "cpu"}):
        offloaded = Trainer(mode)
        found = {
            "losses": offloaded.steps(0, 1, 2) == losses,
            "states": _same(resident.tensors(), offloaded.tensors()),
        }
        for sharding in SHARDINGS[mode]:
            offloaded.save(f"{folder}/{sharding}", sharding)
        after = offloaded.steps(3)
    for sharding in SHARDINGS[mode]:
        # resident states read what any of the optimizers has saved alike
        for offload in ("none", "cpu") if mode == "distributed" else ("cpu",):
            with installed(optimizer={"offload": offload}):
                again = Trainer(mode).load(f"{folder}/{sharding}", sharding)
                same = again.steps(3) == after and _same(again.tensors(), offloaded.tensors())
            found[f"{sharding} into {offload}"] = same
    found["one allocation"] = _allocations(offloaded) == _allocations(again) == [1]
    return found


def _train(folder):
    join()
    host_states.CHUNK = 13 * 256
    return {mode: _run(mode, f"{folder}/{mode}") for mode in HERE}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_distributed(_train, 2, str(tmp_path_factory.mktemp("states")))


@pytest.mark.parametrize("mode", HERE)
def test_offloaded_states_step_as_resident_states(found, mode):
    for rank in found:
        assert rank[mode] == dict.fromkeys(rank[mode], True)
