"""What has no effect on a converted model, or disables its FP8 later, is logged."""

import pytest
import torch
from torch import nn

import coat_ds
from coat_ds import log
from tests.families import FAMILIES

LLAMA = FAMILIES["llama"]


@pytest.fixture
def said(caplog):
    """The lines that are logged from now on, each once, except the line of `convert`."""
    log.forget_logged()
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.name == "coat_ds" and "linear layers in FP8" not in r.getMessage()
    ]


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).bfloat16()


def train(model, **inputs):
    model(**{**LLAMA.batch(), **inputs}).loss.backward()


@pytest.mark.parametrize("compiles", [False, True])
def test_converted_model_cast_to_float64_logs_once_that_fp8_is_off(said, compiles):
    stock, model = plain().double(), coat_ds.convert(plain()).double()
    if compiles:
        torch.compiler.reset()
        model = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(32, 64, dtype=torch.float64)
    for _ in range(2):
        assert torch.equal(model(x), stock(x))
    (line,) = said()
    assert "found torch.float64" in line and "not in FP8" in line and "model.bfloat16()" in line


@pytest.mark.parametrize(
    "build, activations, line",
    [
        (plain, {"cuda_graphs": True}, "coat.activations.cuda_graphs: found True, but no layer"),
        (plain, {"attention_format": "sqrt8"}, "attention_format: found 'sqrt8', but no attention"),
        (plain, {"attention_format": "recompute"}, "attention_format: found 'recompute', but no attention"),
        (
            FAMILIES["gpt2"].build,
            {"attention_format": "recompute"},
            "attention_format: found 'recompute', but no layer of the model runs as a fused block",
        ),
    ],
)
def test_convert_warns_of_keys_without_effect(said, build, activations, line):
    coat_ds.convert(build(), activations)
    (found,) = said()
    assert line in found and ("Drop" in found or "Write" in found)


def test_converted_layers_run_fused_with_flags_off(said):
    """As Liger's forward of a model hands them on."""
    train(
        coat_ds.convert(LLAMA.build()), use_cache=False, output_attentions=False, output_hidden_states=False
    )
    assert said() == []
    train(coat_ds.convert(LLAMA.build()), use_cache=False, output_hidden_states=True)
    (found,) = said()
    assert "the fused block has no argument 'output_hidden_states'" in found
