"""Experts of `--moe-grouped-gemm` against Megatron's own in FP32, with the same weights, and their saved
bytes."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu

from coat_ds.config import ActivationsConfig
from coat_ds.layers.inventory import layers_of
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from megatron_ext.saved_bytes import SavedStorages
from tests.kernels.agreement import BF16_RMS, EXPERTS_BACKWARD, EXPERTS_FORWARD
from tests.megatron_ext.experts import (
    ALL_TO_ALL,
    DROPPING,
    EXPERTS,
    GPT,
    GROUPED,
    PADDED,
    RECOMPUTED,
    VOCAB,
    B,
    H,
    S,
    build_mixture,
    grouped_mixture,
    train,
)
from tests.megatron_ext.layers import loss_of, random_tokens, whole, without_rounding
from tests.util import rel_rms, run_distributed

FFN = EXPERTS["moe_ffn_hidden_size"]
# the part of the experts' errors that BF16 makes (`tests.kernels.agreement`)
BF16_FORWARD, BF16_BACKWARD = 8**0.5 * BF16_RMS, 4 * BF16_RMS
# some experts have no rows, and some end within a tile
OF_EACH = (9, 0, 16, 25)
ROWS = sum(OF_EACH)
CLAMP = 2.0
CASES = {
    "swiglu": {},
    "gelu": GPT,
    "geglu": GPT | {"gated_linear_unit": True, "add_bias_linear": False},
    "squared relu": GPT | {"activation_func": squared_relu, "add_bias_linear": False},
    "gpt-oss": {
        **{"activation_func": quick_gelu, "activation_func_clamp_value": CLAMP, "glu_linear_offset": 1.0},
        **{"moe_shared_expert_intermediate_size": None},
    },
    "swiglu, clamped": {
        **{"activation_func_clamp_value": CLAMP, "moe_shared_expert_intermediate_size": None},
    },
    "swiglu, offset": {"glu_linear_offset": 1.0, "moe_shared_expert_intermediate_size": None},
    "softplus": GPT | {"activation_func": F.softplus},
    "weights in front": {
        **{"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    },
}


def _stock(grouped, dtype=torch.float32, **config):
    """Megatron's own experts with the weights of `grouped`."""
    experts = (
        build_mixture(sdpa_layer_spec, bf16=dtype == torch.bfloat16, **config).decoder.layers[1].mlp.experts
    )
    experts.load_state_dict(grouped.state_dict())
    for expert in experts.local_experts:
        # as with several ranks: with one rank Megatron adds biases in place, which autograd refuses
        expert.linear_fc2.explicit_expert_comm = True
    return experts


def _inputs(device, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(ROWS, H, generator=generator).bfloat16() for _ in range(2))
    return [t.to(device) for t in (x, torch.rand(ROWS, generator=generator), grad)]


def _run(experts, x, probs, grad):
    """The output and every gradient; gradients of experts' parameters by SequentialMLP's names."""
    dtype = next(experts.parameters()).dtype
    x, probs = x.to(dtype, copy=True).requires_grad_(), probs.clone().requires_grad_()
    experts.zero_grad()
    y, bias = experts(x, torch.tensor(OF_EACH), probs)
    assert bias is None and y.dtype == dtype
    y.backward(grad.to(dtype))
    named = {}
    for name, p in experts.named_parameters():
        if name.startswith("local_experts"):
            named[name] = p.grad
        else:
            named |= {f"local_experts.{i}.{name}": part for i, part in enumerate(p.grad)}
    return y, {"x": x.grad, "probs": probs.grad} | named


@pytest.fixture(params=CASES)
def case(request, megatron):
    # dense layers support fewer activations
    config = {"bias_activation_fusion": False, "moe_layer_freq": [1, 1]} | CASES[request.param]
    _, grouped = grouped_mixture(**config)
    for number, (name, p) in enumerate(grouped.named_parameters()):
        # as large as rows are at the start of either GEMM; biases begin with zeros
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        p.data.copy_(noise / (1 if name.endswith("bias") else p.shape[-1] ** 0.5))
    return config, grouped


def test_grouped_experts_equal_megatrons(case, device):
    config, grouped = case
    exact, inputs, near = _stock(grouped, **config), _inputs(device), []
    if config.get("activation_func_clamp_value"):
        # if rounding carries a value over a clamp, its whole derivative changes: at most the values within
        # four standard deviations of BF16's rounding and of the saved one
        width = 4 * (EXPERTS_FORWARD**2 + EXPERTS_BACKWARD["sqrt8"] ** 2) ** 0.5

        def count(linear, args, output):
            near.append(((output[0].abs() / CLAMP - 1).abs() < width).flatten())

        for expert in exact.local_experts:
            expert.linear_fc1.register_forward_hook(count)
    expected, wanted = _run(exact, *inputs)
    y, grads = _run(grouped, *inputs)
    y_bf16, in_bf16 = _run(_stock(grouped, torch.bfloat16, **config), *inputs)
    crossing = torch.cat(near).float().mean().item() if near else 0
    # router weights before the experts add a rounding to the input of the first GEMM, and gate doubles its
    # part
    forward = (EXPERTS_FORWARD**2 + 5 * BF16_RMS**2 * config.get("moe_apply_probs_on_input", False)) ** 0.5
    assert rel_rms(y, expected) < forward and rel_rms(y, y_bf16) < 2 * forward
    assert grads.keys() == wanted.keys()
    # the size of an error in few numbers is known to two standard deviations
    of_few = 1 + 2 / (2 * ROWS) ** 0.5
    for name, grad in wanted.items():
        bound = of_few * (EXPERTS_BACKWARD["sqrt8"] ** 2 + crossing) ** 0.5
        assert rel_rms(grads[name], grad) < bound, name
        assert rel_rms(grads[name], in_bf16[name]) < bound + of_few * EXPERTS_FORWARD, name
        if name.startswith("local_experts"):
            assert grads[name].any() == bool(OF_EACH[int(name.split(".")[1])]), name


@pytest.mark.parametrize("of_each", [OF_EACH, (0, 0, 0, 0), (50, 0, 0, 0), (50,)], ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_grouped_experts_save_8_bits(megatron, of_each, biases, device):
    config = {"num_moe_experts": len(of_each), "moe_router_topk": 1, "moe_router_pre_softmax": True}
    _, experts = grouped_mixture(**(GPT | config | {"add_bias_linear": biases, "gated_linear_unit": True}))
    x, probs, _ = (t[: sum(of_each)].requires_grad_() for t in _inputs(device))
    known = {t.untyped_storage().data_ptr() for t in (x, probs, *experts.parameters())}
    kept = SavedStorages(known.__contains__)
    with kept.counting():
        experts(x, torch.tensor(of_each), probs)
    # biases need nothing more
    assert kept.nbytes == (_grouped_bytes(of_each) if len(x) else 0)
    kept = SavedStorages(known.__contains__)
    with torch.no_grad(), kept.counting():
        experts(x, torch.tensor(of_each), probs)
    assert kept.nbytes == 0


def _kept(spec, device, **config):
    """The bytes that a layer of experts saves for backward, and the rows of each expert of this rank."""
    layer = build_mixture(spec, moe_shared_expert_intermediate_size=None, **config).decoder.layers[1].mlp
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1))
    x = x.to(device, torch.bfloat16).requires_grad_()
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    kept, of_each = SavedStorages(known.__contains__), []
    layer.experts.register_forward_pre_hook(lambda _, args: of_each.extend(args[1].tolist()))
    with kept.counting():
        layer(x)
    return kept.nbytes, of_each


def _stock_bytes(of_each):
    """Megatron's experts: the input, gate and up, and the output of the activation, in BF16."""
    return (2 * H + 6 * FFN) * sum(of_each)


def _grouped_bytes(of_each):
    """The input of the experts in FP8, the input of the activation in groups of 8 bits, the end of each
    expert, the scale of the input, and the amax of the activation's output and of two weights."""
    return H * sum(of_each) + 2 * FFN * sum(of_each) * 17 // 16 + 4 * len(of_each) + 4 * 4


def _sequential_bytes(of_each):
    """As for grouped experts, except that each expert's input has one scale and rows padded to multiples of
    16, and that the output is saved in BF16. Each expert has four scales."""
    rows, filled = sum(of_each), sum(-(-n // 16) * 16 for n in of_each)
    return H * filled + 2 * FFN * rows * 17 // 16 + 2 * H * rows + 16 * len(of_each)


def test_layer_with_grouped_experts_saves_nothing_else(megatron, device):
    (stock, of_each), (grouped, _) = _kept(sdpa_layer_spec, device), _kept(coat_layer_spec, device, **GROUPED)
    assert sum(of_each) == S * B * EXPERTS["moe_router_topk"] and len(of_each) == EXPERTS["num_moe_experts"]
    assert stock - grouped == _stock_bytes(of_each) - _grouped_bytes(of_each)


@pytest.mark.parametrize("config", [{}, GPT], ids=["swiglu", "biases"])
def test_grouped_experts_have_the_initial_values_of_megatrons(megatron, config):
    _, experts = grouped_mixture(**config)
    stock = build_mixture(sdpa_layer_spec, **config).decoder.layers[1].mlp.experts
    for name, weight in stock.state_dict().items():
        assert weight is None or weight.equal(experts.state_dict()[name]), name
    for name, p in experts.named_parameters():
        marks = dict(vars(stock.local_experts[0].get_parameter(name)))
        if "partition_dim" in marks:
            marks["partition_dim"] += 1
        assert vars(p) == marks, name


def test_grouped_experts_in_the_log(megatron):
    model, _ = grouped_mixture()
    layers = layers_of(model.decoder, "")
    assert not layers.left and layers.made["linear"]["e4m3, 4 experts in one grouped GEMM"] == 2
    # those of a dense layer, of the shared expert, and of the routed experts
    assert layers.made["feed_forward"] == {"in 8 bits (sqrt8)": 3}


def test_grouped_experts_ignore_recompute_modules_without_selective(megatron):
    """Megatron reads `recompute_modules` only with the selective granularity."""
    grouped_mixture(recompute_granularity=None, recompute_modules=["moe_act"])


def test_grouped_experts_load_only_their_own_keys(megatron):
    """Loaders for ZeRO-3 pass the whole state dict to each module."""
    experts = grouped_mixture()[0].decoder.layers[1].mlp.experts
    stored = {f"experts.{name}": value for name, value in experts.state_dict().items()}
    # SequentialMLP's layers have this key without contents
    stored |= {"experts.local_experts.0.linear_fc1._extra_state": None, "other._extra_state": torch.ones(1)}
    missing = []
    experts._load_from_state_dict(stored, "experts.", {}, True, missing, [], [])
    assert not missing and [name for name in stored if "_extra_state" in name] == ["other._extra_state"]


EP2, TP2 = {"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
# each rank's part consists of whole groups
SPREAD = {"sequence_parallel": True, "moe_ffn_hidden_size": 64}
LAYOUTS = {
    "expert parallel": (EP2, {}),
    "biases": (EP2, GPT),
    "tensor parallel": (TP2, SPREAD),
    "all to all": (EP2, ALL_TO_ALL),
    "all to all, dropping": (EP2, DROPPING),
    "all to all, padded": (EP2, PADDED),
    "recomputed": (EP2, RECOMPUTED),
    "all to all, tensor parallel": (TP2, SPREAD | ALL_TO_ALL),
    # the layers around the experts are split, the experts are whole
    "all to all, tensor and expert parallel": (
        TP2 | EP2 | {"expert_tensor_parallel_size": 1},
        SPREAD | ALL_TO_ALL,
    ),
}
DISPATCHERS = {"allgather": {}, "alltoall": ALL_TO_ALL, "alltoall, padded": PADDED}


def _two_ranks():
    from megatron.core import parallel_state

    from megatron_ext import cpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    dist.init_process_group("gloo")
    result = {}
    for layout, (sizes, config) in LAYOUTS.items():
        initialize_model_parallel(**sizes)
        seed = 0 if "tensor" in layout else dist.get_rank()
        tokens = random_tokens(B, S, VOCAB, 5 + seed)
        batches = {"text": tokens}
        if layout in ("expert parallel", "all to all"):
            # equal tokens go to the same expert, and one rank's experts have none
            batches["one expert"] = torch.full((B, S), 7)
            config = config | {"moe_router_topk": 1, "moe_router_pre_softmax": True}
        model_config = config | {"bf16": False} | sizes
        for batch, tokens in batches.items():
            kinds = [("grouped", coat_layer_spec, GROUPED), ("stock", sdpa_layer_spec, {})]
            kinds.append(("one after another", coat_layer_spec, {}))
            for name, spec, more in kinds:
                # the only rounding is that of the experts
                with without_rounding():
                    model = build_mixture(spec, **(model_config | more))
                    loss = loss_of(model, tokens)
                    loss.backward()
                named = dict(model.named_parameters())
                result[layout, batch, name] = {
                    "loss": loss.detach(),
                    "grads": {n: whole(p, p.grad) for n, p in named.items()},
                    "own": {n for n, p in named.items() if not getattr(p, "allreduce", True)},
                }
        if layout in ("expert parallel", "all to all"):
            model = build_mixture(coat_layer_spec, **(config | sizes | GROUPED))
            result["losses", layout] = train(model, batches["text"])
        parallel_state.destroy_model_parallel()
    initialize_model_parallel(**EP2)
    for name, config in DISPATCHERS.items():
        result["kept", name] = [
            _kept(spec, "cpu", **(EP2 | config | more))
            for spec, more in ((sdpa_layer_spec, {}), (coat_layer_spec, GROUPED), (coat_layer_spec, {}))
        ]
    return result


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(_two_ranks, 2)


RUNS = [
    *((layout, "text") for layout in LAYOUTS),
    *((layout, "one expert") for layout in ("expert parallel", "all to all")),
]


@pytest.mark.parametrize("layout, batch", RUNS)
def test_grouped_experts_on_two_ranks_equal_megatrons(ranks, layout, batch):
    for rank in ranks:
        grouped, stock = rank[layout, batch, "grouped"], rank[layout, batch, "stock"]
        # a relative error of the experts' part of the input of the head
        assert abs(grouped["loss"] - stock["loss"]) < BF16_FORWARD * stock["loss"]
        for name, grad in grouped["grads"].items():
            before, experts, after = name.partition(".mlp.experts.")
            if not experts:
                expected = stock["grads"][name]
            else:
                of_each = [f"{before}{experts}local_experts.{i}.{after}" for i in range(len(grad))]
                expected = torch.stack([stock["grads"][name] for name in of_each])
            assert rel_rms(grad, expected) < BF16_BACKWARD, name


@pytest.mark.parametrize("layout, batch", RUNS)
def test_sequential_experts_on_two_ranks_equal_megatrons(ranks, layout, batch):
    # nothing is rounded: sums of at most 2 * S * B FP32 terms in another order
    for rank in ranks:
        ours, stock = rank[layout, batch, "one after another"], rank[layout, batch, "stock"]
        assert abs(ours["loss"] - stock["loss"]) < 1e-5
        assert ours["grads"].keys() == stock["grads"].keys() and ours["own"] == stock["own"]
        for name, grad in stock["grads"].items():
            assert (grad.any() or batch == "one expert") and rel_rms(ours["grads"][name], grad) < 1e-5, name


@pytest.mark.parametrize("name", DISPATCHERS)
def test_grouped_experts_on_two_ranks_save_nothing_else(ranks, name):
    for rank in ranks:
        (stock, of_each), (grouped, of_grouped), (sequential, of_sequential) = rank["kept", name]
        assert of_each == of_grouped == of_sequential and len(of_each) == 2
        assert stock - grouped == _stock_bytes(of_each) - _grouped_bytes(of_each)
        assert stock - sequential == _stock_bytes(of_each) - _sequential_bytes(of_each)
        # the rows of each rank for an expert, at a capacity factor of 1
        share = S * B * EXPERTS["moe_router_topk"] // EXPERTS["num_moe_experts"]
        assert name != "alltoall, padded" or of_each == [2 * share * 3 // 4] * 2


@pytest.mark.parametrize("layout", ["expert parallel", "all to all"])
def test_grouped_experts_without_rows_have_zero_gradients(ranks, layout):
    name = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    busy = [bool(rank[layout, "one expert", "grouped"]["grads"][name].any()) for rank in ranks]
    assert sorted(busy) == [False, True]


def test_grouped_experts_alone_are_not_all_reduced(ranks):
    for layout, kinds in (("expert parallel", ["weight"]), ("biases", ["weight", "bias"])):
        names = {f"decoder.layers.1.mlp.experts.linear_fc{i}.{kind}" for i in (1, 2) for kind in kinds}
        assert all(rank[layout, "text", "grouped"]["own"] == names for rank in ranks)


def test_grouped_experts_train_under_megatron_ddp(ranks):
    for rank in ranks:
        losses = rank["losses", "all to all"]
        assert losses[-1] < losses[0] - 0.1 and losses == rank["losses", "expert parallel"]


def test_grouped_experts_save_in_saved_format(megatron, device):
    """Formats of 8 bits take equal bytes but give other values."""
    gradients = []
    for saved in ("sqrt8", "e4m3"):
        _, experts = grouped_mixture(activations=ActivationsConfig(saved_format=saved))
        gradients.append(_run(experts, *_inputs(device))[1]["x"])
    assert not gradients[0].equal(gradients[1])
