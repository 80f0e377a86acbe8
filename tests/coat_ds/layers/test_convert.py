"""What convert changes in a model, what it leaves, and how it works with other code that changes models."""

import copy
import functools
import io
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import coat_ds
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_kernels import tensorwise
from coat_kernels.linear import op as products
from tests.coat_ds.layers.measures import (
    fp8_bound,
    fp8_forward_bound,
    placed,
    relative,
    run,
    same,
    saved_bytes,
)
from tests.coat_ds.layers.parts import plain, rewritten
from tests.families import FAMILIES
from tests.interpreter import take_kernels
from tests.util import default_dtype, rel_rms

LLAMA = FAMILIES["llama"]


@pytest.mark.parametrize("which", ["forward", "all", "none"])
def test_convert_sums_some_products_with_fewer_bits(which, monkeypatch):
    multiply, fast = products.scaled_matmul, []

    def noting(*operands):
        fast.append(operands[-1])
        return multiply(*operands)

    monkeypatch.setattr(products, "scaled_matmul", noting)
    coat_ds.convert(LLAMA.build(), {"fast_accumulation": which})(**LLAMA.batch()).loss.backward()
    # of two layers; backward of an input and of a weight: down, gate and up, then attention's projections
    every = which == "all"
    assert fast == [which != "none"] * 8 + 2 * [*[every] * 5, False, every, False]


def test_convert_predicts_input_and_gradient_apart(device, monkeypatch):
    take_kernels(monkeypatch)
    model = coat_ds.convert(nn.Linear(64, 32, bias=False, device=device, dtype=torch.bfloat16))
    x = torch.full((16, 64), 3.0, device=device, dtype=torch.bfloat16)
    grad = torch.full((16, 32), 2.0**-20, device=device, dtype=torch.bfloat16)
    model(x).backward(grad)
    for scale, values in ((model.forward.x_scale, x), (model.forward.grad_scale, grad)):
        amax = values.float().max().view(1)
        assert scale.on(x.device).equal(tensorwise.scale.tensor_scale_reference(amax, scale.fmt))


@pytest.mark.parametrize(
    "default",
    [
        lambda: default_dtype(torch.bfloat16),
        lambda: default_dtype(torch.float16),
        # as of scripts that call `torch.set_default_device("cuda")`
        lambda: torch.device("meta"),
    ],
    ids=["bfloat16", "float16", "meta"],
)
def test_convert_is_independent_of_torchs_defaults(default):
    family = FAMILIES["gpt2"]
    stock, batch = family.build(), family.batch()
    expected = run(model := coat_ds.convert(copy.deepcopy(stock)), batch)
    with default():
        other = coat_ds.convert(stock)
        same(run(other, batch), expected)
    assert coat_ds.conversion_of(other) == coat_ds.conversion_of(model)


@pytest.mark.parametrize("norm", [nn.RMSNorm, functools.partial(nn.RMSNorm, eps=1e-3), nn.LayerNorm])
@pytest.mark.parametrize("act", [nn.GELU, nn.ReLU, functools.partial(nn.GELU, approximate="tanh")])
def test_convert_of_plain_torch(norm, act):
    stock = plain(norm, act)
    model = coat_ds.convert(copy.deepcopy(stock))
    assert coat_ds.conversion_of(model).converted["feed_forward"] == ["0.act", "1.act"]
    summary = coat_ds.conversion_of(model).summary()
    assert all(words in summary for words in ("4 of 4 linear layers", "2 norms in 8 bits", "2 feed-forwards"))
    x, grad = torch.randn(2, 3, 40, 64).bfloat16()
    found, expected = ([m(x)] for m in (model, stock))
    for m, outputs in ((model, found), (stock, expected)):
        outputs += torch.autograd.grad(outputs[0], [*m.parameters()], grad)
    # a ReLU's slope jumps: where the sign of its input is another, which is an error's part of a half turn of
    # the circle, half of the slopes are wrong by one, and half of them are one
    jumps = 0 if act is not nn.ReLU else 2 * fp8_forward_bound(1) / torch.pi
    bound = (fp8_bound(4) ** 2 + 2 * jumps) ** 0.5
    assert all(rel_rms(a, e) < bound for a, e in zip(found, expected, strict=True))


def test_converted_model_copies_and_pickles():
    model, batch = LLAMA.build(), LLAMA.batch()
    coat_ds.convert(model, {"attention_format": "sqrt8"})
    expected = run(model, batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert coat_ds.conversion_of(other) == coat_ds.conversion_of(model)
        for module in other.modules():
            forward = converted_forward(module)
            assert forward is None or forward.module is module
        same(run(other, batch), expected)
        coat_ds.unconvert(other)
        assert other.config._attn_implementation == "sdpa"
    # the copies' own
    same(run(model, batch), expected)


@pytest.mark.parametrize("weight_cache", ["none", "fp8"])
def test_converted_model_averages_weights(weight_cache):
    """A model of torch's moving averages multiplies by the average, also where weights are cached."""
    model, batch, activations = LLAMA.build(), LLAMA.batch(), {"weight_cache": weight_cache}
    average = AveragedModel(coat_ds.convert(model, activations), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        average.update_parameters(model)
        run(average.module, batch)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
    stock = LLAMA.build()
    stock.load_state_dict(average.module.state_dict())
    assert coat_ds.conversion_of(average.module) == coat_ds.conversion_of(model)
    same(run(average.module, batch), run(coat_ds.convert(stock, activations), batch))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("attention_format", ["bf16", "recompute"])
def test_converted_model_keeps_no_weights_in_evaluation(attention_format, mode):
    activations = {"weight_cache": "fp8", "attention_format": attention_format}
    models = [coat_ds.convert(LLAMA.build(), activations) for _ in range(2)]
    batch = LLAMA.batch()
    with mode():
        models[0](**batch)
    for layer in models[0].model.layers:
        linears = layer.self_attn.o_proj, layer.mlp.down_proj
        gemms = [converted_forward(layer).qkv, *(converted_forward(linear) for linear in linears)]
        assert not any(gemm.cache.nbytes for gemm in gemms)
    same(*(run(model, batch) for model in models))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "qwen3_moe_grouped"])
def test_converted_model_on_the_meta_device(name, caplog):
    """On "meta"; transformers masks nothing there as long as a cache is filled."""
    family = FAMILIES[name]
    stock, batch = family.build().to("meta"), placed(family.batch(), "meta")
    expected = stock(**batch, use_cache=True).logits
    logits = coat_ds.convert(stock)(**batch, use_cache=True).logits
    assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
    said = [r.getMessage() for r in caplog.records if "COAT" in r.getMessage()]
    assert len(said) == 1 and "linear layers in FP8" in said[0]


def test_convert_again_takes_the_last_options():
    model = coat_ds.convert(plain(), {"saved_format": "e4m3"})
    count = len(coat_ds.conversion_of(model).converted["linear"])
    assert coat_ds.convert(model) is model
    assert coat_ds.conversion_of(model).activations.saved_format == "sqrt8"
    assert len(coat_ds.conversion_of(model).converted["linear"]) == count
    # one call removes what two have installed
    assert not any(map(converted_forward, coat_ds.convert(model, {"enabled": False}).modules()))
    assert coat_ds.conversion_of(coat_ds.convert(plain(), {"enabled": False})) is None
    assert coat_ds.unconvert(stock := plain()) is stock


def test_convert_counts_linear_layers_of_other_weights():
    """Weight norm computes the weight in each forward; FP8 checkpoints of transformers have separate scales;
    compressed-tensors has codes in its place."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Embedding(64, 64))
    weight_norm(model[0])
    model[1].register_parameter("weight_scale_inv", nn.Parameter(torch.ones(())))
    del model[2].weight, model[4].weight
    conversion = coat_ds.conversion_of(coat_ds.convert(model))
    assert conversion.left == {
        "0": "a weight that each forward recomputes from other parameters",
        "1": "more than a weight and a bias",
        "2": "a weight that each forward recomputes from other parameters",
    }
    assert conversion.summary().startswith("1 of 4 linear layers in FP8")


def test_convert_leaves_activations_that_work_in_place():
    """Code that reads their input afterwards reads what they wrote."""
    stock = nn.Sequential(nn.Linear(64, 72), nn.SiLU(inplace=True), nn.ReLU(inplace=True), nn.ReLU())
    model = coat_ds.convert(copy.deepcopy(stock))
    assert list(coat_ds.conversion_of(model).left.values())[1:] == ["it works in place"] * 2
    assert coat_ds.conversion_of(model).converted["feed_forward"] == ["3"]
    x = torch.randn(8, 64)
    # of a size that is not converted
    y, expected = (layers[0](x) for layers in (model, stock))
    model[2](y), stock[2](expected)
    assert y.equal(expected)


def test_convert_takes_a_filter_and_gives_reasons():
    model = coat_ds.convert(LLAMA.build(), filter=lambda name, module: "layers.0" not in name)
    conversion = coat_ds.conversion_of(model)
    assert conversion.left["model.layers.0.mlp.up_proj"] == "the filter"
    assert len(conversion.converted["linear"]) == 7
    assert conversion.summary().startswith("7 of 15 linear layers in FP8")
    model = coat_ds.convert(LLAMA.build(), filter=lambda name, module: not name.endswith("layers.1"))
    assert coat_ds.conversion_of(model).converted["layer"] == ["model.layers.0"]
    none = coat_ds.convert(nn.Sequential(nn.Linear(64, 72)), filter=lambda name, module: False)
    assert coat_ds.conversion_of(none).left == {"0": "the filter"}
    classifier = coat_ds.convert(FAMILIES["vit"].build(num_labels=32))
    assert coat_ds.conversion_of(classifier).left == {"classifier": "the output head"}
    mixed = nn.ModuleDict(
        {
            "odd": nn.Linear(64, 72),
            "odd input": nn.Linear(72, 64),
            "small": nn.Linear(64, 16),
            "batch": nn.BatchNorm1d(64),
            "embed": nn.Embedding(128, 64),
            "head": nn.Linear(64, 128, bias=False),
            "attention": nn.MultiheadAttention(64, 4),
            "wrapped": nn.ModuleDict(
                {"base_layer": nn.Linear(64, 64), "a": nn.ModuleDict({"x": nn.Linear(64, 16)})}
            ),
            "bytes": nn.Linear(64, 64, dtype=torch.float64),
        }
    )
    mixed["head"].weight = mixed["embed"].weight
    mixed["scaled"] = type("Scaled", (nn.RMSNorm,), {})(64)
    mixed["scaled"].scale = nn.Parameter(torch.ones(64))
    coat_ds.convert(mixed)
    assert coat_ds.conversion_of(mixed).converted["linear"] == ["wrapped.base_layer"]
    assert coat_ds.conversion_of(mixed).left == {
        "odd": "72 x 64, not multiples of 16",
        "odd input": "64 x 72, not multiples of 16",
        "small": "16 x 64, too small to gain by FP8",
        "batch": "BatchNorm1d is neither RMSNorm nor LayerNorm",
        "head": "the output head",
        "attention.out_proj": "torch's MultiheadAttention multiplies by itself",
        "wrapped.a.x": "an adapter",
        "bytes": "a weight in float64",
        "scaled": "Scaled is neither RMSNorm nor LayerNorm",
    }


def test_convert_leaves_the_only_layer_with_the_sizes_of_an_embedding():
    def parts(*layers):
        return nn.Sequential(nn.Embedding(128, 64), *layers)

    for model, left in (
        (parts(nn.Linear(64, 64), nn.Linear(64, 128)), {"2": "the output head"}),
        # layers of one size repeat inside a model
        (parts(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 128)), {}),
        (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128)), {}),
    ):
        assert coat_ds.conversion_of(coat_ds.convert(model)).left == left


def test_converted_model_refuses_an_input_on_another_device():
    model = coat_ds.convert(plain())
    # as nn.DataParallel's copies call it
    with pytest.raises(RuntimeError, match="layer on cpu got an input on meta.*DistributedDataParallel"):
        model[0].up(torch.empty(4, 64, device="meta", dtype=torch.bfloat16))


class Patched(nn.Module):
    """A norm as another class computes it."""

    def __init__(self, width, power=0.5):
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.ones(width)), 1e-6, power

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps) ** self.power * self.weight


def doubled(self, x):
    return 2 * F.linear(x, self.weight, self.bias)


def test_convert_recognizes_patched_forwards_by_what_they_compute():
    model = plain(norm=Patched)
    model[1].norm.power = 0.4
    model[0].up.forward = types.MethodType(rewritten, model[0].up)
    model[1].up.forward = types.MethodType(doubled, model[1].up)
    coat_ds.convert(model)
    conversion = coat_ds.conversion_of(model)
    assert conversion.converted["norm"] == ["0.norm"]
    assert conversion.converted["linear"] == ["0.up", "0.down", "1.down"]
    assert conversion.left == {
        "1.norm": "Patched is neither RMSNorm nor LayerNorm",
        "1.up": "Linear computes something else than a linear layer",
    }
    coat_ds.unconvert(model)
    assert model[0].up.forward.__func__ is rewritten and model[1].up.forward.__func__ is doubled


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma3"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "fp32"])
def test_converted_fp32_model_returns_stock_dtypes(name, autocast):
    family = FAMILIES[name]
    model, batch = family.build(torch.float32), family.batch()
    dtypes = {}

    def dtypes_of_outputs():
        found = {}

        def note(name, module, args, output):
            if isinstance(output, torch.Tensor):
                found[name] = output.dtype

        hooks = [m.register_forward_hook(functools.partial(note, n)) for n, m in model.named_modules()]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        model.zero_grad()
        loss.backward()
        for hook in hooks:
            hook.remove()
        return found, {n: p.grad.clone() for n, p in model.named_parameters()}

    dtypes, expected = dtypes_of_outputs()
    coat_ds.convert(model)
    products = len(coat_ds.conversion_of(model).converted["linear"])
    for _ in range(2):
        found, gradients = dtypes_of_outputs()
        # activations of gated layers are part of the gated layers
        assert {n: d for n, d in dtypes.items() if n in found} == found
        assert relative(gradients, expected) < fp8_bound(products)


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert"])
def test_converted_fp32_model_under_autocast_always_rounds_alike(name, device):
    """Without gradients as with them, and in the first forward, which does not know yet that more than
    products read a norm of BERT, as in later ones."""
    family = FAMILIES[name]
    model = coat_ds.convert(family.build(torch.float32).to(device)).eval()
    batch = placed(family.batch(), device)

    def loss():
        with torch.autocast(device.type, torch.bfloat16):
            return model(**batch).loss.detach()

    first, second = loss(), loss()
    with torch.no_grad():
        assert first.equal(second) and first.equal(loss())


def test_convert_leaves_a_model_that_shares_the_config(caplog):
    """A warning is logged, as for a reference model that TRL loads; not where `filter` left attention."""
    import transformers

    config = transformers.LlamaConfig(**LLAMA.fields)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.LlamaForCausalLM(config).bfloat16())
    batch = LLAMA.batch()
    expected, bytes_before = run(models[1], batch), saved_bytes(models[1], batch)
    coat_ds.convert(models[0], {"attention_format": "sqrt8"})
    run(models[0], batch)
    assert "a model that was not converted" not in caplog.text
    same(run(models[1], batch), expected)
    assert saved_bytes(models[1], batch) == bytes_before
    assert caplog.text.count("a model that was not converted has the config of one that was") == 1
    assert len(coat_ds.conversion_of(coat_ds.convert(models[1])).converted["attention"]) == 2
    for model in models:
        coat_ds.unconvert(model)
    caplog.clear()
    coat_ds.convert(models[0], filter=lambda name, module: ".0." not in name)
    run(models[0], batch)
    run(coat_ds.unconvert(models[0]), batch)
    assert "a model that was not converted" not in caplog.text


def test_converted_model_compiled_equals_eager():
    model = coat_ds.convert(plain())
    x = torch.randn(16, 64).bfloat16()
    y = model(x)
    y.float().square().sum().backward()
    expected = [y.detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    torch.compiler.reset()
    y = torch.compile(model, backend="aot_eager")(x)
    y.float().square().sum().backward()
    # what waits for a product in one is written in the other, and then saved in FP8 by the product
    for found, wanted in zip([y, *(p.grad for p in model.parameters())], expected, strict=True):
        assert rel_rms(found, wanted) < fp8_bound(2)
