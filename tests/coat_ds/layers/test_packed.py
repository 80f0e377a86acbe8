"""Packed batches and sliding windows of converted models: results of documents one by one, without masks."""

import logging

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks, sdpa_mask

import coat_ds
from coat_ds.layers import fused_layer
from coat_ds.layers.modules import attention
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.layers.modules.packed import DOCUMENTS, GraphPadding, PackedMask, coat_mask
from coat_kernels.attention import Documents
from coat_kernels.graphs import Graphs
from coat_kernels.graphs.warm_up import WARM_UP
from tests.coat_ds.layers.measures import (
    fp8_bound,
    fp8_forward_bound,
    fused_calls,
    relative,
    run,
    same,
    saved_bytes,
)
from tests.coat_ds.layers.packed import documents, flat, loaded_with_flash, only_attention
from tests.families import FAMILIES, VOCABULARY

FORMATS = pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
LENGTHS = {
    "one": [37],
    "several": [5, 33, 2, 17, 60],
    "many": [2 + i % 6 for i in range(40)],
}
LAYOUTS = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


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
def test_packed_rows_attention_alone_is_exact(name, lengths, monkeypatch):
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


@pytest.mark.pairwise
@FORMATS
@pytest.mark.parametrize("lengths", [LENGTHS["several"], LENGTHS["many"]], ids=len)
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_packed_rows_agree_with_documents_one_by_one(name, lengths, attention_format, monkeypatch):
    taken, made = fused_calls(monkeypatch), masks_made(monkeypatch)
    _, expected = one_by_one(FAMILIES[name].build(torch.float32), lengths)
    model = coat_ds.convert(FAMILIES[name].build(), {"attention_format": attention_format})
    _, found = run(model, flat(lengths))
    assert relative(found, expected) < fp8_bound(14)
    assert len(taken) == len(model.model.layers) and not made


@FORMATS
def test_packed_rows_by_borders_are_those_by_positions(attention_format, monkeypatch):
    taken = fused_calls(monkeypatch)
    model = coat_ds.convert(FAMILIES["llama"].build(), {"attention_format": attention_format})
    lengths = LENGTHS["several"]
    expected = run(model, flat(lengths))
    both = flat(lengths, return_flash_attn_kwargs=True)
    same(run(model, both), expected)
    # Angles of positions that count on are equal in pairs, and rounded otherwise
    del both["position_ids"]
    assert relative(run(model, both)[1], expected[1]) < fp8_bound(14)
    assert len(taken) == 3 * len(model.model.layers)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_rows_save_no_mask(name, attention_format):
    """A packed batch saves what the same tokens as one document save, and the borders."""
    model = coat_ds.convert(FAMILIES[name].build(), {"attention_format": attention_format})
    lengths = LENGTHS["several"]
    packed, plain = (saved_bytes(model, flat(given)) for given in (lengths, [sum(lengths)]))
    assert abs(packed - plain) <= 4 * (len(lengths) + 1)


def test_packed_rows_of_a_policy_and_its_reference_have_their_log_probabilities():
    """Of sequences without padding, as verl packs them. A frozen reference agrees with its policy in training
    to the bit, and sequences one by one up to the rounding of FP8."""
    lengths = LENGTHS["several"]
    policy, reference = (coat_ds.convert(FAMILIES["llama"].build()) for _ in range(2))
    reference.eval().requires_grad_(False)
    batch = {name: flat(lengths)[name] for name in ("input_ids", "position_ids")}
    logits = policy(**batch, use_cache=False).logits[0].float()
    found = logits.log_softmax(-1)
    assert found.requires_grad
    ids = batch["input_ids"][0].split(lengths)
    with torch.no_grad():
        assert reference(**batch, use_cache=False).logits[0].float().equal(logits)
        apart = torch.cat([reference(one[None], use_cache=False).logits[0].float() for one in ids])
    # The logits of both have errors of 14 FP8 GEMMs. The sum of a token's exponentials is off by no more
    # than its logits, so that a log-probability has at most twice the error of a logit.
    error = (found - apart.log_softmax(-1)).square().mean().sqrt()
    assert error < 2 * 2**0.5 * fp8_forward_bound(14) * logits.square().mean().sqrt()


def test_packed_rows_refuse_borders_that_miss_tokens():
    model = coat_ds.convert(FAMILIES["llama"].build())
    batch = flat([5, 33], return_flash_attn_kwargs=True)
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor([0, 5, 30], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(**batch)


def test_packed_rows_of_models_with_flash_attention_that_get_it_back(monkeypatch):
    taken = fused_calls(monkeypatch)
    expected = run(coat_ds.convert(FAMILIES["llama"].build()), flat(LENGTHS["several"]))
    model = coat_ds.convert(loaded_with_flash(FAMILIES["llama"].build()))
    assert model.config._attn_implementation == attention.NAME
    same(run(model, flat(LENGTHS["several"])), expected)
    assert len(taken) == 2 * len(model.model.layers)
    assert coat_ds.unconvert(model).config._attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_rows_by_numbers_of_documents_are_read_as_by_flash_attention(name, rows, monkeypatch):
    """LLaMA-Factory and Axolotl number documents in attention_mask and give them to a function of their own
    inside of FlashAttention."""
    lengths, made = [7, 30, 3, 20, 4], masks_made(monkeypatch)
    numbers = torch.tensor([1, 2, 1, 2, 0] if rows == 2 else [1, 2, 3, 4, 0])
    numbers = numbers.repeat_interleave(torch.tensor(lengths))
    batch = flat(lengths, return_flash_attn_kwargs=True, return_position_ids=False)
    if rows == 2:
        # rows of 37 and of 27 tokens, the second padded
        lengths[-1] += 10
        batch = flat(lengths, return_flash_attn_kwargs=True, return_position_ids=False)
        numbers = torch.cat([numbers, numbers.new_zeros(10)])
        for key in ("input_ids", "labels"):
            batch[key] = batch[key].view(2, 37)
    del batch["labels"]
    model = coat_ds.convert(loaded_with_flash(FAMILIES[name].build()))
    expected = model(**batch).logits
    found = model(input_ids=batch["input_ids"], attention_mask=numbers.view(rows, -1)).logits
    assert found.equal(expected) and not made
    # a mask of a padded batch stays a mask
    padded = (numbers > 0).long().view(rows, -1)
    assert not model(input_ids=batch["input_ids"], attention_mask=padded).logits.equal(expected)
    assert not coat_ds.unconvert(model).model._forward_pre_hooks


@pytest.mark.parametrize("name", ["gemma2"])
def test_packed_rows_keep_flash_attention_for_what_ours_does_not_compute(name, caplog):
    model = loaded_with_flash(FAMILIES[name].build())
    with caplog.at_level(logging.INFO):
        coat_ds.convert(model)
    assert model.config._attn_implementation == "flash_attention_2"
    assert "FlashAttention stays" in caplog.text and "soft-capped" in caplog.text


def gpt_oss(dtype=torch.float64, **more) -> torch.nn.Module:
    """A window of 8 in the first layer, and sinks in both."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    more = {"sliding_window": 8, "num_experts_per_tok": 2, "pad_token_id": 0} | more
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, **more)).to(dtype)
    # grouped GEMMs take no FP64
    model.set_experts_implementation("eager")
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            p.data.copy_(torch.linspace(-2, 3, 4))
    return model


# as of `test_packed_rows_attention_alone_is_exact`
LOSS, GRADIENTS = 2**-18, 2**-17


@pytest.mark.parametrize("loaded", ["eager", "flash_attention_3"])
def test_packed_rows_with_sinks_are_exact(loaded, monkeypatch):
    made, model, lengths = masks_made(monkeypatch), gpt_oss(), LENGTHS["several"]
    assert model.config._attn_implementation == "eager"
    expected = one_by_one(model, lengths)
    model.config._attn_implementation_internal = loaded
    coat_ds.convert(model, filter=only_attention)
    assert model.config._attn_implementation == attention.NAME
    # only FlashAttention of transformers reads positions: this model makes its masks without them
    loss, gradients = run(model, flat(lengths, return_flash_attn_kwargs=loaded == "eager"))
    assert abs(loss / expected[0] - 1) < LOSS
    assert gradients.keys() == expected[1].keys() and relative(gradients, expected[1]) < GRADIENTS
    assert not made
    assert coat_ds.unconvert(model).config._attn_implementation == loaded


@pytest.mark.parametrize("case", ["whole", "padded left", "padded right", "dropout", "compiled"])
def test_sinks_of_batches_that_are_not_packed_are_exact(case):
    ids = torch.randint(3, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(0))
    batch, real = {"input_ids": ids, "labels": ids.clone()}, torch.ones_like(ids)
    if case.startswith("padded"):
        real[0, :9] = 0
        real = real.flip(1) if case == "padded right" else real
        batch |= {"attention_mask": real}
        batch["labels"][real == 0] = -100
    model = gpt_oss(attention_dropout=1e-12 if case == "dropout" else 0.0)
    expected = run(model, batch)
    coat_ds.convert(model, filter=only_attention)
    if case == "compiled":
        # a whole compiled model: test_packed_rows_of_a_compiled_model
        for layer in model.model.layers:
            layer.self_attn.compile(backend="eager")
    loss, gradients = run(model, batch)
    assert abs(loss / expected[0] - 1) < LOSS and relative(gradients, expected[1]) < GRADIENTS


def test_sinks_generate_stock_tokens():
    model, prompt = gpt_oss().eval(), torch.arange(3, 22)[None]
    how = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompt, **how)
    coat_ds.convert(model, filter=only_attention)
    assert model.generate(prompt, **how).equal(expected)


def test_packed_rows_with_dropout_and_in_evaluation():
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


def test_packed_rows_mask_is_whole_for_any_reader():
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


def test_packed_rows_leave_the_mask_of_blocks_in_both_directions():
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


def batches_of(lengths) -> tuple[dict, ...]:
    """Batches of one number of tokens in other documents."""
    return flat(lengths), flat(lengths[::-1]), flat([3, *[2] * 20, sum(lengths) - 43])


@pytest.mark.parametrize("attention_format", ["sqrt8", "recompute"])
def test_packed_rows_of_one_size_are_alike_to_a_graph(attention_format, monkeypatch):
    """They call the same function with constants of the same shapes, and get the results of eager calls."""
    lengths, calls = [5, 13, 2, 17, 27], []

    def call(graphs, function, x, tensors, dependencies=tuple, constants=(), **_):
        calls.append((x.shape, dependencies(), [(t.shape, t.dtype) for t in constants], constants[-1]))
        return function(x, *constants, *tensors)

    model = coat_ds.convert(FAMILIES["llama"].build(), {"attention_format": attention_format})
    layers = len(model.model.layers)
    expected = [run(model, one) for one in batches_of(lengths)]
    monkeypatch.setattr(Graphs, "call", call)
    monkeypatch.setattr(fused_layer, "uses_graphs", lambda *_, why_not=None: why_not is None)
    for one, wanted in zip(batches_of(lengths), expected, strict=True):
        same(run(model, one), wanted)
    assert len(calls) == 3 * layers
    for first, *later in zip(calls[:layers], calls[layers : 2 * layers], calls[2 * layers :], strict=True):
        assert all(first[:3] == one[:3] for one in later)
    # the borders of a forward are one tensor, which graphs copy once
    assert len({id(borders) for *_, borders in calls}) == 3


def test_packed_rows_grow_slots_twice_at_most():
    def fitted(*lengths):
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        found = slots.pad(Documents(starts, max(lengths), 7), 1, sum(lengths))
        assert (
            found.cu_seqlens[: len(starts)].equal(starts)
            and (found.cu_seqlens[len(starts) :] == starts[-1]).all()
        )
        assert found.window == 7
        return len(found.cu_seqlens) - 1, found.max_seqlen

    slots = GraphPadding()
    assert fitted(100, 50, *[10] * 25) == (64, 100)
    assert fitted(*[50] * 8) == (64, 100)
    assert fitted(101, *[2] * 149, 1) == (DOCUMENTS[-1], 400)
    assert fitted(*[50] * 8) == (DOCUMENTS[-1], 400)
    # another number of tokens begins again
    assert fitted(*[50] * 16) == (64, 200)


@pytest.mark.gpu
@pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_rows_replayed_are_eager_calls(name, attention_format):
    models = []
    for graphs in (True, False):
        options = {"attention_format": attention_format, "cuda_graphs": graphs}
        models.append(coat_ds.convert(FAMILIES[name].build().cuda(), options))
    generator = torch.Generator().manual_seed(0)
    for number in range(WARM_UP + 5):
        cuts = torch.randperm(126, generator=generator)[: 2 + number].sort().values + 1
        lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([128])).tolist()
        one = {k: v.cuda() for k, v in flat(lengths).items() if isinstance(v, torch.Tensor)}
        (loss, found), (eager, expected) = (run(model, one) for model in models)
        # the forward has one order of sums
        assert loss == eager, number
        # FlashAttention adds up gradients in any order, which changes some codes of E5M2 by 2^-2
        assert relative(found, expected) < 2**-5, number
    counts = [converted_forward(layer).graphs.count for layer in models[0].model.layers]
    assert counts == [1] * len(counts)
