"""`coat plan --megatron`: parameters of Megatron's dense models, and the bytes that their layers save."""

import pytest
import torch

from coat_ds import plan
from coat_ds.config import ActivationsConfig
from coat_ds.plan import rungs
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.systems import coat
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from megatron_ext.ledger import saved_bytes
from megatron_ext.model import ModelShape, build_gpt

pytestmark = pytest.mark.early

H, FFN, HEADS, GROUPS, VOCAB, S, B = 256, 512, 4, 2, 512, 128, 2


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize(
    "activations",
    [None, {}, {"attention_format": "sqrt8"}, {"attention_format": "recompute"}],
    ids=["BF16", "COAT", "8-bit attention", "recomputed attention"],
)
def test_layers_save_what_is_predicted(megatron, activations, head_norms):
    saved = []
    for layers in (2, 4):
        model = _build(layers, activations, qk_layernorm=head_norms)
        tokens = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(5))
        positions = torch.arange(S).expand(B, S)
        run = lambda: model(tokens, positions, None, labels=tokens)  # noqa: E731, B023
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
    system = rungs()["BF16"] if activations is None else coat("COAT", {"activations": activations})
    predicted = saved_per_token(sizes, system)
    # a layer's scales are a few more bytes; torch's norms on a CPU save their results, in FP32 and more
    bound = 0.005 * predicted if activations is not None else 0.25 * predicted
    assert abs((saved[1] - saved[0]) / 2 / (B * S) - predicted) < bound


def _build(layers, activations, **config):
    """A model of COAT's layers, or of Megatron's own if `activations` is None."""
    spec, block = sdpa_layer_spec, None
    if activations is not None:
        spec, block = coat_layer_spec, ActivationsConfig(**activations)
    shape = ModelShape(layers, H, FFN, HEADS, GROUPS)
    return build_gpt(shape, spec, seq_length=S, vocab_size=VOCAB, activations=block, **config)
