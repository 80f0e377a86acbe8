"""Megatron's `--optimizer muon`: with COAT's layers, and with COAT's AdamW for the other parameters."""

from unittest import mock

import pytest
from megatron.core import parallel_state

from megatron_ext import cpu
from tests.megatron_ext.ranks import join
from tests.megatron_ext.trainer import MODES, Trainer, installed
from tests.util import run_distributed

pytest.importorskip(
    "emerging_optimizers",
    reason="needs NVIDIA's Emerging-Optimizers, which no package index has, and Python 3.12",
)
# layers, and whether COAT steps the other parameters
CASES = (("sdpa", False), ("coat", False), ("coat", True))


def work(tp, folder):
    """For each case: the optimizers' names, and losses before a checkpoint is saved, after it, and resumed
    from it."""
    found = {}
    for layers, ours in CASES:
        join(tp)
        with installed() if ours else cpu.no_cuda(), mock.patch.dict(MODES, muon={"optimizer": "muon"}):
            trainer, path = Trainer("muon", layers), f"{folder}/{layers}-{ours}"
            parts = [type(part.optimizer).__name__ for part in trainer.optimizer.chained_optimizers]
            before = trainer.steps(0, 1, 0, 1)
            trainer.save(path, "fully_reshardable")
            behind = trainer.steps(0, 1)
            trainer.load(path, "fully_reshardable")
            found[layers, ours] = parts, before, behind, trainer.steps(0, 1)
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_muon_with_coat_layers_and_adam(tp, tmp_path):
    found = run_distributed(work, 2, tp, str(tmp_path))[0]
    _, expected, *_ = found["sdpa", False]
    learnt = expected[0] - expected[2]
    for (layers, ours), (parts, before, behind, again) in found.items():
        assert parts == ["TensorParallelMuon", "MegatronAdamW" if ours else "AdamW"]
        assert again == behind
        apart = max(abs(a - b) for a, b in zip(before, expected, strict=True))
        assert (apart == 0) == (layers == "sdpa") and apart < learnt / 10
