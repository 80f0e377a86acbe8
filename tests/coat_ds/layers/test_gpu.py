"""Converted models on a GPU, where the kernels run: what they compute; both ways of a layer agree."""

import pytest
import torch

import coat_ds
from coat_ds.layers.modules import decoder_layer
from coat_kernels.graphs.warm_up import WARM_UP
from tests.coat_ds.layers.graphed import converted, trained_alike
from tests.coat_ds.layers.measures import fp8_bound, fused_calls, padded, placed, relative, run, saved_bytes
from tests.families import FAMILIES, LAYERS
from tests.util import run_distributed

pytestmark = pytest.mark.gpu


def on_gpu(batch):
    return placed(batch, "cuda")


@pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
@pytest.mark.parametrize("name", FAMILIES)
def test_converted_gradients_on_a_gpu(name, attention_format):
    family = FAMILIES[name]
    batch = on_gpu(family.batch())
    _, expected = run(family.build().float().cuda(), on_gpu(family.batch(dtype=torch.float32)))
    model = family.build().cuda()
    stock_bytes = saved_bytes(model, batch)
    coat_ds.convert(model, {"attention_format": attention_format})
    bound = fp8_bound(len(coat_ds.conversion_of(model).converted["linear"]))
    own = {f"{n}.weight" for n in coat_ds.conversion_of(model).converted["linear"]} & expected.keys()
    # the second time scales are predicted
    for _ in range(2):
        _, found = run(model, batch)
        assert relative(found, expected) < bound
        # and layers did multiply in FP8
        assert relative(*({n: g[n] for n in own} for g in (found, expected))) > bound / 10
    assert saved_bytes(model, batch) < 0.8 * stock_bytes
    if family.generates:
        model.eval().generate(
            batch["input_ids"][:, :33], max_new_tokens=4, eos_token_id=None, **_images(batch)
        )


def _images(batch):
    return {"pixel_values": batch["pixel_values"]} if "pixel_values" in batch else {}


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("weight_cache", ["none", "fp8"])
def test_fused_blocks_agree_with_modules_on_a_gpu(weight_cache, padding, monkeypatch):
    family = FAMILIES["qwen2"]
    batch = on_gpu(padded(family.batch(), padding))
    model = coat_ds.convert(family.build().cuda(), {"weight_cache": weight_cache})
    loss, found = run(model, batch)
    again, same = run(model, batch)
    assert again == loss and all(same[name].equal(g) for name, g in found.items())
    with torch.autocast("cuda", torch.bfloat16):
        cast, same = run(model, batch)
    assert cast == loss and all(same[name].equal(g) for name, g in found.items())
    monkeypatch.setattr(decoder_layer, "why_not_fused", lambda *a: "asked for")
    other, gradients = run(model, batch)
    assert relative(found, gradients) < fp8_bound(14) and abs(loss - other) < 2**-7 * loss


@pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_converted_tokens_that_see_nothing_on_a_gpu(name, attention_format):
    """As those of padding on the left, for which torch's own choice on Hopper gives NaN."""
    family = FAMILIES[name]
    batch = on_gpu(padded(family.batch(), 5, left=True))
    _, expected = run(family.build().float().cuda(), batch)
    model = coat_ds.convert(family.build().cuda(), {"attention_format": attention_format})
    bound = fp8_bound(len(coat_ds.conversion_of(model).converted["linear"]))
    # the third time layers run as CUDA graphs
    for _ in range(3):
        assert relative(run(model, batch)[1], expected) < bound


def train_twice_alike(attention_format):
    torch.use_deterministic_algorithms(True)
    models = [converted(True, activations={"attention_format": attention_format}) for _ in range(2)]
    trained_alike(models, steps=WARM_UP + 3, how=lambda number: {"tokens": 2048})


@pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
def test_converted_run_repeats_to_the_bit_where_attention_sums_in_order(attention_format, monkeypatch):
    """The backward pass of torch's attention sums over blocks of tokens, in any order unless asked.

    In a process of its own, since cuBLAS reads its variable once.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    run_distributed(train_twice_alike, 1, attention_format, gpus=True)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_converted_fp32_model_under_autocast_and_compiled_on_a_gpu(name):
    family = FAMILIES[name]
    batch = on_gpu(family.batch())
    model = family.build(torch.float32).cuda()
    _, expected = run(model, batch)
    coat_ds.convert(model)
    bound = fp8_bound(len(coat_ds.conversion_of(model).converted["linear"]))
    for forward in (model, torch.compile(model)):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(**batch).loss
        loss.backward()
        assert relative({n: p.grad for n, p in model.named_parameters()}, expected) < bound


@pytest.mark.parametrize("loss", [False, True], ids=["layers", "layers and loss"])
def test_convert_recognizes_ligers_forwards_by_what_they_compute(loss, monkeypatch):
    liger = pytest.importorskip("liger_kernel.transformers")
    family = FAMILIES["llama"]
    batch = on_gpu(family.batch()) | {"use_cache": False}
    model = family.build().cuda()
    _, expected = run(model, batch)
    liger._apply_liger_kernel_to_instance(model=model, rope=False, fused_linear_cross_entropy=loss)
    coat_ds.convert(model)
    conversion = coat_ds.conversion_of(model)
    assert len(conversion.converted["norm"]) == 5 and len(conversion.converted["feed_forward"]) == 2
    taken = fused_calls(monkeypatch)
    assert relative(run(model, batch)[1], expected) < fp8_bound(14)
    assert len(taken) == LAYERS
    # its loss computes no logits
    assert (model(**batch).logits is None) == loss
    coat_ds.unconvert(model)
    assert model.model.norm.forward.__func__ is liger.rms_norm.LigerRMSNorm.forward
