"""`coat plan --megatron`: parameters of Megatron's dense models, and the bytes that their layers save."""

import functools

import pytest

from coat_ds import plan
from coat_ds.config import ActivationsConfig
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.systems import coat
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.model import ModelShape, build_gpt
from megatron_ext.saved_bytes import saved_bytes
from tests.megatron_ext.layers import loss_of, random_tokens

pytestmark = pytest.mark.early

H, FFN, HEADS, GROUPS, VOCAB, S, B = 256, 512, 4, 2, 512, 128, 2


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize(
    "activations",
    [{}, {"attention_format": "sqrt8"}, {"attention_format": "recompute"}],
    ids=["COAT", "8-bit attention", "recomputed attention"],
)
def test_plan_predicts_saved_bytes_of_megatrons_layers(megatron, activations, head_norms):
    saved = []
    for layers in (2, 4):
        model = _build(layers, activations, qk_layernorm=head_norms)
        run = functools.partial(loss_of, model, random_tokens(B, S, VOCAB))
        saved.append(saved_bytes(model, run).total)
    sizes = plan.Sizes(
        layers=4,
        hidden=H,
        ffn=FFN,
        heads=HEADS,
        groups=GROUPS,
        head_dim=H // HEADS,
        vocabulary=VOCAB,
        head_norms=head_norms,
    )
    # norms of queries and keys
    numel = sum(p.numel() for p in model.parameters())
    assert numel - sizes.parameters == 2 * 4 * sizes.head_dim * head_norms
    predicted = saved_per_token(sizes, coat("COAT", {"activations": activations}))
    # a layer's scales are a few more bytes
    assert abs((saved[1] - saved[0]) / 2 / (B * S) - predicted) < 0.005 * predicted


def _build(layers, activations, **config):
    shape, block = ModelShape(layers, H, FFN, HEADS, GROUPS), ActivationsConfig(**activations)
    return build_gpt(shape, coat_layer_spec, seq_length=S, vocab_size=VOCAB, activations=block, **config)
