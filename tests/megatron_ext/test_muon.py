"""Megatron's `--optimizer muon`: with COAT's layers, and with COAT's AdamW for the other parameters."""

from unittest import mock

import pytest
from megatron.core import parallel_state

from megatron_ext import cpu
from megatron_ext.optimizer import seam
from tests.megatron_ext.ranks import join
from tests.megatron_ext.test_moe import EACH_ONE, EXPERTS
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
def test_layers_and_adam_beside_muon(tp, tmp_path):
    found = run_distributed(work, 2, tp, str(tmp_path))[0]
    _, expected, *_ = found["sdpa", False]
    learnt = expected[0] - expected[2]
    for (layers, ours), (parts, before, behind, again) in found.items():
        assert parts == ["TensorParallelMuon", "MegatronAdamW" if ours else "AdamW"]
        assert again == behind
        apart = max(abs(a - b) for a, b in zip(before, expected, strict=True))
        assert (apart == 0) == (layers == "sdpa") and apart < learnt / 10


@pytest.mark.parametrize("grouped", [False, True], ids=["one after another", "grouped"])
def test_experts_that_muon_does_not_train_are_named(megatron, caplog, grouped):
    seam.watch()
    sizes = EXPERTS | EACH_ONE | {"moe_grouped_gemm": grouped}
    with cpu.no_cuda(), mock.patch.dict(MODES, muon={"optimizer": "muon"}):
        trainer = Trainer("muon", "coat", **sizes)
    names = {p: name for name, p in trainer.model.module.named_parameters()}
    trained_by = {
        type(part.optimizer).__name__
        for part in trainer.optimizer.chained_optimizers
        for group in part.float16_groups
        for p in group
        if ".experts." in names[p]
    }
    assert trained_by == {"AdamW" if grouped else "TensorParallelMuon"}
    begins = "COAT: --moe-grouped-gemm: Megatron gives TensorParallelMuon matrices alone"
    assert len([line for line in caplog.messages if line.startswith(begins)]) == grouped
