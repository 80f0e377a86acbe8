"""Cells of `test_zero.py` on two GPUs with NCCL: losses compared with stock AdamW's, and bytes of states."""

import warnings

import pytest
import torch

import coat_ds
from tests.coat_ds.cells import CELLS, FP8_BOUND, STEPS, TOLERANCE, run_stock, start, train_step
from tests.util import run_distributed

RANKS = 2
NAMES = [name for name in CELLS if name.startswith(("bf16", "master")) and not name.endswith("0")]
# two codes; in a group of 128 the first moment's scale, and the second's with its exponent
COMPRESSED = 2 + (4 + 5) / 128

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]


def work(backend):
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed(backend)
    out, known = {}, {}
    for name in NAMES:
        engine = start(CELLS[name])
        losses = [train_step(engine) for _ in range(STEPS)]
        devices = {t.device.type for state in engine.basic_optimizer.state.values() for t in stored(state)}
        out[name] = {
            "losses": losses,
            "stock": run_stock(CELLS[name], known),
            "bytes": coat_ds.state_bytes(engine),
            "devices": devices,
        }
    return out


def stored(state):
    return [t for name in ("exp_avg", "exp_avg_sq") for t in state[name].stored()]


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(work, RANKS, "nccl", gpus=True)


every_cell = pytest.mark.parametrize("name", NAMES)


@every_cell
def test_zero_over_nccl_has_losses_of_stock_adamw(ranks, name):
    for rank in ranks:
        ours, stock = rank[name]["losses"], rank[name]["stock"]
        assert stock[0] - stock[-1] > 0.05 * stock[0]
        for a, b in zip(ours, stock, strict=True):
            assert abs(a - b) <= FP8_BOUND * (stock[0] - b) + TOLERANCE["bf16"] * b


@every_cell
def test_zero_over_nccl_states_take_the_predicted_bytes(ranks, name):
    for rank in ranks:
        held = rank[name]["bytes"]
        assert rank[name]["devices"] == {"cuda"}
        if name.startswith("bf16"):
            # small tensors, and groups that a border between the ranks cuts, on top, as in test_zero.py
            assert COMPRESSED < held["bytes_per_parameter"] < 2.1 + 0.25
        else:
            # whole groups on either rank; remainders take 2 more
            remainder = 2 if name.startswith("master16") else 0
            assert held["parameters"] == 2 * 47 * 512 // RANKS
            assert held["bytes"] == (COMPRESSED + remainder) * held["parameters"]
