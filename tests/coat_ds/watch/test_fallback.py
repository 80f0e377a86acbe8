"""What is done where errors stay too large."""

import torch
import torch.nn.functional as F

import coat_ds
from coat_ds import CoatAdamW
from coat_ds.config import WatchConfig
from coat_ds.layers.modules.replaced import replaced
from coat_ds.watch import Watch
from coat_ds.watch.fallback import Fallback
from tests.coat_ds.watch.parts import model, with_graphs


def test_a_limit_is_passed_in_readings_in_a_row():
    kept, said = [], []
    config = WatchConfig(act="act", readings=2, update_error=0.1)
    fallback = Fallback(
        model(), config, lambda *args: kept.append(args), lambda line, level: said.append(line)
    )
    for step, error in enumerate((0.2, 0.05, 0.2, float("nan"), 0.2, 0.3, 0.4), 1):
        fallback.judge(step, {"0.weight": {"update_error": error}, "1.weight": {"update_error": 0.1}}, {})
    assert kept == [("0.weight", True)] and fallback.state() == {"layers": [], "states": ["0.weight"]}
    (line,) = said
    assert line == (
        "COAT: step 6: 0.weight: the update's error was 0.3, above 0.1, 2 readings in a row: it keeps FP32 "
        "moments from now on"
    )
    fallback.restore({"layers": [], "states": []})
    assert kept[1:] == [("0.weight", False)]
    # the count restarts
    for step in (8, 9):
        assert len(kept) == 2
        fallback.judge(step, {"0.weight": {"update_error": 0.2}}, {})
    assert kept[2:] == [("0.weight", True)]


def test_a_reading_without_figures_counts_neither_way():
    """As of a layer that was replayed, whose turn it was not, and of tensors whose step was skipped."""
    config = WatchConfig(act="act", readings=2)
    fallback = Fallback(coat_ds.convert(model().bfloat16()), config, lambda *_: None, lambda *_: None)
    over = {"0": {"input_flushed": 1.0}, "1": {"gradient_flushed": 0.1}}
    fallback.judge(1, {"1.weight": {"update_error": 0.9}}, over)
    assert fallback.suspects == ["0"]
    fallback.judge(2, {"1.weight": {}}, {"0": {}, "1": {"saved_flushed": 1.0}})
    assert fallback.suspects == ["0"] and fallback.state() == {"layers": [], "states": []}
    fallback.judge(3, {"1.weight": {"update_error": 0.9}}, over)
    assert fallback.state() == {"layers": ["0"], "states": ["1.weight"]}
    fallback.restore({})
    fallback.judge(4, {}, over)
    fallback.judge(5, {}, {"0": {"input_flushed": 0.1}})
    assert not fallback.suspects


def test_each_figure_has_its_own_limit_and_the_worse_of_two_counts():
    config = WatchConfig(act="act", readings=1, update_error=0.2, flushed=0.4)
    fallback = Fallback(coat_ds.convert(model().bfloat16()), config, lambda *_: None, lambda *_: None)
    fallback.judge(1, {"0.weight": {"update_error": 0.3}, "1.weight": {"update_error": 0.1}}, {})
    fallback.judge(1, {}, {"0": {"input_flushed": 0.3, "gradient_flushed": 0.3, "saved_flushed": 1.0}})
    fallback.judge(1, {}, {"1": {"input_flushed": 0.5, "gradient_flushed": 0.0}})
    assert fallback.state() == {"layers": ["1"], "states": ["0.weight"]}


def test_a_layer_that_falls_back_computes_in_bf16_until_watching_ends():
    made = coat_ds.convert(torch.nn.Sequential(model(), model()).bfloat16())
    # recorded layers replay what they did before
    with_graphs(made)
    config = {"every": 1, "act": "act", "readings": 1, "folder": ""}
    watch = Watch(made, CoatAdamW(made.named_parameters()), config)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    before = made(x)
    watch.fallback.judge(1, {}, {"1.0": {"input_flushed": 1.0}})
    assert [layer.graphs.count for layer in made] == [1, 0]
    linear = made[1][0]
    y = made[0](x)
    assert linear(y).equal(F.linear(y, linear.weight, linear.bias)) and not made(x).equal(before)
    watch.close()
    assert made(x).equal(before)


def test_graphs_of_other_layers_stay():
    """Graphs of layer 1, where layer 10 falls back."""
    made = coat_ds.convert(torch.nn.ModuleList(model() for _ in range(11)).bfloat16())
    with_graphs(made)
    fallback = Fallback(made, WatchConfig(act="act", readings=1), lambda *_: None, lambda *_: None)
    fallback.judge(1, {}, {"10.0": {"input_flushed": 1.0}})
    assert [layer.graphs.count for layer in made] == [1] * 10 + [0]


def test_all_layers_of_a_joint_product_fall_back():
    from tests.coat_ds.watch.test_engine import llama

    made = coat_ds.convert(llama())
    watch = Watch(
        made, CoatAdamW(made.named_parameters()), {"every": 1, "act": "act", "readings": 1, "folder": ""}
    )
    layer = made.model.layers[0]
    watch.fallback.judge(1, {}, {"model.layers.0.qkv": {"input_flushed": 1.0}})
    projections = {layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj}
    assert {m for m in made.modules() if getattr(replaced(m), "paused", False)} == projections
    watch.fallback.judge(2, {}, {"model.layers.0.mlp.both": {"gradient_flushed": 1.0}})
    both = {layer.mlp.gate_proj, layer.mlp.up_proj}
    assert {m for m in made.modules() if getattr(replaced(m), "paused", False)} == projections | both
