"""Converted modules whose inputs and parameters are of different types."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import coat_ds
from tests.coat_ds.layers.parts import plain
from tests.families import FAMILIES


@pytest.mark.parametrize("build", [LlamaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_converted_norms_return_what_stock_ones_do_once_they_are_cast(build, given):
    x = torch.randn(4, 64).to(given)
    stock, ours = build(64), coat_ds.convert(build(64))
    for own in (torch.float32, torch.bfloat16):
        assert ours.to(own)(x).dtype == stock.to(own)(x).dtype


def test_convert_leaves_a_norm_with_another_output_under_autocast():
    """As of LayerNorm on GPUs."""

    class Cast(LlamaRMSNorm):
        def forward(self, hidden_states):
            y = super().forward(hidden_states)
            return y.bfloat16() if torch.is_autocast_enabled("cpu") else y

    norm, x = coat_ds.convert(Cast(64)), torch.randn(4, 64)
    assert coat_ds.conversion_of(norm).converted["norm"] == [""]
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert norm(x).dtype == (torch.bfloat16 if enabled else torch.float32)


def test_converted_norm_of_fp32_in_bf16_rounds_once():
    """T5's."""
    torch.manual_seed(0)
    norm, x = T5LayerNorm(64).bfloat16(), torch.randn(256, 64)
    norm.weight.data.normal_()
    y = coat_ds.convert(norm)(x)
    exact = F.rms_norm(x, (64,), norm.weight.float(), norm.variance_epsilon)
    # sums in another order move few of them over a tie
    assert (y == exact.bfloat16()).float().mean() > 0.98


@pytest.mark.parametrize(
    ("given", "autocast"),
    [(torch.float16, None), (torch.float16, torch.bfloat16), (torch.float32, torch.float16)],
)
@pytest.mark.parametrize("build", [plain, lambda: torch.nn.Linear(64, 64)], ids=["model", "layer"])
def test_converted_model_refuses_fp16_inputs(build, given, autocast):
    """Also where autocast would cast them to BF16, or other inputs to FP16."""
    model, x = coat_ds.convert(build()), torch.randn(2, 32, 64).to(given)
    with (
        torch.autocast("cpu", autocast, enabled=autocast is not None),
        pytest.raises(TypeError, match="found FP16"),
    ):
        model(x)


def test_converted_feed_forward_gradients_have_the_type_of_their_part():
    """That of an FP32 weight is not rounded to BF16."""
    mlp = coat_ds.convert(FAMILIES["llama"].build().model.layers[0].mlp)
    mlp.up_proj.float()
    with torch.autocast("cpu", torch.bfloat16):
        mlp(torch.randn(64, 128).bfloat16()).float().square().sum().backward()
    found = mlp.up_proj.weight.grad
    assert found.dtype == torch.float32 and not found.equal(found.bfloat16().float())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_converted_models_give_the_same_gradients_for_a_backward_under_autocast(name):
    model, batch, found = coat_ds.convert(FAMILIES[name].build(torch.float32)), FAMILIES[name].batch(), []
    for outside in (True, False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
            if not outside:
                loss.backward()
        if outside:
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
