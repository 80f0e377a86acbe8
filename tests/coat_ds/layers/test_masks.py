"""Converted models with masks and tables of angles: whose memory they are, and what changes them."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import coat_ds
from coat_ds.layers.modules.attention import any_attention
from tests.coat_ds.layers.measures import fp8_bound, padded, relative, run, same, saved_bytes
from tests.families import FAMILIES
from tests.util import saved_tensors

FORMATS = pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
LLAMA = FAMILIES["llama"]


def boolean(rows: int = 2, tokens: int = 64) -> torch.Tensor:
    return torch.ones(tokens, tokens).tril().bool().repeat(rows, 1, 1, 1)


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, -torch.inf)


@FORMATS
def test_converted_layers_share_tables_of_angles(attention_format):
    """In FP32, by tokens of all sequences."""
    batch = LLAMA.batch()
    model = coat_ds.convert(LLAMA.build(), {"attention_format": attention_format})
    shape = batch["input_ids"].numel(), model.model.layers[0].self_attn.head_dim
    with saved_tensors() as tensors:
        model(**batch)
    tables = [x.data_ptr() for x in tensors if (tuple(x.shape), x.dtype) == (shape, torch.float32)]
    # cosines and sines
    assert len(tables) == 2 * len(model.model.layers) > len(set(tables)) == 2


@FORMATS
def test_converted_model_with_rows_that_see_nothing(attention_format):
    """As the first tokens of sequences that are padded on the left, where the last token has a label."""
    batch = padded(LLAMA.batch(), 9, left=True)
    _, expected = run(LLAMA.build(torch.float32), batch)
    _, found = run(coat_ds.convert(LLAMA.build(), {"attention_format": attention_format}), batch)
    assert relative(found, expected) < fp8_bound(14)


@FORMATS
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_converted_model_trains_with_a_mask_of_inference_mode(name, attention_format):
    family, mask = FAMILIES[name], boolean()
    batch = family.batch() | {"attention_mask": mask}
    model = coat_ds.convert(family.build(), {"attention_format": attention_format})
    with torch.inference_mode():
        model(**batch)
    run(model, batch)


@FORMATS
def test_converted_model_with_a_mask_that_changes_before_backward(attention_format):
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
def test_converted_model_holds_no_mask_behind_backward(attention_format):
    model = coat_ds.convert(LLAMA.build(), {"attention_format": attention_format})
    mask = additive(boolean())
    held = StorageWeakRef(mask.untyped_storage())
    loss = model(**LLAMA.batch(), attention_mask=mask).loss
    del mask
    assert not held.expired()
    loss.backward()
    assert held.expired()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fp32_model_under_autocast_saves_what_a_bf16_model_does(name):
    """Their queries and keys are FP32 after the rotation."""
    family = FAMILIES[name]
    batch, saved = family.batch(), {}
    for attention_format in ("bf16", "sqrt8"):
        model = coat_ds.convert(family.build(torch.float32), {"attention_format": attention_format})
        with torch.autocast("cpu", torch.bfloat16):
            run(model, batch)
            saved[attention_format] = saved_bytes(model, batch)
            rows, tokens = batch["input_ids"].shape
            with_mask = saved_bytes(model, padded(batch, 9))
        assert with_mask - saved[attention_format] == 2 * rows * tokens**2
    assert saved["sqrt8"] < saved["bf16"]


@pytest.mark.parametrize("widths", [(32, 32), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_takes_no_bias_of_positions_for_a_head(dtype, widths):
    """As T5's, in sequences as long as heads of queries and keys are wide, or those of values."""
    heads = [torch.randn(2, 4, 32, n, dtype=dtype, requires_grad=True) for n in (*widths[:1] * 2, widths[1])]
    bias = torch.randn(1, 4, 32, 32, dtype=dtype)
    arguments, found = {"position_bias": bias, "is_causal": True}, []
    for fmt in (None, "sqrt8"):
        y = any_attention(torch.nn.Module(), *heads, None, arguments, saved_format=fmt)
        found.append(torch.autograd.grad(y.float().square().sum(), heads))
    for a, e in zip(*found, strict=True):
        assert a.equal(e)
