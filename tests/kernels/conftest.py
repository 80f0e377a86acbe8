"""Fixtures of the kernel tests. New memory is filled with NaN, so that an element that no kernel writes is
noticed. Every launch must pass `enable_fp_fusion=True`."""

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from coat_kernels import activation as act
from coat_kernels import experts, norm, rope, tensorwise
from tests.interpreter import take_kernels
from tests.kernels.producers import PRODUCERS


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            t = allocate(*args, **kwargs)
            if t.numel():
                # all bits set: NaN in every floating type used here, and an extreme exponent
                t.as_strided((t.numel(),), (1,)).view(torch.uint8).fill_(0xFF)
            return t

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def every_launch_is_fused(monkeypatch):
    """Launches set `enable_fp_fusion` explicitly, because triton's default changes from release to
    release."""
    for kind in (JITFunction, InterpretedFunction):

        def run(self, *args, launch=kind.run, **how):
            if self.fn.__module__.startswith("coat_kernels"):
                assert how.get("enable_fp_fusion") is True, f"{self.fn.__name__} is launched without FUSED"
            return launch(self, *args, **how)

        monkeypatch.setattr(kind, "run", run)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(42)


@pytest.fixture(params=[False, True], ids=["reference", "kernels"])
def takes_kernels(request, device):
    """Whether a test runs the kernels. A GPU always runs them; on a CPU the test switches its modules to
    kernels."""
    if not request.param and device.type == "cuda":
        pytest.skip("a GPU takes the kernels")
    return request.param


@pytest.fixture
def kernels(takes_kernels, monkeypatch):
    """Runs a test with the references and with the kernels. Each kernel program covers several tiles, the
    last one partial."""
    if takes_kernels:
        take_kernels(monkeypatch)
        for tile in ("FORWARD", "BACKWARD", "OPERANDS"):
            monkeypatch.setattr(act.kernels, f"{tile}_ROWS", 16)
            monkeypatch.setattr(act.kernels, f"{tile}_COLUMNS", 32)
        monkeypatch.setattr(act.kernels, "SUMMED_ROWS", 32)
        sizes = {"ROW_BLOCK": 32, "SUM_BLOCK": 32, "GATHER_BLOCK": 8, "ORDER_TILE": 128, "ORDER_PROGRAMS": 4}
        for tile, size in sizes.items():
            monkeypatch.setattr(experts.kernels, tile, size)
        for tile, size in {"GATE_M": 16, "GATE_N": 32, "FORWARD_COLUMNS": 32, "FINISH_ROWS": 32}.items():
            monkeypatch.setattr(experts.gate_kernels, tile, size)
        monkeypatch.setattr(experts.kernels, "COLUMNS_TILE", (16, 32))
        monkeypatch.setattr(norm.kernels, "FORWARD_TILE", 1024)
        monkeypatch.setattr(rope.kernels, "OPERANDS_TOKENS", 8)
        monkeypatch.setattr(rope.kernels, "OPERANDS_HEADS", 3)
        monkeypatch.setattr(tensorwise.scale, "CORRECTING_PROGRAMS", 3)


@pytest.fixture(params=PRODUCERS)
def producer(request, device):
    return PRODUCERS[request.param](device)
