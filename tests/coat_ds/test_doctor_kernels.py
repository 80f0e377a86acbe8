"""`coat doctor --kernels` reaches every kernel, without a GPU in the interpreter, and finds a damaged one."""

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from coat_ds import cli
from coat_ds.doctor import kernels
from coat_kernels import activation as act
from coat_kernels import norm, rope, tensorwise
from coat_kernels.tensorwise import together
from tests.kernels.test_offline import HOPPER_ALONE
from tests.kernels.test_offline import kernels as all_kernels

PATHS = {"scaled_matmul", "accumulate_matmul", "grouped_experts"}


@pytest.fixture
def here(device, monkeypatch):
    """The command runs on `device`, on a CPU with the kernels and small sizes, and makes each check once."""
    measure, most = kernels.measure, 4096 if device.type == "cuda" else 24
    if device.type == "cpu":
        operands, scale, quantize = tensorwise.operands, tensorwise.scale, tensorwise.quantize
        for module in (act.op, norm.op, rope.op, operands, scale, quantize, tensorwise.transpose, together):
            monkeypatch.setattr(module, "uses_kernels", lambda x: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(kernels, "gpus", lambda: [["interpreter", 9, 0]])
    monkeypatch.setattr(kernels, "measure", lambda seed, seconds, _: measure(seed, 0.0, device, most))


def test_every_kernel_and_path_is_checked(here, device, monkeypatch):
    launched = set()
    for kind in (JITFunction, InterpretedFunction):

        def run(self, *args, launch=kind.run, **how):
            launched.add(self.fn.__name__)
            return launch(self, *args, **how)

        monkeypatch.setattr(kind, "run", run)
    found = kernels.check(0)
    assert found[0].check == "seed" and not [f for f in found if f.state == kernels.PROBLEM]
    assert {f.check for f in found[1:]} == all_kernels() | PATHS
    skipped = {f.check for f in found if f.state == kernels.UNKNOWN}
    assert skipped <= HOPPER_ALONE
    # on a GPU what was compiled before is launched past triton
    assert device.type == "cuda" or launched == all_kernels()


def test_a_damaged_kernel_is_named_with_the_case(here, monkeypatch, capsys):
    damaged = norm.norm_backward_triton

    def scaled(*args):
        grad_x, *rest = damaged(*args)
        return grad_x * 1.01, *rest

    monkeypatch.setattr(norm, "norm_backward_triton", scaled)
    monkeypatch.setattr(kernels, "CHECKS", (kernels.check_groups, kernels.check_norm))
    found = {f.check: f for f in kernels.check(4)}
    assert [name for name, f in found.items() if f.state == kernels.PROBLEM] == ["norm_backward_kernel"]
    assert found["norm_backward_kernel"].text.endswith("To repeat it: coat doctor --kernels 5")
    # the fixture's GPU is none for the other checks
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "check", lambda seed: list(found.values()))
    assert cli.main(["doctor", "--kernels", "4"]) == 1 and "--kernels 5" in capsys.readouterr().out


def test_a_kernel_that_does_not_compile_is_a_problem_beside_the_others(here, monkeypatch):
    def out_of_memory(*args):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(norm, "norm_backward_triton", out_of_memory)
    monkeypatch.setattr(kernels, "CHECKS", (kernels.check_groups, kernels.check_norm))
    found = {f.check: f for f in kernels.check(4)}
    assert [name for name, f in found.items() if f.state == kernels.PROBLEM] == ["check_norm"]
    assert "RuntimeError: out of resource: shared memory. To repeat it" in found["check_norm"].text
    assert found["quantize_groups_kernel"].state == found["norm_forward_kernel"].state == kernels.OK


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_is_one_line(capsys):
    assert cli.main(["doctor", "--kernels"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if " kernels " in line)
    assert line.split() == ["-", "kernels", *kernels.NO_GPU.split()]
