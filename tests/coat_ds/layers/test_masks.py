"""Converted models with masks and tables of angles: whose memory they are, and what changes them."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import coat_ds
from coat_ds.layers.modules.attention import any_attention
from tests.coat_ds.layers.measures import fp8_bound, relative, run, same, saved_bytes
from tests.families import FAMILIES

FORMATS = pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
LLAMA = FAMILIES["llama"]


def padded(batch: dict, left: int = 0, right: int = 0) -> dict:
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :left] = 0
    mask[1, mask.shape[1] - right :] = 0
    return batch | {"attention_mask": mask}


def boolean(rows: int = 2, tokens: int = 64) -> torch.Tensor:
    return torch.ones(tokens, tokens).tril().bool().repeat(rows, 1, 1, 1)


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, -torch.inf)


@FORMATS
def test_layers_share_tables_of_angles(attention_format):
    """In FP32, by tokens of all sequences."""
    batch = LLAMA.batch()
    model = coat_ds.convert(LLAMA.build(), {"attention_format": attention_format})
    shape, tables = (batch["input_ids"].numel(), model.model.layers[0].self_attn.head_dim), []

    def pack(x):
        if (tuple(x.shape), x.dtype) == (shape, torch.float32):
            tables.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(**batch)
    # cosines and sines
    assert len(tables) == 2 * len(model.model.layers) > len(set(tables)) == 2


@FORMATS
def test_rows_that_see_nothing_are_torchs(attention_format):
    """As the first tokens of sequences that are padded on the left, where the last token has a label."""
    batch = padded(LLAMA.batch(), left=9)
    batch["labels"][1, :9] = -100
    _, expected = run(LLAMA.build(torch.float32), batch)
    _, found = run(coat_ds.convert(LLAMA.build(), {"attention_format": attention_format}), batch)
    assert relative(found, expected) < fp8_bound(14)


@FORMATS
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_mask_of_an_evaluation_trains(name, attention_format):
    family, mask = FAMILIES[name], boolean()
    batch = family.batch() | {"attention_mask": mask}
    model = coat_ds.convert(family.build(), {"attention_format": attention_format})
    with torch.inference_mode():
        model(**batch)
    run(model, batch)


@FORMATS
def test_a_mask_that_is_filled_again_before_backward(attention_format):
    """A boolean mask is copied, and its first values count; another kind is an error, as without COAT."""
    batch, mask = LLAMA.batch(), boolean()
    model = coat_ds.convert(LLAMA.build(), {"attention_format": attention_format})
    expected = run(model, batch | {"attention_mask": mask})
    model.zero_grad()
    loss = model(**batch, attention_mask=mask).loss
    mask.fill_(True)
    loss.backward()
    same((loss.item(), {n: p.grad.float() for n, p in model.named_parameters()}), expected)
    mask = additive(boolean())
    loss = model(**batch, attention_mask=mask).loss
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an in-?place operation"):
        loss.backward()


@FORMATS
def test_no_mask_stays_behind_backward(attention_format):
    model = coat_ds.convert(LLAMA.build(), {"attention_format": attention_format})
    mask = additive(boolean())
    held = StorageWeakRef(mask.untyped_storage())
    loss = model(**LLAMA.batch(), attention_mask=mask).loss
    del mask
    assert not held.expired()
    loss.backward()
    assert held.expired()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fp32_models_under_autocast_save_what_bf16_models_do(name):
    """Their queries and keys are FP32 after the rotation."""
    family = FAMILIES[name]
    batch, saved = family.batch(), {}
    for attention_format in ("bf16", "sqrt8"):
        model = coat_ds.convert(family.build(torch.float32), {"attention_format": attention_format})
        with torch.autocast("cpu", torch.bfloat16):
            run(model, batch)
            saved[attention_format] = saved_bytes(model, batch)
            rows, tokens = batch["input_ids"].shape
            with_mask = saved_bytes(model, padded(batch, right=9))
        assert with_mask - saved[attention_format] == 2 * rows * tokens**2
    assert saved["sqrt8"] < saved["bf16"]


@pytest.mark.parametrize("widths", [(32, 32), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_bias_of_positions_is_never_taken_for_a_head(dtype, widths):
    """As T5's, in sequences as long as heads of queries and keys are wide, or those of values."""
    heads = [torch.randn(2, 4, 32, n, dtype=dtype, requires_grad=True) for n in (*widths[:1] * 2, widths[1])]
    bias = torch.randn(1, 4, 32, 32, dtype=dtype)
    arguments, found = {"position_bias": bias, "is_causal": True}, []
    for fmt in (None, "sqrt8"):
        y = any_attention(torch.nn.Module(), *heads, None, arguments, saved_format=fmt)
        found.append(torch.autograd.grad(y.float().square().sum(), heads))
    for a, e in zip(*found, strict=True):
        assert a.equal(e)
