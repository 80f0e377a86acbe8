"""What modules compute is found out, whatever they are called and wherever their parameters are."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import coat_ds
from coat_ds.layers.detection import probe
from coat_ds.layers.detection.probe import GatedForm, NormForm
from coat_ds.layers.modules import decoder_parts
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.layers.modules.feed_forward import Fp8GatedFeedForward
from tests.coat_ds.layers.measures import fp8_bound, fused_calls, padded, relative, run, same
from tests.families import FAMILIES

transformers = pytest.importorskip("transformers")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "tanh": None,
    "relu6": None,
    "leaky_relu": None,
    "linear": None,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_probe_recognizes_activations(name):
    assert probe.activation_kind(transformers.activations.ACT2FN[name]) == ACTIVATIONS[name]


class Weighed(nn.SiLU):
    """One that may be given more than its input."""

    def forward(self, x, *, weight=None):
        return super().forward(x) if weight is None else super().forward(x) * weight


class WithSlope(nn.SiLU):
    """With a weight of its own, which begins as 1."""

    def __init__(self):
        super().__init__()
        self.inner = nn.PReLU(init=1.0)

    def forward(self, x):
        return super().forward(self.inner(x))


@pytest.mark.parametrize(
    "other", [Weighed(), WithSlope(), nn.AvgPool1d(2), nn.Dropout(0.5)], ids=lambda x: type(x).__name__
)
def test_probe_refuses_what_is_no_activation(other):
    assert probe.activation_kind(other) is None


def norms():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(32)), nn.Parameter(torch.zeros(32))
            self.eps = 1e-4

        def forward(self, x):
            return F.layer_norm(x, x.shape[-1:], self.weight + 1, self.bias, self.eps)

    class OtherEps(LlamaRMSNorm):
        def forward(self, x):
            return F.rms_norm(x, x.shape[-1:], self.weight, 2 * self.variance_epsilon)

    class Shifted(LlamaRMSNorm):
        def __init__(self, h):
            super().__init__(h)
            self.bias = nn.Parameter(torch.zeros(h))

        def forward(self, x):
            return super().forward(x) + self.bias

    class WithoutEps(LlamaRMSNorm):
        # what it reads has another name
        eps = None

    class Rounded(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x).bfloat16().to(x.dtype)

    return [
        (LlamaRMSNorm(32, 1e-5), NormForm(False, False, 1e-5)),
        (T5LayerNorm(32, 1e-6), NormForm(False, False, 1e-6)),
        (Gemma2RMSNorm(32, 1e-6), NormForm(False, True, 1e-6)),
        (nn.LayerNorm(32, 1e-3), NormForm(True, False, 1e-3)),
        (nn.LayerNorm(32, bias=False), NormForm(True, False, 1e-5)),
        (nn.RMSNorm(32), NormForm(False, False, torch.finfo(torch.float32).eps)),
        (nn.RMSNorm(32, 1e-2), NormForm(False, False, 1e-2)),
        (Centered(), NormForm(True, True, 1e-4)),
        (WithoutEps(32, 1e-5), NormForm(False, False, 1e-5)),
        (OtherEps(32), None),
        (Rounded(32), None),
        # the kernels add a bias to a LayerNorm alone
        (Shifted(32), None),
        (nn.LayerNorm(32, elementwise_affine=False), None),
        (nn.GroupNorm(4, 32), None),
        # over channels and the dimensions after them; channels are the last of two dimensions
        (nn.GroupNorm(1, 32), None),
        (nn.BatchNorm1d(32), None),
    ]


def test_probe_recognizes_norms_under_autocast():
    """MPT's in low precision cast their input there."""

    class Cast(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.bfloat16() if torch.is_autocast_enabled("cpu") else x)

    with torch.autocast("cpu", torch.bfloat16):
        assert probe.norm_form(Cast(32)) == NormForm(True, False, 1e-5)


@pytest.mark.parametrize(("norm", "form"), norms(), ids=lambda x: type(x).__name__)
def test_probe_recognizes_norms(norm, form):
    assert probe.norm_form(norm.to("meta")) == form
    assert all(p.device.type == "meta" for p in norm.parameters())


class Adapted(nn.RMSNorm):
    """With an adapter, which begins as nothing."""

    def __init__(self):
        super().__init__(64, eps=1e-6)
        self.adapter = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(self.adapter.weight)

    def forward(self, x):
        y = super().forward(x)
        return y + self.adapter(y)


class OneBias(nn.LayerNorm):
    """With one number as the bias of all channels."""

    def __init__(self):
        super().__init__(64)
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return F.layer_norm(x, (64,), self.weight, None, self.eps) + self.bias


@pytest.mark.parametrize("norm", [Adapted, OneBias])
def test_probe_refuses_what_is_more_than_a_norm(norm):
    assert probe.norm_form(norm()) is None


class Gated(nn.Module):
    def __init__(self, h, f, forward, act):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(h, f), nn.Linear(f, h), nn.Linear(h, f)
        self.act, self.how = act, forward

    def forward(self, x):
        return self.how(self, x)


class WithScale(Gated):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


@pytest.mark.parametrize("sizes", [(32, 48), (32, 32)], ids=["wide", "square"])
@pytest.mark.parametrize(("act", "kind"), [(nn.SiLU(), "silu"), (nn.GELU(), "gelu"), (nn.Tanh(), None)])
def test_probe_recognizes_gated_feed_forwards_of_any_names(sizes, act, kind):
    wanted = {
        "w1 w3": lambda m, x: m.w2(m.act(m.w1(x)) * m.w3(x)),
        "w3 w1": lambda m, x: m.w2(m.w1(x) * m.act(m.w3(x))),
    }
    for names, forward in wanted.items():
        expected = GatedForm(*names.split(), "w2", kind) if kind else None
        assert probe.gated_form(Gated(*sizes, forward, act)) == expected
    others = [
        lambda m, x: m.w2(m.act(m.w1(x)) * m.w3(x)) * 0.5,
        lambda m, x: m.w2(m.act(m.w1(x)) + m.w3(x)),
        lambda m, x: x + m.w2(m.act(m.w1(x)) * m.w3(x)),
        lambda m, x: m.w2(m.act(m.w1(x)).clamp(max=0.5) * m.w3(x)),
        lambda m, x: 1 / 0,
    ]
    for forward in others:
        assert probe.gated_form(Gated(*sizes, forward, act)) is None
    # some that return another width, one that broadcasts one number, and one that takes a second input
    for name, other in (
        ("w2", nn.Linear(sizes[1], 2 * sizes[0])),
        ("w1", nn.Linear(sizes[0], 1)),
        ("w3", nn.Linear(sizes[0], 1)),
    ):
        wider = Gated(*sizes, wanted["w1 w3"], act)
        setattr(wider, name, other)
        assert probe.gated_form(wider) is None
    assert probe.gated_form(WithScale(*sizes, wanted["w1 w3"], act)) is None


def test_probe_recognizes_linear_layers():
    """GPT-2's lies the other way round, and reads its width."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class WithScale(nn.Linear):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    conv = transformers.pytorch_utils.Conv1D(48, 32)
    assert probe.is_linear(conv, transposed=True) and not probe.is_linear(conv, transposed=False)
    for bias in (True, False):
        assert probe.is_linear(nn.Linear(32, 48, bias=bias), transposed=False)
        for other in (Scaled, WithScale):
            assert not probe.is_linear(other(32, 48, bias=bias), transposed=False)


def test_probe_recognizes_gate_and_up_in_one():
    from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP

    mlp = Phi3MLP(Phi3Config(hidden_size=64, intermediate_size=96, pad_token_id=0))
    assert probe.gated_form(mlp) == GatedForm("gate_up_proj", None, "down_proj", "silu")


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_probe_sees_dropout_in_evaluation(rate):
    """As from_pretrained returns them. Dropout of a module of its own, and of a function."""
    from transformers.models.t5.modeling_t5 import T5Config, T5DenseGatedActDense

    sizes = {"d_model": 32, "d_ff": 48, "feed_forward_proj": "gated-gelu"}
    mlp = T5DenseGatedActDense(T5Config(**sizes, dropout_rate=rate)).eval()
    inner = nn.Sequential(nn.SiLU(), nn.Dropout(rate))
    deep = Gated(32, 48, lambda m, x: m.w2(m.act(m.w1(x)) * m.w3(x)), inner).eval()
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    rates = {"attention_dropout": 0.1, "residual_dropout": rate, "attn_implementation": "sdpa"}
    config = transformers.AutoConfig.for_model("seed_oss", **sizes, **heads, **rates)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = torch.get_rng_state()
    assert (probe.gated_form(mlp) is None) == bool(rate) and not mlp.dropout.training
    assert (probe.gated_form(deep) is None) == bool(rate) and not inner[1].training
    coat_ds.convert(model)
    assert torch.get_rng_state().equal(state)
    assert len(coat_ds.conversion_of(model).converted["layer"]) == (not rate)
    # in training every forward drops
    ids, trained = torch.arange(64)[None], model.bfloat16().train().model.layers[0].mlp
    x = torch.randn(1, 4, 64).bfloat16()
    assert trained(x).equal(trained(x)) == (not rate) and model(ids).logits.isfinite().all()


def test_gated_feed_forward_with_dropout_switched_on_after_convert():
    inner = nn.Sequential(nn.SiLU(), nn.Dropout(0.0))
    gated = Gated(32, 48, lambda m, x: m.w2(m.act(m.w1(x)) * m.w3(x)), inner)
    coat_ds.convert(gated)
    x = torch.randn(4, 32)
    assert type(converted_forward(gated)) is Fp8GatedFeedForward and gated(x).equal(gated(x))
    inner[1].p = 0.5
    assert not gated(x).equal(gated(x))
    gated.eval()
    assert gated(x).equal(gated(x))


def test_decoder_layer_with_norms_registered_in_reverse():
    """What each does shows the layer's forward, not their order."""
    models = [FAMILIES["llama"].build() for _ in "ab"]
    for layer in models[0].model.layers:
        layer._modules = dict(reversed(layer._modules.items()))
    runs = [run(coat_ds.convert(model), FAMILIES["llama"].batch()) for model in models]
    assert len(coat_ds.conversion_of(models[0]).converted["layer"]) == 2
    same(*runs)


def scales_its_output(layer):
    class Scaled(type(layer)):
        def forward(self, *args, **kwargs):
            y = super().forward(*args, **kwargs)
            return y * self.scale if hasattr(self, "scale") else y

    layer.__class__, layer.scale = Scaled, nn.Parameter(torch.full((128,), 2.0).bfloat16())


def gates_its_attention(layer):
    class GatedAttention(type(layer.self_attn)):
        @functools.wraps(type(layer.self_attn).forward)
        def forward(self, hidden_states, **rest):
            y, weights = super().forward(hidden_states, **rest)
            return y * self.gate(hidden_states).sigmoid() if hasattr(self, "gate") else y, weights

    layer.self_attn.__class__, layer.self_attn.gate = GatedAttention, nn.Linear(128, 128).bfloat16()


def reads_no_mask(layer):
    class Causal(type(layer.self_attn)):
        @functools.wraps(type(layer.self_attn).forward)
        def forward(self, *args, attention_mask=None, **rest):
            return super().forward(*args, attention_mask=None, **rest)

    layer.self_attn.__class__ = Causal


def attends_in_both_directions(layer):
    layer.self_attn.is_causal = False


@pytest.mark.parametrize(
    "change", [scales_its_output, gates_its_attention, reads_no_mask, attends_in_both_directions]
)
def test_decoder_layers_that_do_something_else_are_not_fused(change, monkeypatch):
    """A copy without parameters of its own may not show this."""
    batch, models = padded(FAMILIES["llama"].batch(), 9), [FAMILIES["llama"].build() for _ in "ab"]
    for model in models:
        torch.manual_seed(1)
        change(model.model.layers[0])
    taken, ours = fused_calls(monkeypatch), coat_ds.convert(models[1])
    assert coat_ds.conversion_of(ours).converted["layer"] == ["model.layers.1"]
    (_, expected), (_, found) = run(models[0].float(), batch), run(ours, batch)
    assert len(taken) == 1 and relative(found, expected) < fp8_bound(15)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3", "granite", "olmo2"])
def test_decoder_layers_that_are_fused(name):
    """Llama's is one, also with norms of heads; those with other residuals, other orders, multipliers or
    norms of all queries are not."""
    import coat_ds

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "pad_token_id": 0, "attn_implementation": "sdpa"}
    if name == "granite":
        sizes["residual_multiplier"] = 0.3
    config = transformers.AutoConfig.for_model(name, **sizes, **heads)
    model = coat_ds.convert(transformers.AutoModelForCausalLM.from_config(config))
    found = coat_ds.conversion_of(model).converted["layer"]
    assert (len(found) == 1) == (name in ("llama", "qwen3"))
    if name == "llama":
        attention = model.model.layers[0].self_attn
        place = probe.probe_devices(attention)[0]
        assert decoder_parts._is_rotary(attention, place)

        # positions that turn the other way
        def turn(x, position_embeddings, **rest):
            cos, sin = position_embeddings
            return type(attention).forward(attention, x, (cos, -sin), **rest)

        attention.forward = turn
        assert not decoder_parts._is_rotary(attention, place)
    if name == "qwen3":
        attention = model.model.layers[0].self_attn
        place = probe.probe_devices(attention)[0]
        assert decoder_parts._is_rotary(attention, place)

        class Swapped(type(attention)):
            """Queries are normed by the norm of keys."""

            @functools.wraps(type(attention).forward)
            def forward(self, *args, **rest):
                self.q_norm, self.k_norm = self.k_norm, self.q_norm
                try:
                    return super().forward(*args, **rest)
                finally:
                    self.q_norm, self.k_norm = self.k_norm, self.q_norm

        attention.__class__ = Swapped
        assert not decoder_parts._is_rotary(attention, place)
