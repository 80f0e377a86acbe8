"""CUDA graphs of functions. The tests of CUDA graphs of layers are with the models."""

import gc
import itertools
import threading
import weakref

import pytest
import torch

from coat_kernels.graphs import Graphs, memory
from coat_kernels.graphs.memory import Memory, uncollected
from coat_kernels.graphs.verify import compare, saved_for_backward
from coat_kernels.graphs.warm_up import WARM_UP


class Node:
    """Garbage in a reference cycle: only the garbage collector frees it and what it holds."""

    def __init__(self, held=None):
        self.held, self.itself = held, self


@pytest.fixture
def often():
    """Runs the garbage collector after every ten new containers."""
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    yield
    gc.set_threshold(*before)


def allocate():
    return [[] for _ in range(1000)]


def test_graphs_leave_garbage_where_it_is_not_to_be_collected(often):
    with uncollected():
        node = weakref.ref(Node())
        allocate()
        assert node() is not None
    allocate()
    assert node() is None


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("elsewhere", [in_a_thread, lambda call: call()], ids=["thread", "nested"])
def test_graphs_are_recorded_one_at_a_time(elsewhere):
    first, second = (Memory(torch.device("cpu"), number) for number in range(2))
    assert first.record(lambda: [elsewhere(lambda: second.record(lambda: 1))]) == [None]
    assert second.refusal is None and second.record(lambda: 1) == 1


def test_graphs_are_recorded_again_behind_an_error():
    memory = Memory(torch.device("cpu"), 0)
    with pytest.raises(KeyError):
        memory.record(lambda: {}["x"])
    assert memory.record(lambda: 1) == 1


@pytest.mark.gpu
def test_graphs_that_become_garbage_do_not_end_in_a_recording(often):
    """CUDA would fail the recording."""
    old = [torch.cuda.CUDAGraph()]
    with torch.cuda.graph(old[0]):
        torch.zeros(1, device="cuda")

    def double(x):
        if old and torch.cuda.is_current_stream_capturing():
            Node(old.pop())
            allocate()
        return 2 * x

    graphs, x = Graphs(), torch.ones(8, device="cuda")
    with torch.no_grad():
        for _ in range(WARM_UP + 2):
            assert graphs.call(double, x, (), evaluates=True).equal(2 * x)
    assert graphs.evaluated == 1 and not old


@pytest.fixture
def trusted(monkeypatch):
    """A process in which no graph has failed its comparison yet."""
    monkeypatch.setattr(memory, "_distrusted", [])


NAN = torch.tensor([1.0, torch.nan])
REPLAYS = {
    "equal": (torch.ones(2), [torch.ones(2)], True),
    "NaN in both": (NAN, [NAN.clone()], True),
    "nothing in both": (None, [None], True),
    "NaN in the replay": (NAN, [torch.ones(2)], False),
    "NaN in the eager pass": (torch.ones(2), [NAN], False),
    "a last bit": (torch.ones(2), [torch.ones(2) + 2**-23], True),
    "more than BF16 rounds by": (torch.ones(2), [torch.ones(2) + 2**-7], False),
    # eager passes that differ by 0.01
    "near": (torch.full((2,), 1.02), [torch.ones(2), torch.full((2,), 1.01)], True),
    "beyond": (torch.full((2,), 1.05), [torch.ones(2), torch.full((2,), 1.01)], False),
    "codes": (torch.tensor([1, 2], dtype=torch.int8), [torch.tensor([1, 3], dtype=torch.int8)], False),
}


@pytest.mark.parametrize("case", REPLAYS)
def test_graphs_replay_as_near_as_eager_passes_are_to_each_other(case):
    replayed, eager, expected = REPLAYS[case]
    passes = itertools.cycle(eager)
    assert (compare([replayed], lambda: [next(passes)], bool)[0] is None) == expected
    # every rank of a group has to find the difference
    passes = itertools.cycle(eager)
    assert compare([replayed], lambda: [next(passes)], lambda ok: False)[0] is not None


def test_graphs_compare_what_is_saved_for_backward():
    def run(scale):
        x = torch.ones(3, requires_grad=True)
        return saved_for_backward(((x * scale).exp() * 2.0).sum().grad_fn)

    first, same, other = run(2.0), run(2.0), run(3.0)
    assert len(first) == len(other) >= 1
    assert compare(first, lambda: same, bool)[0] is None and compare(first, lambda: other, bool)[0] > 0


def test_graphs_are_not_recorded_where_two_versions_of_a_library_are_mixed(trusted, monkeypatch, caplog):
    """A replay might read memory that belongs to another tensor, which the comparison cannot survive."""
    monkeypatch.setattr(memory, "_mixed_libraries", lambda: "two versions of cudnn")
    first, second = (Memory(torch.device("cpu"), number) for number in range(2))
    assert first.record(lambda: 1) is None and second.record(lambda: 1) is None
    assert "cudnn" in first.refusal and second.refusal is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


class Breakable:
    """Numbers that kernels multiply by. A recorded pass reads another number as `wrong`."""

    def __init__(self, wrong: str):
        self.wrong = wrong

    def read(self, name: str) -> float:
        return 1000.0 if torch.cuda.is_current_stream_capturing() and name == self.wrong else 1.0


class Scale(torch.autograd.Function):
    """Computes x * w and the gradients of both."""

    @staticmethod
    def forward(ctx, x, w, numbers):
        ctx.save_for_backward(x * numbers.read("saved"), w)
        ctx.numbers = numbers
        return x * w * numbers.read("forward")

    @staticmethod
    def backward(ctx, grad):
        kept, w = ctx.saved_tensors
        return grad * w * ctx.numbers.read("backward"), (grad * kept).sum().reshape(1), None


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["nothing", "forward", "saved", "backward", "evaluation"])
def test_graphs_that_replay_wrongly_are_not_used(wrong, trusted, caplog):
    """The recorded pass differs from the eager pass: results and gradients are those of the eager pass, and
    the process continues without graphs."""
    numbers = Breakable(wrong)

    def function(x, w):
        if torch.is_grad_enabled():
            return Scale.apply(x, w, numbers)
        return x * w * numbers.read("evaluation")

    graphs, w = Graphs(), torch.full((1,), 3.0, device="cuda", requires_grad=True)
    for step in range(WARM_UP + 4):
        x = torch.randn(8, device="cuda").requires_grad_()
        y = graphs.call(function, x * 1, (w,))
        found = torch.autograd.grad(y, (x, w), torch.full_like(y, 2.0))
        assert y.equal(3 * x) and found[0].equal(torch.full_like(x, 6.0)), step
        torch.testing.assert_close(found[1], 2 * x.detach().sum().reshape(1))
        with torch.no_grad():
            assert graphs.call(function, x.detach(), (w,), evaluates=True).equal(3 * x)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (wrong != "nothing")
    refusal = Memory(torch.device("cuda"), 0).refusal
    if wrong == "nothing":
        assert graphs.count == 1 and graphs.evaluated == 1 and refusal is None
    else:
        assert refusal is not None


@pytest.mark.gpu
def test_graphs_add_once_where_backward_adds(trusted):
    """The gradient is accumulated once, as into Megatron's main_grad, although the comparison runs the pass
    too."""
    graphs, w = Graphs(), torch.full((1,), 3.0, device="cuda", requires_grad=True)
    total = torch.zeros(1, device="cuda")

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            # not x itself, which lies in a buffer that other graphs use
            ctx.save_for_backward(x * 1, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            total.add_((grad * x.detach()).sum())
            return grad * w, torch.zeros_like(w)

    x = torch.ones(8, device="cuda", requires_grad=True)
    for step in range(1, WARM_UP + 5):
        y = graphs.call(Adds.apply, x * 1, (w,), grad_buffers=lambda: [total])
        torch.autograd.grad(y.sum(), (x, w))
        assert total.item() == 8 * step
    assert graphs.count == 1
