"""What is done where errors stay too large."""

import pytest
import torch
import torch.nn.functional as F

import coat_ds
from coat_ds import CoatAdamW
from coat_ds.config import WatchConfig
from coat_ds.layers.modules.replaced import replaced
from coat_ds.watch import Watch, fallback
from coat_ds.watch.fallback import Fallback
from tests.coat_ds.watch.parts import llama, model, with_graphs


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(fallback, "READINGS", 1)


def acting(made, keep=lambda *_: None, **limits):
    return Fallback(made, WatchConfig(act="act", **limits), keep)


def test_a_limit_is_passed_in_readings_in_a_row(caplog):
    kept = []
    acts = acting(model(), lambda *args: kept.append(args), update_error=0.1)
    for step, error in enumerate((0.2, 0.2, 0.05, 0.2, 0.2, float("nan"), 0.2, 0.2, 0.3, 0.4), 1):
        acts.judge(step, {"0.weight": {"update_error": error}, "1.weight": {"update_error": 0.1}}, {})
    assert kept == [("0.weight", True)] and acts.state() == {"layers": [], "states": ["0.weight"]}
    (line,) = caplog.messages
    assert all(word in line for word in ("step 9", "0.weight", "0.3", "FP32"))
    acts.restore({"layers": [], "states": []})
    assert kept[1:] == [("0.weight", False)]
    # the count restarts
    for step in (11, 12, 13):
        assert len(kept) == 2
        acts.judge(step, {"0.weight": {"update_error": 0.2}}, {})
    assert kept[2:] == [("0.weight", True)]


def test_a_reading_without_figures_counts_neither_way():
    """As of a layer that was replayed, whose turn it was not, and of tensors whose step was skipped."""
    acts = acting(coat_ds.convert(model().bfloat16()))
    over = {"0": {"input_flushed": 1.0}, "1": {"gradient_flushed": 0.1}}
    for step in (1, 2):
        acts.judge(step, {"1.weight": {"update_error": 0.9}}, over)
        assert acts.suspects == ["0"]
    acts.judge(3, {"1.weight": {}}, {"0": {}, "1": {"saved_flushed": 1.0}})
    assert acts.suspects == ["0"] and acts.state() == {"layers": [], "states": []}
    acts.judge(4, {"1.weight": {"update_error": 0.9}}, over)
    assert acts.state() == {"layers": ["0"], "states": ["1.weight"]} and not acts.suspects
    acts.restore({})
    acts.judge(5, {}, over)
    acts.judge(6, {}, {"0": {"input_flushed": 0.1}})
    assert not acts.suspects


def test_each_figure_has_its_own_limit_and_the_worse_of_two_counts(at_once):
    acts = acting(coat_ds.convert(model().bfloat16()), update_error=0.2, flushed=0.4)
    acts.judge(1, {"0.weight": {"update_error": 0.3}, "1.weight": {"update_error": 0.1}}, {})
    acts.judge(1, {}, {"0": {"input_flushed": 0.3, "gradient_flushed": 0.3, "saved_flushed": 1.0}})
    acts.judge(1, {}, {"1": {"input_flushed": 0.5, "gradient_flushed": 0.0}, "other": {"input_flushed": 1.0}})
    assert acts.state() == {"layers": ["1"], "states": ["0.weight"]}


def test_a_layer_that_falls_back_computes_in_bf16_until_watching_ends(at_once):
    made = coat_ds.convert(torch.nn.Sequential(*(model() for _ in range(11))).bfloat16())
    # recorded layers replay what they did before; those of layer 1 stay where layer 10 falls back
    with_graphs(made)
    watch = Watch(made, CoatAdamW(made.named_parameters()), {"every": 1, "act": "act"})
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    before = made(x)
    watch.fallback.judge(1, {}, {"10.0": {"input_flushed": 1.0}})
    assert [layer.graphs.count for layer in made] == [1] * 10 + [0]
    linear, y = made[10][0], made[:10](x)
    assert linear(y).equal(F.linear(y, linear.weight, linear.bias)) and not made(x).equal(before)
    watch.close()
    assert made(x).equal(before)


def test_all_layers_of_a_joint_product_fall_back(at_once):
    made = coat_ds.convert(llama())
    acts, layer = acting(made), made.model.layers[0]
    acts.judge(1, {}, {"model.layers.0.qkv": {"input_flushed": 1.0}})
    projections = {layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj}
    assert {m for m in made.modules() if getattr(replaced(m), "paused", False)} == projections
    acts.judge(2, {}, {"model.layers.0.mlp.both": {"gradient_flushed": 1.0}})
    both = {layer.mlp.gate_proj, layer.mlp.up_proj}
    assert {m for m in made.modules() if getattr(replaced(m), "paused", False)} == projections | both
