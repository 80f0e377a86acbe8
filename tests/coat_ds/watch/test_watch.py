"""When readings are taken, and what they are of."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import coat_ds
from coat_ds import CoatAdamW
from coat_ds.watch import Watch
from coat_kernels.autograd import observers
from tests.coat_ds.engines import engine_of
from tests.coat_ds.watch.parts import model
from tests.util import run_distributed


def nothing(reading):
    """An out, so that something is measured."""


class Counts(TorchDispatchMode):
    """Counts the operations of torch. On a GPU each is a launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_watch_costs_nothing_in_other_steps():
    counts = []
    for every in (0, 3):
        made = coat_ds.convert(model().bfloat16())
        optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
        watch, counts_of = Watch(made, optimizer, {"every": every}, [nothing]), []
        for step in range(1, 6):
            is_watched = every and step % every == 0
            assert (observers.current() is not None) == is_watched
            assert bool(optimizer._optimizer_step_pre_hooks) == is_watched
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in made.modules())
            with Counts() as counted:
                made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                watch.end_step()
            counts_of.append(counted.count)
        watch.close()
        counts.append(counts_of)
    unwatched, watched = counts
    assert [a == b for a, b in zip(unwatched, watched, strict=True)] == [True, True, False, False, True]


@pytest.mark.parametrize("config", [{"every": 0, "folder": "/proc"}, {"every": 1}])
def test_watch_measures_nothing_without_a_destination(config):
    made = coat_ds.convert(model().bfloat16())
    watch = Watch(made, CoatAdamW(made.named_parameters()), config)
    assert not watch.is_active and observers.current() is None
    made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
    watch.end_step()
    watch.close()
    assert watch.last is None


def test_watch_groups_tensors_and_layers_of_one_name():
    made, readings = coat_ds.convert(model().bfloat16()), []
    # one more number among the layers
    scale = torch.nn.Parameter(torch.ones(16, 64, dtype=torch.bfloat16))
    made.register_parameter("2", scale)
    optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
    watch = Watch(made, optimizer, {"every": 1}, [readings.append])
    # there are no states before the first step
    for _ in range(2):
        (made(torch.ones(16, 64, dtype=torch.bfloat16)) * scale).sum().backward()
        optimizer.step()
        watch.end_step()
    watch.close()
    assert readings[1].groups["*"].keys() >= {"update_error", "input_flushed"}


def test_watch_refuses_other_optimizers():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    made = coat_ds.convert(model().bfloat16())
    stock = torch.optim.AdamW(made.parameters())
    wrapped = Accelerator(cpu=True).prepare(CoatAdamW(made.named_parameters()))
    # it is one for the process
    AcceleratorState._reset_state(reset_partial_state=True)
    for optimizer, name in ((stock, "AdamW"), ([stock], "AdamW"), (wrapped, "AcceleratedOptimizer")):
        with pytest.raises(TypeError, match=f"CoatAdamW, .*{name}"):
            Watch(made, optimizer, {"every": 1})
    assert Watch(made, wrapped.optimizer).optimizers == [wrapped.optimizer]


def test_watch_goes_on_from_a_step():
    made, readings = model(), []
    watch = Watch(made, None, {"every": 4}, [readings.append])
    for start in (6, 11):
        watch.go_on_from(start)
        for _ in range(3):
            made(torch.ones(16, 64)).sum().backward()
            watch.end_step()
    # a loop that counts
    for step in (15, 16):
        watch.end_step(step)
    watch.close()
    assert [reading.step for reading in readings] == [8, 12, 16]


COMPILED = {
    "itself": lambda made, **how: made.compile(**how) or made,
    "a layer": lambda made, **how: made[0].compile(**how) or made,
    "a wrapper": lambda made, **how: torch.compile(made, **how),
}


@pytest.mark.each_value
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("way", COMPILED)
def test_watch_causes_no_recompilation(way, is_given):
    """is_given: the watch gets what `torch.compile` returns; otherwise the model that was compiled."""
    made, graphs = coat_ds.convert(model().bfloat16()), []
    torch._dynamo.reset()
    called = COMPILED[way](made, backend=lambda graph, inputs: graphs.append(graph) or graph)
    optimizer, readings = CoatAdamW(made.named_parameters(), min_numel=0), []
    watch = Watch(called if is_given else made, optimizer, {"every": 2}, [readings.append])
    counts = []
    for _ in range(10):
        called(torch.randn(16, 64).bfloat16()).sum().backward()
        optimizer.step()
        watch.end_step()
        counts.append(len(graphs))
    watch.close()
    # torch 2.11 makes a graph of each layer of a bare Sequential that has hooks
    assert counts == [counts[0]] * 10 and counts[0] <= 2
    figures = {figure for found in readings[-1].groups.values() for figure in found}
    assert len(readings) == 5 and figures >= {"update_error", "stalled", "underflowed"}


def two_ranks():
    """Each rank holds half of the optimizer's partition, and its own half of the batch."""
    block = {"optimizer": {"min_numel": 0}, "watch": {"every": 1}}
    engine = engine_of(model(), 2, block, train_micro_batch_size_per_gpu=4)
    seen = []
    engine.coat.watch.add(seen.append)
    rank = torch.distributed.get_rank()
    for step in range(3):
        # rank 0 reads zeros
        x = torch.full((4, 64), float(rank * (step + 1)), dtype=torch.bfloat16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    engine.destroy()
    return seen


def test_watch_sums_over_all_ranks():
    first, second = run_distributed(two_ranks, 2)
    assert first == second and [reading.step for reading in first] == [1, 2, 3]
    groups = first[-1].groups
    # both layers are one group: the first reads zeros on one rank, the second its biases
    assert groups["*"]["input_flushed"] == pytest.approx(0.25, abs=0.01)
    assert 0 < groups["*.weight"]["update_error"] < 0.1
