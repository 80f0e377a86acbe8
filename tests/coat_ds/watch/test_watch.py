"""When readings are taken, and what they are of."""

import copy

import deepspeed
import pytest
import torch

import coat_ds
from coat_ds import CoatAdamW
from coat_ds.watch import Watch
from coat_ds.watch.memory import held_bytes
from coat_ds.watch.outs import read
from coat_kernels.autograd import watching
from tests.coat_ds.watch.parts import model
from tests.util import run_distributed


def test_a_plain_loop(tmp_path):
    made = coat_ds.convert(model().bfloat16())
    optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
    watch = Watch(made, optimizer, {"every": 3, "folder": str(tmp_path)})
    for _ in range(10):
        made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.end_step()
    assert [r.step for r in read(tmp_path)] == [3, 6, 9]
    watch.close()
    groups = read(tmp_path)[-1].groups
    assert set(groups) == {"*.weight", "*"} and 0 < groups["*.weight"]["update_error"] < 0.1
    assert not made._forward_pre_hooks and not made._forward_hooks


def test_a_tensor_and_a_layer_of_one_group_share_its_figures():
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


def test_forwards_that_train_nothing_are_not_watched():
    made = coat_ds.convert(model().bfloat16())
    watch = Watch(made, None, {"every": 1}, [lambda reading: None])
    x = torch.ones(16, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        made(x)
    made.eval()(x)
    assert watching.observer() is None
    made.train()(x)
    assert watching.observer() is not None
    watch.close()


def test_other_optimizers_are_refused_by_name():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    made = coat_ds.convert(model().bfloat16())
    stock = torch.optim.AdamW(made.parameters())
    wrapped = Accelerator(cpu=True).prepare(CoatAdamW(made.named_parameters()))
    # it is one for the process
    AcceleratorState._reset_state(reset_partial_state=True)
    for optimizer, name in ((stock, "AdamW"), ([stock], "AdamW"), (wrapped, "AcceleratedOptimizer")):
        with pytest.raises(TypeError, match=f"expected a CoatAdamW, several of them or None, found {name}"):
            Watch(made, optimizer, {"every": 1})
    assert Watch(made, wrapped.optimizer).optimizers == [wrapped.optimizer]


def test_copies_of_a_model_are_not_watched(tmp_path):
    made = coat_ds.convert(model().bfloat16())
    watch = Watch(made, CoatAdamW(made.named_parameters()), {"every": 1, "folder": str(tmp_path)})
    torch.save(made, tmp_path / "model.pt")
    for other in (copy.deepcopy(made), torch.load(tmp_path / "model.pt", weights_only=False)):
        other(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
        assert watch._counter is None
    made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
    assert watch._counter is not None
    watch.close()
    assert watching.observer() is None


@pytest.mark.parametrize("config", [{"every": 0, "folder": "/proc"}, {"every": 1}])
def test_nothing_is_measured_where_nobody_wants_it(config):
    made = coat_ds.convert(model().bfloat16())
    watch = Watch(made, CoatAdamW(made.named_parameters()), config)
    assert not watch.is_active and not made._forward_pre_hooks
    made(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
    assert watch._counter is None
    watch.end_step()
    assert watch.last is None


def test_of_a_step_of_several_forwards_the_first_one_is_what_is_saved():
    """As with gradient accumulation, and an evaluation in between."""
    saved = []
    for count in (1, 3):
        made, readings = model(), []
        optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
        watch = Watch(made, optimizer, {"every": 1}, [readings.append])
        for _ in range(count):
            made(torch.ones(16, 64)).sum().backward()
            with torch.no_grad():
                made.eval()(torch.ones(16, 64))
            made.train()
        optimizer.step()
        watch.end_step()
        watch.close()
        saved.append(readings[-1].memory["saved"])
    # the inputs of both layers in FP32, and no weight
    assert saved == [2 * 16 * 64 * 4] * 2


def test_tensors_of_two_optimizers_are_in_one_reading():
    made, readings = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64) for name in "ab"}), []
    optimizers = [CoatAdamW(list(made[name].named_parameters()), min_numel=0) for name in "ab"]
    made.forward = lambda x: made["b"](made["a"](x))
    watch = Watch(made, optimizers, {"every": 2}, [readings.append])
    for _ in range(2):
        made(torch.randn(16, 64)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        watch.end_step()
    watch.close()
    for name in "ab":
        assert 0 < readings[0].groups[f"{name}.weight"]["update_error"] < 0.1


def test_a_loop_that_resumes_counts_on():
    made, readings = model(), []
    watch = Watch(made, None, {"every": 4}, [readings.append])
    watch.go_on_from(6)
    for _ in range(4):
        made(torch.ones(16, 64)).sum().backward()
        watch.end_step()
    watch.close()
    assert [reading.step for reading in readings] == [8]


COMPILED = {
    "itself": lambda made, **how: made.compile(**how) or made,
    "a layer": lambda made, **how: made[0].compile(**how) or made,
    "a wrapper": lambda made, **how: torch.compile(made, **how),
}


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("way", COMPILED)
def test_a_reading_has_nothing_compiled_again(way, is_given):
    """is_given: the watch gets what `torch.compile` returns; otherwise the model that was compiled."""
    made, graphs, said = coat_ds.convert(model().bfloat16()), [], []
    torch._dynamo.reset()
    called = COMPILED[way](made, backend=lambda graph, inputs: graphs.append(graph) or graph)
    optimizer, readings = CoatAdamW(made.named_parameters(), min_numel=0), []
    watch = Watch(
        called if is_given else made,
        optimizer,
        {"every": 2},
        [readings.append],
        say=lambda line, level: said.append(line),
    )
    counts = []
    for _ in range(10):
        called(torch.randn(16, 64).bfloat16()).sum().backward()
        optimizer.step()
        watch.end_step()
        counts.append(len(graphs))
    watch.close()
    # torch 2.11 makes a graph of each layer of a bare Sequential that has hooks
    assert counts == [counts[0]] * 10 and counts[0] <= 2
    assert len(readings) == 5 and len(said) == 1 and "no codes" in said[0]
    figures = {figure for found in readings[-1].groups.values() for figure in found}
    assert figures == {"update_error", "stalled", "underflowed"}
    assert readings[-1].memory["states"] and "saved" not in readings[-1].memory


def test_copies_of_weights_are_counted():
    from tests.coat_ds.watch.test_engine import llama

    made = coat_ds.convert(llama(), {"weight_cache": "fp8"})
    ids = torch.arange(32).view(1, 32)
    made(ids, labels=ids).loss.backward()
    linears = [made.get_submodule(name).weight for name in coat_ds.conversion_of(made).converted["linear"]]
    # by rows and by columns; and the scale twice, of four products in each of two layers
    held = held_bytes(made, [], [*made.parameters(), torch.zeros(5)])
    assert held["fp8_copies"] == 2 * sum(w.numel() for w in linears) + 8 * 4 * 2
    # a weight that is its own master is no other
    assert held["weights"] > 2 * 4 * 64 * 64 and held["masters"] == 5 * 4


def two_ranks():
    """Each rank holds half of the optimizer's partition, and its own half of the batch."""
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "coat": {"enabled": True, "optimizer": {"min_numel": 0}, "watch": {"every": 1}},
    }
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    seen = []
    engine.coat.watch.add(seen.append)
    rank = torch.distributed.get_rank()
    for step in range(3):
        # rank 0 reads zeros
        x = torch.full((4, 64), float(rank * (step + 1)), dtype=torch.bfloat16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    last = engine.coat.watch.last
    engine.destroy()
    return last.groups, len(seen)


def test_sums_are_over_all_ranks():
    (first, written), (second, unwritten) = run_distributed(two_ranks, 2)
    assert first == second
    assert (written, unwritten) == (3, 0)
    # both layers are one group: the first reads zeros on one rank, the second its biases
    assert first["*"]["input_flushed"] == pytest.approx(0.25, abs=0.01)
    assert 0 < first["*.weight"]["update_error"] < 0.1
