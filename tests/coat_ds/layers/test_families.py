"""transformers' families, converted: what they compute, what they save, and that they stay themselves."""

import pytest
import torch

import coat_ds
from coat_ds.layers.modules import decoder_layer
from tests.coat_ds.layers.measures import (
    OF_EACH_KIND,
    bytes_left_behind,
    fp8_bound,
    fp8_forward_bound,
    fused_calls,
    padded,
    relative,
    run,
    saved_bytes,
)
from tests.families import FAMILIES, LAYERS
from tests.util import rel_rms

ALL = pytest.mark.parametrize("name", FAMILIES)


def exact(family):
    """The same weights, rounded to BF16, in FP32."""
    return family.build().float()


@ALL
def test_converted_family_is_off_by_what_fp8_explains(name):
    family = FAMILIES[name]
    reference, batch = exact(family), family.batch(dtype=torch.float32)
    loss, expected = run(reference, batch)
    with torch.no_grad():
        spread = reference(**batch).logits.std().item()
    model = coat_ds.convert(family.build())
    found_loss, found = run(model, family.batch())
    products = len(coat_ds.conversion_of(model).converted["linear"])
    bound = fp8_bound(products)
    whole = sum(g.square().sum() for g in expected.values()).sqrt()
    assert relative(found, expected) < bound
    # and layers did multiply in FP8
    own = {f"{n}.weight" for n in coat_ds.conversion_of(model).converted["linear"]} & expected.keys()
    assert relative(*({n: g[n] for n in own} for g in (found, expected))) > bound / 10
    for parameter, gradient in expected.items():
        # of one parameter large terms may cancel, as in the softmax's gradient: two such errors. Where all of
        # it cancels (biases of keys) the error is what is left of gradients that are larger
        size = max(gradient.norm(), 0.02 * whole)
        assert (found[parameter] - gradient).norm() < 2 * bound * size, parameter
    # the loss of a token is a difference of two logits, nearly: of their errors, and of its own rounding
    assert abs(found_loss - loss) < 2**0.5 * fp8_forward_bound(products) * spread + 2**-8 * loss


def per_layer(family, activations):
    """A model with one layer more, less the model."""
    sizes = []
    for layers in (LAYERS, LAYERS + 1):
        model = family.deeper(layers)
        if activations is not None:
            coat_ds.convert(model, activations)
        # the first forward shows which outputs wait for a product
        saved_bytes(model, family.batch())
        sizes.append(saved_bytes(model, family.batch()))
    return sizes[1] - sizes[0]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.like_llama])
def test_converted_layer_saves_the_promised_bytes(name):
    family = FAMILIES[name]
    stock = per_layer(family, None)
    assert per_layer(family, {}) <= 0.45 * stock
    assert per_layer(family, {"attention_format": "sqrt8"}) <= 0.40 * stock


@pytest.mark.each_value
@pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_converted_layers_share_the_mask_of_padding(name, attention_format):
    """By fused blocks and without. torch saves a mask in each layer, and repeated heads."""
    family = FAMILIES[name]
    model, batch = coat_ds.convert(family.build(), {"attention_format": attention_format}), family.batch()
    run(model, batch)
    rows, tokens = batch["input_ids"].shape
    assert saved_bytes(model, padded(batch, 9)) - saved_bytes(model, batch) == 2 * rows * tokens**2


@OF_EACH_KIND
def test_converted_family_holds_nothing_that_hooks_offloaded(name):
    family = FAMILIES[name]
    model = coat_ds.convert(family.build(), {"attention_format": "sqrt8"})
    run(model, family.batch())
    assert bytes_left_behind(model, family.batch()) == 0


def test_converted_experts_save_the_promised_bytes():
    """Two of eight tensors that the experts of a token keep in BF16 are left, in 8 bits."""
    family = FAMILIES["qwen3_moe_grouped"]
    assert per_layer(family, {}) <= 0.35 * per_layer(family, None)


@OF_EACH_KIND
def test_converted_family_saves_generates_and_unconverts(name, tmp_path):
    family, batch = FAMILIES[name], FAMILIES[name].batch()
    model = family.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    stock = run(model, batch)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    coat_ds.convert(model)
    after = model.state_dict()
    assert list(before) == list(after) and all(before[key].equal(after[key]) for key in before)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert coat_ds.conversion_of(again) is None
    loaded = again.state_dict()
    assert all(before[key].equal(loaded[key]) for key in before)
    model.eval()
    with torch.no_grad():
        logits, plain = model(**inputs).logits.float(), again.eval()(**inputs).logits.float()
    bound = fp8_forward_bound(len(coat_ds.conversion_of(model).converted["linear"]))
    assert (logits - plain).norm() < bound * plain.norm()
    if family.generates:
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        prompt = {k: v[:, :40] if k == "input_ids" else v for k, v in inputs.items()}
        model.generation_config.pad_token_id = again.generation_config.pad_token_id = 0
        ids = model.generate(**prompt, **options)
        with torch.no_grad():
            # each token is among the best ones of the stock model, up to FP8's noise in its logits
            logits = again(**{**prompt, "input_ids": ids}).logits.float()[:, 39:-1]
        chosen = logits.gather(2, ids[:, 40:, None])[..., 0]
        assert (logits.amax(-1) - chosen < 4 * bound * logits.std()).all()
    model.train()
    coat_ds.unconvert(model)
    loss, gradients = run(model, batch)
    assert coat_ds.conversion_of(model) is None and not any("forward" in m.__dict__ for m in model.modules())
    assert loss == stock[0] and all(g.equal(stock[1][n]) for n, g in gradients.items())


@pytest.mark.each_value
@pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
@pytest.mark.parametrize(
    ("name", "tokens", "padding"),
    [
        ("llama", 32, 0),
        ("mistral", 32, 0),
        ("qwen2", 32, 0),
        ("qwen3", 32, 0),
        ("mistral", 64, 0),
        ("qwen2", 32, 9),
        ("qwen3", 32, 9),
    ],
    ids=["llama", "mistral", "qwen2", "qwen3", "mistral-window", "qwen2-padded", "qwen3-padded"],
)
def test_fused_layers_agree_with_modules(name, tokens, padding, attention_format, monkeypatch):
    family, batch = FAMILIES[name], padded(FAMILIES[name].batch(tokens=tokens), padding)
    _, expected = run(exact(family), batch)
    model = coat_ds.convert(family.build(), {"attention_format": attention_format})
    assert coat_ds.conversion_of(model).converted["layer"] == ["model.layers.0", "model.layers.1"]
    taken = fused_calls(monkeypatch)
    loss, found = run(model, batch)
    assert len(taken) == LAYERS
    bound = fp8_bound(14)
    errors = [relative(found, expected)]
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layer, "why_not_fused", lambda *a: "asked for")
        other, gradients = run(model, batch)
    errors.append(relative(gradients, expected))
    # they share the inputs' codes, and differ by the scale of weights that are multiplied as one, and by
    # rotations in FP32: two errors of the same size, neither larger than the other by more than a part
    assert max(errors) < bound and abs(errors[0] - errors[1]) < bound / 10
    assert relative(found, gradients) < sum(e**2 for e in errors) ** 0.5
    assert abs(loss - other) < 2**-8 * loss


def untouched(model):
    pass


def with_shared_norms(model):
    """Queries and keys share one norm, and a hook has a part in its gradient."""
    first, second = (layer.self_attn for layer in model.model.layers)
    first.k_norm.weight = first.q_norm.weight
    second.q_norm.weight.register_hook(lambda grad: -grad)


@pytest.mark.each_value
@pytest.mark.parametrize("change, padding", [(untouched, 0), (untouched, 9), (with_shared_norms, 0)])
@pytest.mark.parametrize("attention_format", ["bf16", "recompute"])
def test_fused_head_norms_have_right_gradients(attention_format, change, padding, monkeypatch):
    """Of weights that are not all one. Each gradient by itself: theirs are too small to show among all."""
    family, batch = FAMILIES["qwen3"], padded(FAMILIES["qwen3"].batch(), padding)
    models = exact(family), coat_ds.convert(family.build(), {"attention_format": attention_format})
    for model in models:
        torch.manual_seed(1)
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.data.copy_(1 + 0.3 * torch.randn(32))
        change(model)
    taken = fused_calls(monkeypatch)
    (_, expected), (_, found) = (run(model, batch) for model in models)
    assert len(taken) == LAYERS
    for name in (name for name in expected if "self_attn" in name):
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        # as in the first test of this file
        assert error < 2 * fp8_bound(14), name


def test_fused_layers_of_qwen3_vl_with_positions_of_pictures(monkeypatch):
    """Qwen3-VL's layers cannot be called without angles, which differ between the rows of a batch."""
    transformers = pytest.importorskip("transformers")
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = transformers.Qwen3VLTextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **sections},
    )
    torch.manual_seed(0)
    exact = transformers.Qwen3VLTextModel._from_config(config).bfloat16().float().train()
    model = transformers.Qwen3VLTextModel._from_config(config).bfloat16().train()
    model.load_state_dict(exact.state_dict())
    ids, positions = torch.randint(256, (2, 32)), torch.randint(32, (3, 2, 32))
    grad, found = torch.randn(2, 32, 64), []
    taken = fused_calls(monkeypatch)
    for which in (coat_ds.convert(model), exact):
        y = which(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        y.backward(grad.to(y.dtype))
        found.append({name: p.grad.float() for name, p in which.named_parameters()})
    assert len(taken) == 2
    assert relative(*found) < fp8_bound(14)


def test_fused_layers_take_angles_of_one_sequence_for_any_batch(monkeypatch):
    """As where micro-batches of a pipeline share them."""
    family = FAMILIES["llama"]
    x = torch.randn(3, 16, 128).bfloat16()
    angles = family.build().model.rotary_emb(x, torch.arange(16)[None])
    taken, (stock, ours) = fused_calls(monkeypatch), (family.build(), coat_ds.convert(family.build()))
    for rows in (1, 3):
        expected, y = (model.model.layers[0](x[:rows], position_embeddings=angles) for model in (stock, ours))
        assert rel_rms(y, expected) < fp8_forward_bound(7)
    assert len(taken) == 2


def test_layers_run_unfused_with_angles_of_a_part_of_each_head(monkeypatch):
    """Attention rotates one channel per angle, a number that the layer's probe does not have."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    turned = modeling.apply_rotary_pos_emb

    def turned_in_part(q, k, cos, sin, **rest):
        d = cos.shape[-1]
        found = turned(q[..., :d], k[..., :d], cos, sin, **rest)
        return [torch.cat((part, x[..., d:]), -1) for part, x in zip(found, (q, k), strict=True)]

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", turned_in_part)
    models, x = (
        (FAMILIES["llama"].build(), coat_ds.convert(FAMILIES["llama"].build())),
        torch.randn(2, 16, 128),
    )
    assert coat_ds.conversion_of(models[1]).converted["layer"]
    angles = torch.randn(1, 16, 4).repeat(1, 1, 2)
    angles, taken = (angles.cos().bfloat16(), angles.sin().bfloat16()), fused_calls(monkeypatch)
    expected, y = (m.model.layers[0](x.bfloat16(), position_embeddings=angles) for m in models)
    assert not taken and rel_rms(y, expected) < fp8_forward_bound(7)
