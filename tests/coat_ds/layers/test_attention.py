"""What attention of converted models keeps and knows of its output, and how models get their own back."""

import pickle

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import coat_ds
from coat_ds.layers.modules import attention
from coat_ds.layers.modules.attention import attended_origin, coat_attention
from coat_kernels.attention import causal_attention
from tests.coat_ds.layers.measures import run, same
from tests.families import FAMILIES
from tests.util import rel_rms, saved_tensors

B, S, N, D = 2, 32, 4, 16


@pytest.fixture
def module() -> nn.Module:
    """An attention module of a converted model, which saves its tensors as they are."""
    return coat_ds.convert(FAMILIES["llama"].build()).model.layers[0].self_attn


def heads(fused: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values [b, n, s, d] of a fused projection [b, s, 3 n d]."""
    return [x.view(B, S, N, D).transpose(1, 2) for x in fused.chunk(3, -1)]


def projected() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(B, S, 3 * N * D, dtype=torch.bfloat16, requires_grad=True) * 1


def test_attended_origin_is_of_the_same_rows_alone(module):
    """A linear layer would make the gradient of its weight of other rows."""
    y, _ = coat_attention(module, *heads(projected()), None)
    rows = y.reshape(B, S, -1)
    assert attended_origin(rows) is not None
    for other in (rows.transpose(0, 1), y, rows[:1], rows[..., : N * D // 2], rows + 1):
        assert attended_origin(other) is None


def test_attention_takes_the_fastest_kernels_for_plain_causality(module, monkeypatch):
    """Which masks, biases and other numbers of queries are not."""
    taken = []

    def spy(*args, **kwargs):
        taken.append(kwargs["batch_first"])
        return causal_attention(*args, **kwargs)

    monkeypatch.setattr(attention, "causal_attention", spy)
    (q, k, v), mask = heads(projected()), torch.ones(S, S).tril().bool()[None, None]
    bias = torch.zeros(1, N, S, S, dtype=torch.bfloat16)
    for more in ({}, {"position_bias": None, "is_causal": True}):
        coat_attention(module, q, k, v, None, **more)
    assert taken == [True, True]
    for query, given, more in (
        (q, mask, {}),
        (q, None, {"position_bias": bias}),
        (q, None, {"is_causal": False}),
        (q[:, :, :1], None, {}),
        (q[:, :, :2], None, {}),
    ):
        coat_attention(module, query, k, v, given, **more)
    assert len(taken) == 2


@pytest.mark.parametrize("rotated", [False, True])
def test_attention_copies_heads_only_out_of_larger_storages(module, rotated):
    """Queries, keys and values of one projection fill its storage, unless two of them are rotated into new
    ones."""
    fused = projected()
    q, k, v = heads(fused)
    if rotated:
        q, k = q * 1, k * 1
    with saved_tensors() as tensors:
        coat_attention(module, q, k, v, None)
    kept = {x.untyped_storage().data_ptr() for x in tensors}
    assert (fused.untyped_storage().data_ptr() in kept) == (not rotated)
    with torch.no_grad():
        q, k, v = heads(projected())
        given = q * 1, k * 1, v
    # nothing of them is kept
    assert all(x is y for x, y in zip(attention._own_storages(*given), given, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_adds_a_bias_of_positions(module, masked):
    (q, *others), bias = heads(projected()), torch.randn(1, N, S, S, dtype=torch.bfloat16)
    mask = torch.ones(S, S).triu().bool()[None, None] if masked else None
    inputs = q, *(x[:, : N // 2] for x in others), mask
    y, _ = coat_attention(module, *inputs, position_bias=bias)
    assert y.equal(sdpa_attention_forward(module, *inputs, position_bias=bias)[0])


def test_attention_with_mask_and_dropout(module):
    (q, *others), mask = heads(projected()), torch.ones(S, S).tril().bool()[None, None]
    found = []
    for attend in (coat_attention, sdpa_attention_forward):
        torch.manual_seed(1)
        found.append(attend(module, q, *(x[:, : N // 2] for x in others), mask, dropout=0.5)[0])
    assert rel_rms(*found) < 2**-7


@pytest.mark.parametrize("wide", "qkv")
def test_attention_saves_fp32_heads_as_bf16_under_autocast(module, wide):
    """After a rotation, or after a norm."""
    mask, saved = torch.ones(S, S).tril().bool()[None, None], []
    groups = {"q": N, "k": N // 2, "v": N // 2}
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [
            torch.randn(B, n, S, D, dtype=dtype if name == wide else torch.bfloat16, requires_grad=True)
            for name, n in groups.items()
        ]
        with torch.autocast("cpu", torch.bfloat16), saved_tensors() as tensors:
            coat_attention(module, *inputs, mask)
        kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        saved.append(sum(kept.values()))
    assert saved[0] == saved[1]


def test_unconvert_leaves_nothing_in_the_modules():
    model = FAMILIES["llama"].build()
    own = {name: set(vars(module)) for name, module in model.named_modules()}
    coat_ds.convert(model, filter=lambda name, module: name != "model.layers.0.self_attn")
    assert attention.NOT_CONVERTED in vars(model.model.layers[0].self_attn)
    coat_ds.unconvert(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == own
    assert model.config._attn_implementation == "sdpa"


def test_unconvert_keeps_attention_that_was_chosen_since():
    model = coat_ds.convert(FAMILIES["llama"].build())
    model.set_attn_implementation("eager")
    assert coat_ds.unconvert(model).config._attn_implementation == "eager"


def test_pickled_model_finds_its_attention(monkeypatch):
    batch = FAMILIES["llama"].batch()
    model = coat_ds.convert(FAMILIES["llama"].build())
    written, expected = pickle.dumps(model), run(model, batch)
    # as of a process in which nothing was converted
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, attention.NAME)
    same(run(pickle.loads(written), batch), expected)
