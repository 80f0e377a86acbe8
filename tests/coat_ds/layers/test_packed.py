"""Packed batches and sliding windows of converted models: results of documents one by one, without masks."""

import logging

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorWithFlattening,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks, sdpa_mask

import coat_ds
from coat_ds.layers.modules import attention
from coat_ds.layers.modules.packed import PackedMask, coat_mask
from tests.coat_ds.layers.measures import blocks_taken, fp8_bound, relative, run, same, saved_bytes
from tests.families import FAMILIES, VOCABULARY

FORMATS = pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
LENGTHS = {
    "one": [37],
    "several": [5, 33, 2, 17, 60],
    "many": [2 + i % 6 for i in range(40)],
}
LAYOUTS = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def documents(lengths) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def flat(lengths, **options) -> dict:
    """The batch of transformers' own collator."""
    return dict(DataCollatorWithFlattening(**options)(documents(lengths), return_tensors="pt"))


def one_by_one(model, lengths) -> tuple[float, dict]:
    """The loss and gradients of the batch, from a batch of each document. The first token of a document has
    no loss."""
    model.zero_grad()
    total, labels = 0.0, sum(lengths) - len(lengths)
    for document in documents(lengths):
        ids = torch.tensor([document["input_ids"]])
        loss = model(input_ids=ids, labels=ids).loss * ((ids.numel() - 1) / labels)
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def masks_made(monkeypatch) -> list:
    made, whole = [], PackedMask.whole
    monkeypatch.setattr(PackedMask, "whole", lambda mask: made.append(1) or whole(mask))
    return made


@LAYOUTS
@pytest.mark.parametrize("name", ["mistral", "qwen3", "gemma3"])
def test_attention_alone_is_exact(name, lengths, monkeypatch):
    """In FP64. The windows of Mistral and Gemma 3 are shorter than some of the documents."""
    made = masks_made(monkeypatch)
    model = FAMILIES[name].build(torch.float64)
    expected = one_by_one(model, lengths)
    coat_ds.convert(model, filter=lambda name, _: name.endswith("self_attn"))
    loss, gradients = run(model, flat(lengths))
    # Sums of at most 10^4 terms, in up to 10^2 operations one after another. Models compute norms, angles and
    # the loss in FP32, to 2^-24 of each number.
    assert abs(loss / expected[0] - 1) < 2**-18
    assert relative(gradients, expected[1]) < 2**-17
    assert not made


@FORMATS
@pytest.mark.parametrize("lengths", [LENGTHS["several"], LENGTHS["many"]], ids=len)
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_fused_blocks_agree_with_documents_one_by_one(name, lengths, attention_format, monkeypatch):
    taken, made = blocks_taken(monkeypatch), masks_made(monkeypatch)
    _, expected = one_by_one(FAMILIES[name].build(torch.float32), lengths)
    model = coat_ds.convert(FAMILIES[name].build(), {"attention_format": attention_format})
    _, found = run(model, flat(lengths))
    assert relative(found, expected) < fp8_bound(14)
    assert len(taken) == len(model.model.layers) and not made


@FORMATS
def test_borders_and_positions_are_one_form(attention_format, monkeypatch):
    taken = blocks_taken(monkeypatch)
    model = coat_ds.convert(FAMILIES["llama"].build(), {"attention_format": attention_format})
    lengths = LENGTHS["several"]
    expected = run(model, flat(lengths))
    both = flat(lengths, return_flash_attn_kwargs=True)
    same(run(model, both), expected)
    # Angles of positions that count on are equal in pairs, and rounded otherwise
    del both["position_ids"]
    assert relative(run(model, both)[1], expected[1]) < fp8_bound(14)
    assert len(taken) == 3 * len(model.model.layers)


def test_trls_batches_without_padding_are_packed(monkeypatch):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    made = masks_made(monkeypatch)
    model = coat_ds.convert(FAMILIES["llama"].build())
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    found = collator([{**d, "labels": d["input_ids"]} for d in documents(LENGTHS["several"])])
    same(run(model, found), run(model, flat(LENGTHS["several"])))
    assert not made


@FORMATS
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_no_mask_is_saved(name, attention_format):
    """A packed batch saves what the same tokens as one document save, and the borders."""
    model = coat_ds.convert(FAMILIES[name].build(), {"attention_format": attention_format})
    lengths = LENGTHS["several"]
    packed, plain = (saved_bytes(model, flat(given)) for given in (lengths, [sum(lengths)]))
    assert abs(packed - plain) <= 4 * (len(lengths) + 1)


def test_borders_that_miss_tokens_are_refused():
    model = coat_ds.convert(FAMILIES["llama"].build())
    batch = flat([5, 33], return_flash_attn_kwargs=True)
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor([0, 5, 30], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(**batch)


def loaded_with_flash(model: torch.nn.Module) -> torch.nn.Module:
    """The model as from_pretrained makes it where the package of FlashAttention is installed."""
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def test_models_with_flash_attention_convert_and_get_it_back(monkeypatch):
    taken = blocks_taken(monkeypatch)
    expected = run(coat_ds.convert(FAMILIES["llama"].build()), flat(LENGTHS["several"]))
    model = coat_ds.convert(loaded_with_flash(FAMILIES["llama"].build()))
    assert model.config._attn_implementation == attention.NAME
    same(run(model, flat(LENGTHS["several"])), expected)
    assert len(taken) == 2 * len(model.model.layers)
    assert coat_ds.unconvert(model).config._attn_implementation == "flash_attention_2"


def gpt_oss() -> torch.nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    return GptOssForCausalLM(GptOssConfig(**sizes, **heads, pad_token_id=0)).bfloat16()


@pytest.mark.parametrize(
    ("build", "why"), [(FAMILIES["gemma2"].build, "soft-capped"), (gpt_oss, "sinks")], ids=["caps", "sinks"]
)
def test_what_ours_does_not_compute_keeps_flash_attention(build, why, caplog):
    model = loaded_with_flash(build())
    with caplog.at_level(logging.INFO):
        coat_ds.convert(model)
    assert model.config._attn_implementation == "flash_attention_2"
    assert "FlashAttention stays" in caplog.text and why in caplog.text


def test_dropout_and_evaluation_in_bf16_are_packed_too():
    lengths, batch = LENGTHS["several"], flat(LENGTHS["several"])
    stock = FAMILIES["llama"].build().eval()
    model = coat_ds.convert(FAMILIES["llama"].build(), {"evaluation": "stock"}).eval()
    with torch.no_grad():
        found, expected = model(**batch).loss, stock(**batch).loss
    # attention's output is rounded to BF16 in both
    assert abs(found / expected - 1) < 2**-8
    model = coat_ds.convert(FAMILIES["llama"].build(attention_dropout=0.5))
    _, gradients = run(model, flat(lengths, return_flash_attn_kwargs=True))
    assert all(g.isfinite().all() for g in gradients.values())


def test_any_reader_reads_the_whole_mask():
    """A model's own code may slice a mask or hand it to torch's attention."""
    seen = []

    def keep(module, query, key, value, mask, **rest):
        seen.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **rest)

    stock = FAMILIES["mistral"].build()
    AttentionInterface.register("kept", keep)
    stock.config._attn_implementation_internal = "kept"
    for make in (sdpa_mask, coat_mask):
        AttentionMaskInterface.register("kept", make)
        stock(**flat(LENGTHS["several"]))
    expected, found = seen[0], seen[-1]
    assert type(found) is PackedMask and found.shape == expected.shape
    assert (found & True).equal(expected)
    assert found[..., :9].equal(expected[..., :9])
    assert found.whole().equal(expected)


def test_blocks_in_both_directions_keep_their_mask():
    """As images in Gemma 3."""
    groups = torch.tensor([[-1, 0, 0, -1, 1, 1]])
    how = {
        "batch_size": 1,
        "q_length": 6,
        "kv_length": 6,
        "mask_function": or_masks(causal_mask_function, blockwise_overlay(groups)),
        "allow_is_causal_skip": False,
        "use_vmap": False,
        "device": torch.device("cpu"),
    }
    found = coat_mask(**how)
    assert type(found) is torch.Tensor and found.equal(sdpa_mask(**how))


def test_compiled_models_attend_inside_of_documents():
    model = coat_ds.convert(FAMILIES["llama"].build())
    batch = flat([5, 33, 4], return_flash_attn_kwargs=True, return_position_ids=False)
    expected = run(model, batch)[0]
    assert abs(run(torch.compile(model, backend="eager"), batch)[0] / expected - 1) < 2**-7
