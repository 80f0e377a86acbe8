"""transformers' families, converted: what they compute, what they save, and that they stay themselves."""

import pytest
import torch

import coat_ds
from coat_ds.layers.modules import decoder_layer
from tests.coat_ds.layers.measures import (
    blocks_taken,
    bytes_left_behind,
    fp8_bound,
    fp8_forward_bound,
    relative,
    run,
    same,
    saved_bytes,
)
from tests.families import FAMILIES, LAYERS, losses_of
from tests.util import rel_rms

ALL = pytest.mark.parametrize("name", FAMILIES)


def exact(family):
    """The same weights, rounded to BF16, in FP32."""
    return family.build().float()


@ALL
def test_loss_and_gradients_are_off_by_what_fp8_explains(name):
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
def test_bytes_saved_by_a_layer(name):
    family = FAMILIES[name]
    stock = per_layer(family, None)
    assert per_layer(family, {}) <= 0.45 * stock
    assert per_layer(family, {"attention_format": "sqrt8"}) <= 0.40 * stock


@pytest.mark.parametrize("attention_format", ["bf16", "sqrt8", "recompute"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_padding_costs_one_mask_for_all_layers(name, attention_format):
    """By fused blocks and without. torch saves a mask in each layer, and repeated heads."""
    family = FAMILIES[name]
    model, batch = coat_ds.convert(family.build(), {"attention_format": attention_format}), family.batch()
    padded = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    padded["attention_mask"][1, -9:] = 0
    run(model, batch)
    rows, tokens = batch["input_ids"].shape
    assert saved_bytes(model, padded) - saved_bytes(model, batch) == 2 * rows * tokens**2


@ALL
def test_what_is_offloaded_is_not_held(name):
    family = FAMILIES[name]
    model = coat_ds.convert(family.build(), {"attention_format": "sqrt8"})
    run(model, family.batch())
    assert bytes_left_behind(model, family.batch()) == 0


def test_bytes_saved_by_many_experts():
    """Two of eight tensors that the experts of a token keep in BF16 are left, in 8 bits."""
    family = FAMILIES["qwen3_moe_grouped"]
    assert per_layer(family, {}) <= 0.35 * per_layer(family, None)


@ALL
def test_a_converted_model_stays_itself(name, tmp_path):
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


long = pytest.mark.long("trains every family five times")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "llama" else long) for n in FAMILIES])
def test_trains_as_bf16_within_what_seeds_change(name):
    family = FAMILIES[name]
    last = [sum(losses_of(family, 30, None, seed)[-5:]) / 5 for seed in range(4)]
    losses = losses_of(family, 30, {})
    found = sum(losses[-5:]) / 5
    middle = sum(last) / 4
    spread = (sum((loss - middle) ** 2 for loss in last) / 3) ** 0.5
    assert found < losses[0] - 0.2
    # three deviations of one more seed, and FP8's noise of less than a percent
    assert abs(found - middle) < 3 * spread + 0.01 * middle


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
def test_blocks_agree_with_the_modules(name, tokens, padding, attention_format, monkeypatch):
    family, batch = FAMILIES[name], FAMILIES[name].batch(tokens=tokens)
    if padding:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, -padding:] = 0
        batch["labels"][1, -padding:] = -100
    _, expected = run(exact(family), batch)
    model = coat_ds.convert(family.build(), {"attention_format": attention_format})
    assert coat_ds.conversion_of(model).converted["layer"] == ["model.layers.0", "model.layers.1"]
    taken = blocks_taken(monkeypatch)
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


def test_blocks_are_taken_where_nobody_can_tell(monkeypatch):
    family, batch = FAMILIES["llama"], FAMILIES["llama"].batch()
    taken = blocks_taken(monkeypatch)

    def blocks(model, **inputs):
        taken.clear()
        run(model, {**batch, **inputs})
        return len(taken)

    model = coat_ds.convert(family.build())
    layers = model.model.layers
    assert blocks(model) == 2
    assert blocks(model, attention_mask=torch.ones_like(batch["input_ids"])) == 2
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -8:] = 0
    assert blocks(model, attention_mask=mask) == 2
    scores = torch.zeros(2, 1, 64, 64).masked_fill_(torch.ones(64, 64).triu(1).bool(), -torch.inf)
    assert blocks(model, attention_mask=scores.bfloat16()) == 2
    # attention that is recomputed hands a bias no gradient
    for other in (scores, scores.bfloat16().requires_grad_()):
        assert blocks(model, attention_mask=other) == 0
    assert blocks(model, use_cache=True) == 0
    seen = []
    for module in (layers[0].self_attn.k_proj, layers[0].mlp.up_proj):
        seen.clear()
        hook = module.register_forward_hook(lambda *a: seen.append(1))
        assert blocks(model) == 1 and seen
        hook.remove()
    hook = layers[0].mlp.register_full_backward_hook(lambda *a: None)
    assert blocks(model) == 1
    hook.remove()
    layers[1].mlp.down_proj.requires_grad_(False)
    assert blocks(model) == 1
    layers[1].mlp.down_proj.requires_grad_(True)
    layers[0].self_attn.attention_dropout = 0.5
    assert blocks(model) == 1
    # nothing is dropped out in evaluation
    assert blocks(model.eval()) == 2
    model.train()
    layers[0].self_attn.attention_dropout = 0.0
    expected = run(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert blocks(model) == 2
        same(run(model, batch), expected)
        # norms and the residual in FP32, products in BF16
        assert blocks(coat_ds.convert(family.build(torch.float32))) == 0
    assert blocks(model) == 2


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("attention_format", ["bf16", "recompute"])
def test_norms_of_heads_in_blocks(attention_format, padding, monkeypatch):
    """Of weights that are not all one. Each gradient by itself: theirs are too small to show among all."""
    family, batch = FAMILIES["qwen3"], FAMILIES["qwen3"].batch()
    if padding:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, -padding:] = 0
        batch["labels"][1, -padding:] = -100
    models = exact(family), family.build()
    for model in models:
        torch.manual_seed(1)
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.data.copy_(1 + 0.3 * torch.randn(32))
    _, expected = run(models[0], batch)
    coat_ds.convert(models[1], {"attention_format": attention_format})
    taken = blocks_taken(monkeypatch)
    _, found = run(models[1], batch)
    assert len(taken) == LAYERS
    for name in (name for name in expected if "self_attn" in name):
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        # as in the first test of this file
        assert error < 2 * fp8_bound(14), name


@pytest.mark.parametrize("name", ["self_attn.q_norm", "input_layernorm", "mlp"])
def test_modules_that_are_replaced_after_convert(name, monkeypatch):
    """The block of the layer would go on with the module that it was made of."""
    family, batch = FAMILIES["qwen3"], FAMILIES["qwen3"].batch()
    model, taken = coat_ds.convert(family.build()), blocks_taken(monkeypatch)
    first = model.model.layers[0]
    new = family.build().model.layers[0].get_submodule(name)
    first.set_submodule(name, new)
    _, gradients = run(model, batch)
    assert len(taken) == LAYERS - 1
    assert all(f"model.layers.0.{name}.{own}" in gradients for own, _ in new.named_parameters())


def test_attention_that_looks_both_ways_since_it_was_converted(monkeypatch):
    """As in an encoder that is made of a decoder. Without a mask the block would attend to the past alone."""
    family = FAMILIES["llama"]
    models, taken = (exact(family), coat_ds.convert(family.build())), blocks_taken(monkeypatch)
    _, causal = run(models[0], family.batch())
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    (_, expected), (_, found) = (run(model, family.batch()) for model in models)
    assert not taken
    assert relative(found, expected) < fp8_bound(14) < relative(causal, expected)


def test_activations_that_somebody_watches_or_replaces(monkeypatch):
    """Kernels compute what they were when the layer was converted, and call no module."""
    family, batch = FAMILIES["qwen3"], FAMILIES["qwen3"].batch()
    models, taken = (exact(family), coat_ds.convert(family.build())), blocks_taken(monkeypatch)
    seen = []
    for model in models:
        first, second = (layer.mlp for layer in model.model.layers)
        first.act_fn.register_forward_hook(lambda module, args, y: seen.append(module) or y.clamp(max=0.1))
        second.act_fn = torch.nn.ReLU()
    (loss, expected), (found, gradients) = (run(model, batch) for model in models)
    assert not taken and seen == [model.model.layers[0].mlp.act_fn for model in models]
    assert abs(found - loss) < 0.01 * loss
    for name in (f"model.layers.{i}.mlp.gate_proj.weight" for i in (0, 1)):
        assert rel_rms(gradients[name], expected[name]) < fp8_bound(14), name


def test_text_layers_with_positions_of_pictures(monkeypatch):
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
    taken = blocks_taken(monkeypatch)
    for which in (coat_ds.convert(model), exact):
        y = which(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        y.backward(grad.to(y.dtype))
        found.append({name: p.grad.float() for name, p in which.named_parameters()})
    assert len(taken) == 2
    assert relative(*found) < fp8_bound(14)


def test_angles_of_one_sequence_are_for_batches_of_any_size(monkeypatch):
    """As where micro-batches of a pipeline share them."""
    family = FAMILIES["llama"]
    x = torch.randn(3, 16, 128).bfloat16()
    angles = family.build().model.rotary_emb(x, torch.arange(16)[None])
    taken, (stock, ours) = blocks_taken(monkeypatch), (family.build(), coat_ds.convert(family.build()))
    for rows in (1, 3):
        expected, y = (model.model.layers[0](x[:rows], position_embeddings=angles) for model in (stock, ours))
        assert rel_rms(y, expected) < fp8_forward_bound(7)
    assert len(taken) == 2


@pytest.mark.parametrize("attention_format", ["bf16", "recompute"])
def test_norms_of_heads_get_each_gradient_once(attention_format, monkeypatch):
    """Where queries and keys share one norm, and a hook has a part in its gradient."""
    family, batch = FAMILIES["qwen3"], FAMILIES["qwen3"].batch()
    models = exact(family), family.build()
    coat_ds.convert(models[1], {"attention_format": attention_format})
    for model in models:
        first, second = (layer.self_attn for layer in model.model.layers)
        first.k_norm.weight = first.q_norm.weight
        second.q_norm.weight.register_hook(lambda grad: -grad)
    _, expected = run(models[0], batch)
    taken = blocks_taken(monkeypatch)
    _, found = run(models[1], batch)
    assert len(taken) == LAYERS
    for name in (name for name in expected if "_norm.weight" in name):
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        assert error < 2 * fp8_bound(14), name


def test_norms_of_heads_that_somebody_watches(monkeypatch):
    family, batch = FAMILIES["qwen3"], FAMILIES["qwen3"].batch()
    taken = blocks_taken(monkeypatch)

    def blocks(model):
        taken.clear()
        run(model, batch)
        return len(taken)

    model = coat_ds.convert(family.build())
    first, second = (layer.self_attn for layer in model.model.layers)
    seen = []
    hook = first.q_norm.register_forward_hook(lambda *a: seen.append(1))
    assert blocks(model) == 1 and seen
    hook.remove()
    second.k_norm.requires_grad_(False)
    assert blocks(model) == 1
    second.k_norm.requires_grad_(True)
    assert blocks(model) == 2
    stock = second.q_norm.forward
    second.q_norm.forward = lambda x: stock(x)
    assert blocks(model) == 1


def test_angles_of_a_part_of_each_head(monkeypatch):
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
    angles, taken = (angles.cos().bfloat16(), angles.sin().bfloat16()), blocks_taken(monkeypatch)
    expected, y = (m.model.layers[0](x.bfloat16(), position_embeddings=angles) for m in models)
    assert not taken and rel_rms(y, expected) < fp8_forward_bound(7)


def test_a_mask_that_is_handed_over_by_position(monkeypatch):
    models = FAMILIES["llama"].build(), coat_ds.convert(FAMILIES["llama"].build())
    x, taken = torch.randn(2, 16, 128).bfloat16(), blocks_taken(monkeypatch)
    angles, mask = models[0].model.rotary_emb(x, torch.arange(16)[None]), torch.eye(16).bool()[None, None]
    expected, y = (m.model.layers[0](x, mask, position_embeddings=angles) for m in models)
    assert not taken and rel_rms(y, expected) < fp8_forward_bound(7)
