"""What ZeRO-3's hooks do to a model with a coat block, compared with what they do to it without our part."""

from unittest import mock

import pytest
import torch
from torch import nn

from coat_kernels.autograd.origin import maxima_of, take_passthrough, with_maxima, with_passthrough
from tests.coat_ds.engines import STATES, engine_of
from tests.util import run_distributed

H, STEPS = 32, 5


class Producer(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return with_maxima(y, y.detach().abs().amax(1))


class Consumer(nn.Linear):
    def forward(self, x):
        self.found = maxima_of(x)
        y = super().forward(x)
        with_passthrough(x, x.view_as(x), y)
        return y


class Block(nn.Module):
    """Without a weight of its own."""

    def __init__(self):
        super().__init__()
        self.produce, self.consume = Producer(H, H), Consumer(H, H)

    def forward(self, x):
        y = self.produce(x)
        z = self.consume(y)
        self.handed_on = take_passthrough(y) is not y
        return (z + y).relu()


class Borrower(nn.Module):
    """Uses the weight of another module, which DeepSpeed finds out."""

    def forward(self, x, other):
        return x @ other.weight


class Given(nn.Module):
    """Is handed a weight."""

    def forward(self, x, weight):
        return x @ weight


class Whole(nn.Module):
    """Hands a weight on, which DeepSpeed then gathers for this module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.borrow, self.given, self.lend = Borrower(), Given(), nn.Linear(H, H, bias=False)

    def forward(self, x):
        return self.given(self.borrow(self.lend(self.blocks(x)), self.lend), self.lend.weight)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = Whole()

    def forward(self, x):
        return self.whole(x).square().mean()


def _engine(model):
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    given = {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
    section = {"type": "AdamW", "params": {"lr": 1e-2}}
    sizes = {"train_micro_batch_size_per_gpu": 4, "bf16": None}
    return engine_of(model, 3, STATES, given, zero=zero, optimizer=section, **sizes)


def _input(step: int) -> torch.Tensor:
    return torch.randn(4, H, generator=torch.Generator().manual_seed(step), requires_grad=True)


def _compiled() -> list[float]:
    """Losses of a model that torch traces with DeepSpeed's hooks in it."""
    torch.manual_seed(0)
    engine = _engine(nn.Sequential(nn.Sequential(nn.Linear(H, H), nn.ReLU()), nn.Linear(H, H)))
    engine.compile(backend="eager")
    losses = []
    for step in range(STEPS):
        loss = engine(_input(step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def _run(frozen: bool = False, leaf: bool = False) -> dict:
    from deepspeed.utils import set_z3_leaf_modules

    torch.manual_seed(0)
    model = Model()
    if leaf:
        # gathered whole, though the weights are of its parts
        set_z3_leaf_modules(model, [Block])
    model.whole.lend.requires_grad_(not frozen)
    engine = _engine(model)
    names = {module: name for name, module in engine.module.named_modules()}
    found = {"losses": [], "visits": []}
    offload = engine.optimizer.parameter_offload
    visit = offload.pre_sub_module_backward_function
    offload.pre_sub_module_backward_function = lambda module: (visits.append(names[module]), visit(module))
    for step in range(STEPS):
        visits: list[str] = []
        loss = engine(_input(step))
        engine.backward(loss)
        found["held"] = {name for name, p in model.named_parameters() if p.numel()}
        engine.step()
        found["losses"].append(loss.item())
        found["visits"].append(visits)
    found["maxima"] = [block.consume.found is not None for block in model.whole.blocks]
    found["handed_on"] = [block.handed_on for block in model.whole.blocks]
    found["on_weights"] = [name for name, p in model.named_parameters() if "coat_notes" in vars(p)]
    engine.destroy()
    return found


def _worker():
    torch.distributed.init_process_group("gloo")
    runs = {"ours": _run(), "frozen": _run(frozen=True), "leaf": _run(leaf=True)}
    compiled = [_compiled()]
    with mock.patch("coat_ds.zero.engine.lighten_module_hooks"):
        runs |= {"stock": _run(), "stock frozen": _run(frozen=True), "stock leaf": _run(leaf=True)}
        return {"runs": runs, "compiled": [*compiled, _compiled()]}


@pytest.fixture(scope="module")
def found():
    return run_distributed(_worker, 1)[0]


@pytest.fixture(scope="module")
def runs(found):
    return found["runs"]


@pytest.mark.parametrize(
    "ours, stock", [("ours", "stock"), ("frozen", "stock frozen"), ("leaf", "stock leaf")]
)
def test_module_hooks_change_no_loss(runs, ours, stock):
    assert runs[ours]["losses"] == runs[stock]["losses"]
    assert runs[ours]["losses"][-1] < runs[ours]["losses"][0]
    # and what is gathered is released again
    assert runs[ours]["held"] == runs[stock]["held"] == set()


def test_module_hooks_of_a_compiled_model(found):
    ours, stock = found["compiled"]
    assert ours == stock and ours[-1] < ours[0]


def test_module_hooks_pass_notes_on(runs):
    for name, run in runs.items():
        # within a leaf there are no nodes
        arrives = not name.startswith("stock") or name.endswith("leaf")
        assert run["maxima"] == run["handed_on"] == [arrives] * 2
        assert not run["on_weights"]


def test_module_hooks_skip_modules_without_weights(runs):
    weighty = {f"whole.blocks.{i}.{part}" for i in (0, 1) for part in ("produce", "consume")}
    weighty |= {"whole", "whole.lend", "whole.borrow"}
    weightless = {"", "whole.blocks", "whole.blocks.0", "whole.blocks.1", "whole.given"}
    for visits in runs["ours"]["visits"][1:]:
        assert set(visits) == weighty
    for visits in runs["leaf"]["visits"][1:]:
        assert {"whole.blocks.0", "whole.blocks.1"} <= set(visits)
    # released after them when a forward is recomputed
    for name in ("stock", "frozen"):
        assert weightless <= set(runs[name]["visits"][-1])
