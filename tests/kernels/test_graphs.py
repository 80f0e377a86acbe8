"""What CUDA graphs of functions need beside layers, whose tests are those of models."""

import gc
import threading
import weakref

import pytest
import torch

from coat_kernels.graphs import WARM_UP, Graphs
from coat_kernels.graphs.memory import Memory, uncollected


class Node:
    """Garbage that only a collection ends, with what it holds."""

    def __init__(self, held=None):
        self.held, self.itself = held, self


@pytest.fixture
def often():
    """Collections after ten new containers that stay."""
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    yield
    gc.set_threshold(*before)


def allocate():
    return [[] for _ in range(1000)]


def test_garbage_stays_where_it_is_not_to_be_collected(often):
    with uncollected():
        node = weakref.ref(Node())
        allocate()
        assert node() is not None
    allocate()
    assert node() is None


def test_collections_go_on_as_before():
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("elsewhere", [in_a_thread, lambda call: call()], ids=["thread", "nested"])
def test_one_graph_is_recorded_at_a_time(elsewhere):
    first, second = (Memory(torch.device("cpu"), number) for number in range(2))
    assert first.record(lambda: [elsewhere(lambda: second.record(lambda: 1))]) == [None]
    assert second.refusal is None and second.record(lambda: 1) == 1


def test_another_graph_is_recorded_behind_an_error():
    memory = Memory(torch.device("cpu"), 0)
    with pytest.raises(KeyError):
        memory.record(lambda: {}["x"])
    assert memory.record(lambda: 1) == 1


@pytest.mark.gpu
def test_a_graph_that_becomes_garbage_does_not_end_in_a_recording(often):
    """CUDA would refuse the recording."""
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
