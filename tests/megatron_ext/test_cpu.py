"""The changes that let Megatron run on a CPU can be applied and fully undone."""

import runpy
import sys

import pytest
import torch
from megatron.core.tensor_parallel import random

from megatron_ext import cpu
from tests.util import run_distributed

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def values() -> list[object]:
    return [getattr(patch.owner(), patch.attribute) for patch in cpu.ON_CPU]


@pytest.fixture
def disabled():
    was = cpu.enabled()
    cpu.disable()
    yield
    cpu.disable()
    if was:
        cpu.enable()


@without_gpu
def test_cpu_enable_and_disable_restore_everything(disabled, caplog, monkeypatch):
    monkeypatch.setattr(cpu, "_announced", False)
    cuda, before = dict(vars(torch.cuda)), values()
    for _ in range(2):
        assert cpu.enable() and cpu.enable()
        assert all(now is not then for now, then in zip(values(), before, strict=True))
        assert torch.cuda.current_device() == torch.device("cpu")
        cpu.disable()
        assert not cpu.enabled()
        assert all(now is then for now, then in zip(values(), before, strict=True))
    assert dict(vars(torch.cuda)) == cuda
    # one log line names all places
    (record,) = caplog.records
    assert all(patch.symbol in record.getMessage() for patch in cpu.ON_CPU)


def test_cpu_no_cuda_does_nothing_while_disabled(disabled):
    with cpu.no_cuda():
        assert torch.empty(1).type() == "torch.FloatTensor"


@without_gpu
def test_cpu_random_states_of_the_tracker_are_independent(disabled):
    cpu.enable()
    tracker = random.CudaRNGStatesTracker()
    tracker.add("test", 7)
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    with tracker.fork("test"):
        first = torch.rand(4)
    torch.testing.assert_close(torch.rand(4), expected, rtol=0, atol=0)
    with tracker.fork("test"):
        assert not torch.equal(torch.rand(4), first)


@pytest.mark.gpu
def test_cpu_enable_does_nothing_with_a_gpu(disabled):
    before = values()
    assert not cpu.enable()
    assert all(now is then for now, then in zip(values(), before, strict=True))


SCRIPT = """
import sys
import torch
from beside import NAME
assert __name__ == "__main__" and sys.argv[1:] == ["--flag", "value"] and NAME == "beside"
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
x = torch.ones(2, device="cuda").cuda()
assert x.device.type == "cpu" and x.type() == "torch.cuda.FloatTensor"
assert x.type(torch.float16).dtype == torch.float16
assert torch.ones(2, device="cuda:0").device.type == "cpu"
# pinned for a GPU, by a script or by a data loader
assert not torch.accelerator.is_available() and torch.zeros(2, pin_memory=True).sum() == 0
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    torch.cuda.Event(enable_timing=True).record()
assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
torch.cuda.manual_seed(3)
state, first = torch.cuda.get_rng_state(), torch.rand(4)
torch.cuda.set_rng_state(state)
assert torch.rand(4).equal(first)
torch.cuda.manual_seed(3)
assert torch.rand(4).equal(first)
"""


def run_as_module(script):
    """As `python -m tests.megatron_ext.scripted`, in a process that has imported the frameworks."""
    sys.argv = ["scripted.py", script, "--flag", "value"]
    runpy.run_module("tests.megatron_ext.scripted", run_name="__main__", alter_sys=True)


@without_gpu
def test_cpu_runs_scripts_as_if_there_were_a_gpu(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "script.py").write_text(SCRIPT)
    run_distributed(run_as_module, 1, str(tmp_path / "script.py"))
