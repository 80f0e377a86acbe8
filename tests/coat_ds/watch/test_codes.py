"""Codes are counted where they are made, under the names of their layers, and put in by hand."""

import pytest
import torch

import coat_ds
from coat_ds.saved_bytes import is_weight_of
from coat_ds.watch import codes
from coat_ds.watch.codes import Blocks, CodeCounter, SavedCodes, figures
from coat_kernels.autograd import watching
from coat_kernels.groups import GROUP_FORMATS, Grouped, quantize_groups
from coat_kernels.tensorwise import PredictedScale
from tests.coat_ds.watch.parts import with_graphs
from tests.util import hooks_of_watch


def figures_of(counter, name):
    return figures(counter.sums(torch.device("cpu"))[counter.index[name]].tolist())


@pytest.fixture
def observed():
    """Observes a model with what it makes."""

    def start(model):
        counter = CodeCounter(model)
        watching.observe(counter)
        return counter

    yield start
    watching.observe(None)


def linear():
    torch.manual_seed(0)
    return coat_ds.convert(torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).bfloat16())


def test_flushed_and_saturated_codes_of_a_linear_layer(observed):
    model = linear()
    counter = observed(model)
    x = torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        # 448 / 2^10 is the amax's code: 2^-10 of the smallest subnormal is lost
        x[:, :16] = 2.0**-30
        x[0] = 0
    y = model(x)
    grad = torch.full_like(y, 2.0**-3)
    grad[:4] = 2.0**-100
    grad[4, 0] = float("inf")
    y.backward(grad)
    found = figures_of(counter, "0")
    assert found["input_flushed"] == (15 * 16 + 64) / (16 * 64)
    assert found["input_saturated"] == 15 * 48 / (16 * 64)
    assert found["gradient_flushed"] == 4 / 16
    # E5M2's largest code is for a power of four: 2^-3 is below it. Infinity is NaN.
    assert found["gradient_saturated"] == 1 / (16 * 32)


@pytest.mark.parametrize(
    "dtype, largest, next_largest", [(torch.float8_e4m3fn, 448, 416), (torch.float8_e5m2, 57344, 49152)]
)
def test_the_largest_code_and_what_is_not_finite_are_saturated(dtype, largest, next_largest):
    model = linear()
    counter = CodeCounter(model)
    values = [[largest, -largest, next_largest, -next_largest, float("nan"), 1, 0, -0.0]]
    counter.codes("gradient", model[0].forward.grad_scale, torch.tensor(values).to(dtype))
    assert figures_of(counter, "0") == {"gradient_flushed": 2 / 8, "gradient_saturated": 3 / 8}


def test_nobody_is_told_when_nothing_is_watched():
    model = linear()
    assert watching.observer() is None
    model(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize("fmt, largest", [("sqrt8", 127**2), ("e4m3", 448)])
def test_saved_codes_in_groups(fmt, largest):
    counter = CodeCounter(linear())
    x = torch.full((4, 64), 2.0**-40)
    # a group of zeros does not count; of the others, one element is large and 15 are lost
    x[:, ::16] = 1.0
    x[0] = 0
    q = quantize_groups(x, 16, fmt)
    saved = SavedCodes(counter, lambda address: False)
    watching.observe(counter)
    with saved.counting():
        kept = Keeps.apply(torch.ones(2, requires_grad=True), *q.tensors)
    watching.observe(None)
    found = figures_of(counter, "other")
    assert found["saved_flushed"] == 15 / 16
    top = q.format.from_codes(q.codes[1:]).abs().max()
    assert found["saved_saturated"] == (1 / 16 if top == largest else 0)
    assert saved.nbytes == q.codes.nbytes + q.exponent.nbytes
    del kept


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *kept):
        ctx.save_for_backward(*kept)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def test_the_largest_roots_are_of_either_sign():
    counter = CodeCounter(linear())
    values = torch.tensor([[127, -127, -128, 126, -126, 1, -1, 0]], dtype=torch.int8)
    exponent = torch.tensor([[9]], dtype=torch.uint8)
    counter.saved("other", Grouped(values.view(torch.uint8), exponent, GROUP_FORMATS["sqrt8"]))
    assert figures_of(counter, "other") == {"saved_flushed": 1 / 8, "saved_saturated": 3 / 8}


def test_wrong_predictions():
    model = linear()
    counter = CodeCounter(model)
    scale = model[0].forward.x_scale
    for used in (1.0, 2.0, 2.0, 4.0):
        counter.predicted(scale, torch.tensor([used]), torch.tensor([2.0]))
    counter.predicted(PredictedScale(None), torch.tensor([1.0]), torch.tensor([1.0]))
    assert figures_of(counter, "0") == {"wrong_scales": 0.5}
    assert figures_of(counter, "other") == {"wrong_scales": 0.0}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, **sizes))
    return coat_ds.convert(model.bfloat16())


def test_a_llama_names_all_of_its_products(observed):
    """By fused blocks. No GEMM is counted under the name of another, and none is missed."""
    model = llama()
    ids = torch.arange(32).view(1, 32)
    model(ids, labels=ids).loss.backward()
    counter = observed(model)
    saved = SavedCodes(counter, lambda address: False)
    blocks = Blocks(saved)
    blocks.open()
    loss = model(ids, labels=ids).loss
    blocks.close()
    loss.backward()
    names = [name for name in counter.index if "input_flushed" in figures_of(counter, name)]
    expected = [
        f"model.layers.{i}.{part}"
        for i in range(2)
        for part in ("qkv", "self_attn.o_proj", "mlp.both", "mlp.down_proj")
    ]
    assert sorted(names) == sorted(expected)
    for name in names:
        found = figures_of(counter, name)
        assert 0 <= found["input_flushed"] < 0.1 and "gradient_flushed" in found, (name, found)
        # the same batch again: all predictions of what is made by kernels of ours hold
        assert found.get("wrong_scales", 0.0) == 0.0, name
    for i in range(2):
        assert figures_of(counter, f"model.layers.{i}")["saved_flushed"] < 0.05
    assert not hooks_of_watch(model)


def test_predictions_are_wrong_once_the_scale_jumps(observed):
    model = llama()
    ids = torch.arange(32).view(1, 32)
    model(ids, labels=ids).loss.backward()
    counter = observed(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.mul_(64)
    model(ids, labels=ids).loss.backward()
    # the input's was wrong, the gradient's right
    assert figures_of(counter, "model.layers.0.mlp.both")["wrong_scales"] == 0.5
    assert figures_of(counter, "model.layers.0.qkv")["wrong_scales"] == 0.0


@pytest.fixture
def replayed():
    model = llama()
    with_graphs(model.model.layers)
    return model


def saved_in_a_forward(counter, model, *turn):
    """The blocks whose saved tensors were seen, and what the forward saved as it was counted."""
    saved = SavedCodes(counter, is_weight_of(model))
    blocks = Blocks(saved, *turn)
    blocks.open()
    ids = torch.arange(32).view(1, 32)
    loss = model(ids, labels=ids).loss
    blocks.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    loss.backward()
    return set(saved._blocks.values()) - {"other"}, blocks.nbytes


NAMES = ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("turns, periods", [(1, 1), (2, 2), (8, 2)])
def test_blocks_of_graphs_take_turns(replayed, monkeypatch, turns, periods):
    monkeypatch.setattr(codes, "TURNS", turns)
    plain = llama()
    saved_in_a_forward(CodeCounter(plain), plain)
    seen, nbytes = saved_in_a_forward(CodeCounter(plain), plain)
    assert sorted(seen) == NAMES
    saved_in_a_forward(CodeCounter(replayed), replayed)
    for turn in range(5):
        counter = CodeCounter(replayed)
        seen, found = saved_in_a_forward(counter, replayed, turn)
        expected = NAMES if periods == 1 else [NAMES[turn % 2]]
        assert sorted(seen) == expected
        # what was not seen counts as what was, with both tables of RoPE, which layers share
        assert found == nbytes + (0 if periods == 1 else 2 * 32 * 16 * 4)
        sums = counter.sums(torch.device("cpu"))
        left_out = {name for name, row in counter.index.items() if sums[row, codes.REPLAYED]}
        assert left_out == {n for n in counter.index if n[:14] in set(NAMES) - set(expected)}


def test_a_suspect_is_looked_at_each_time(replayed):
    for turn in range(2):
        seen, _ = saved_in_a_forward(CodeCounter(replayed), replayed, turn, ["model.layers.1.mlp.both"])
        assert seen == {NAMES[1]} | ({NAMES[0]} if turn == 0 else set())


def test_hooks_of_somebody_else_stay_where_they_are(replayed):
    """As of a model that offloads what its layers save. They see all of it, with those of the watch below."""
    counter, seen = CodeCounter(replayed), []
    decoder = replayed.model
    forward = decoder.forward

    def offloading(*args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(1) or x, lambda x: x):
            return forward(*args, **kwargs)

    decoder.forward = offloading
    saved_in_a_forward(counter, replayed, 0)
    first = len(seen)
    assert first
    ids = torch.arange(32).view(1, 32)
    seen.clear()
    replayed(ids, labels=ids)
    assert len(seen) == first


def test_a_forward_that_fails_leaves_no_hooks(replayed):
    blocks = Blocks(SavedCodes(CodeCounter(replayed), lambda address: False), 1)
    replayed.model.layers[0].mlp.forward = fails
    blocks.open()
    with pytest.raises(RuntimeError, match="on purpose"):
        replayed(torch.arange(32).view(1, 32))
    blocks.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not hooks_of_watch(replayed)


def fails(*args, **kwargs):
    raise RuntimeError("on purpose")
