"""`coat plan --megatron` against Megatron's models with experts: parameters, and bytes saved by layers."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu

from coat_ds import plan
from coat_ds.config import ActivationsConfig
from coat_ds.plan import Layout, from_megatron, layout, rungs, unplanned
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.systems import coat
from megatron_ext.layer_specs import CoatTransformerLayer, coat_layer_spec, sdpa_layer_spec
from megatron_ext.ledger import saved_bytes
from megatron_ext.model import ModelShape, build_gpt, initialize_model_parallel
from tests.util import run_distributed

pytestmark = pytest.mark.early

H, FFN, HEADS, GROUPS, VOCAB, S, B, COUNT = 256, 512, 4, 2, 512, 128, 2, 4
EXPERTS = {
    "num_moe_experts": COUNT,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_token_dispatcher_type": "allgather",
}
UNGATED = {"activation_func": F.gelu, "gated_linear_unit": False, "bias_activation_fusion": False}
SHARED = {"moe_shared_expert_intermediate_size": 192}
WORDS = (
    "--hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --num-query-groups 2 --vocab-size 512 "
    "--untie-embeddings-and-output-weights --num-experts 4 --moe-ffn-hidden-size 128"
)
GATED_WORDS = f"{WORDS} --disable-bias-linear --swiglu"
SHARED_WORDS = "--moe-shared-expert-intermediate-size 192"
# fields of Megatron's config, and the same as command-line arguments
CASES = {
    "experts": ({}, GATED_WORDS),
    "every other layer": ({"moe_layer_freq": 2}, f"{GATED_WORDS} --moe-layer-freq 2"),
    "one expert a token": (
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        f"{GATED_WORDS} --moe-router-topk 1",
    ),
    "shared": (SHARED, f"{GATED_WORDS} {SHARED_WORDS}"),
    "shared with a gate": (
        SHARED | {"moe_shared_expert_gate": True},
        f"{GATED_WORDS} {SHARED_WORDS} --moe-shared-expert-gate",
    ),
    "gelu": (UNGATED | SHARED, f"{WORDS} --disable-bias-linear {SHARED_WORDS}"),
    "squared relu": (
        UNGATED | {"activation_func": squared_relu},
        f"{WORDS} --disable-bias-linear --squared-relu",
    ),
    "biases": (UNGATED | {"add_bias_linear": True}, WORDS),
    "head norms": ({"qk_layernorm": True}, f"{GATED_WORDS} --qk-layernorm"),
    "head norms in dense layers": (
        {"qk_layernorm": True, "moe_layer_freq": 2},
        f"{GATED_WORDS} --qk-layernorm --moe-layer-freq 2",
    ),
}
# all layers but the first
DENSE = {"moe_layer_freq": 10}
SYSTEMS = {
    "BF16": None,
    "COAT": {},
    "8-bit attention": {"attention_format": "sqrt8"},
    "recomputed attention": {"attention_format": "recompute"},
}


def _build(layers, activations, **config):
    """A model of COAT's layers, or of Megatron's own if `activations` is None."""
    shape = ModelShape(layers, H, FFN, HEADS, GROUPS)
    spec, coat = sdpa_layer_spec, None
    if activations is not None:
        spec, coat = coat_layer_spec, ActivationsConfig(**activations)
    model = build_gpt(shape, spec, seq_length=S, vocab_size=VOCAB, activations=coat, **(EXPERTS | config))
    for name, module in model.named_modules():
        if activations is None and "local_experts" in name:
            # as with several ranks: with one rank Megatron adds biases in place, which autograd refuses
            module.explicit_expert_comm = True
    return model


def _kept(activations, **config) -> float:
    """Bytes per layer and token: the bytes that two more layers save."""
    found = []
    for layers in (2, 4):
        model = _build(layers, activations, **config)
        tokens = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(5))
        positions = torch.arange(S).expand(B, S)
        run = lambda: model(tokens, positions, None, labels=tokens)  # noqa: E731, B023
        found.append(saved_bytes(model, run).total)
    return (found[1] - found[0]) / 2 / (B * S)


def _system(activations):
    if activations is None:
        return rungs()["BF16"]
    return coat("COAT", {"activations": activations})


def _padding(activations, grouped) -> float:
    """Rows of FP8 inputs of experts are padded to multiples of 16."""
    return 16 * COUNT * H / (B * S) if activations is not None and not grouped else 0


@pytest.mark.pairwise
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("system", "grouped"),
    [(system, False) for system in SYSTEMS] + [("COAT", True), ("recomputed attention", True)],
    ids=lambda value: value if isinstance(value, str) else ("one after another", "grouped")[value],
)
def test_layers_keep_what_is_predicted(megatron, name, system, grouped):
    config, activations = CASES[name][0], SYSTEMS[system]
    found = _kept(activations, moe_grouped_gemm=grouped, **config)
    model = plan.from_module(_build(2, activations, moe_grouped_gemm=grouped, **config))
    predicted = saved_per_token(model, Layout(), _system(activations))
    # plus a few bytes for the scales of a layer, and for the ends of experts
    bound = 0.005 * predicted
    if activations is None:
        # torch's norms on a CPU, and positions, save the same bytes in dense layers
        found -= _kept(None, **(config | DENSE))
        predicted -= saved_per_token(dataclasses.replace(model, experts=None), Layout(), _system(None))
    assert -bound < found - predicted < bound + _padding(activations, grouped)


@pytest.mark.parametrize("name", CASES)
def test_models_are_read(megatron, name):
    config, words = CASES[name]
    model = _build(3, {}, **config)
    found, exact = plan.from_module(model), sum(p.numel() for p in model.parameters())
    assert found.parameters == exact
    read, _ = from_megatron.from_arguments(
        f"{words} --num-layers 3 --moe-token-dispatcher-type alltoall".split()
    )
    assert read == dataclasses.replace(found, other_parameters=0)
    # biases, and norms
    assert (found.other_parameters > 0) == (name == "biases" or "head norms" in name)


def test_a_dense_model_is_read(megatron):
    """A model with its own head size, and one matrix for embedding and head."""
    shape = ModelShape(2, H, FFN, HEADS, GROUPS, untie_embeddings_and_output_weights=False)
    model = build_gpt(shape, sdpa_layer_spec, seq_length=S, vocab_size=VOCAB, kv_channels=32)
    words = "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --vocab-size 512"
    words += " --num-query-groups 2 --kv-channels 32 --swiglu --disable-bias-linear"
    read, _ = from_megatron.from_arguments(words.split())
    assert read == plan.from_module(model)
    assert read.parameters == sum(p.numel() for p in model.parameters())


def test_gates_that_dense_layers_do_not_have_are_named(megatron):
    own = {"activation_func": quick_gelu, "bias_activation_fusion": False, "moe_grouped_gemm": True}
    assert plan.from_module(_build(2, {}, **own)).experts.grouped
    # a model is read before its layers are converted
    model = _build(2, None, **{**own, "moe_grouped_gemm": False})
    with pytest.raises(plan.PlanError, match="--quick-geglu: COAT has it in experts of --moe-grouped-gemm"):
        plan.from_module(model)


RANKS = 4
# Megatron's process groups, and whether hidden states are split
LAYOUTS = {
    "expert 2": {"expert_model_parallel_size": 2},
    "expert 2, tensor 2": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
    "expert 4, tensor 2, not of experts": {
        "expert_model_parallel_size": 4,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}


def _stepped(model) -> tuple[int, int]:
    """Elements of masters on this rank: of routed experts, and of all other parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_ext import cpu

    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with cpu.no_cuda():
        wrapped = DistributedDataParallel(model.config, settings, model)
        config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
        parts = get_megatron_optimizer(config, [wrapped]).chained_optimizers
    found = {True: 0, False: 0}
    for part in parts:
        for group in part.optimizer.param_groups:
            found[group["is_expert_parallel"]] += sum(p.numel() for p in group["params"])
    return found[True], found[False]


def _on_ranks() -> dict:
    from megatron.core import parallel_state

    from megatron_ext import cpu

    cpu.enable()
    dist.init_process_group("gloo")
    found = {}
    for name, groups in LAYOUTS.items():
        initialize_model_parallel(**groups)
        config = groups | {"sequence_parallel": "tensor" in name} | SHARED
        model = _build(2, {}, **config)
        found[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "masters": _stepped(model),
            "grouped": _kept({}, moe_grouped_gemm=True, **config),
            "BF16": _kept(None, **config) - _kept(None, **(config | DENSE)),
        }
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(_on_ranks, RANKS)


@pytest.mark.long("a plan of Megatron's ranks")
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_hold_and_keep_what_is_predicted(ranks, name):
    words = [f"--{key.replace('_', '-')} {value}" for key, value in LAYOUTS[name].items()]
    words += ["--sequence-parallel"] if "tensor" in name else []
    words = f"{GATED_WORDS} {SHARED_WORDS} --num-layers 2 --use-distributed-optimizer {' '.join(words)}"
    model, said = from_megatron.from_arguments(words.split())
    spread = layout.from_megatron(said, gpus=RANKS, sequence=S, micro_batch=B)
    of_ranks = [rank[name] for rank in ranks]
    memory = plan.predict(model, spread, rungs()["BF16"]).peak
    assert {2 * rank["parameters"] for rank in of_ranks} == {memory.weights}
    # the distributed optimizer splits at the borders of ranks, not of parameters: a mean of whole numbers
    masters = sum(sum(rank["masters"]) for rank in of_ranks) / RANKS
    assert memory.masters == pytest.approx(4 * masters, rel=1e-9)
    # tokens are not spread evenly over ranks, but their mean is exact
    grouped, bf16 = (sum(rank[kind] for rank in of_ranks) / RANKS for kind in ("grouped", "BF16"))
    experts = dataclasses.replace(model.experts, grouped=True)
    predicted = saved_per_token(dataclasses.replace(model, experts=experts), spread, _system({}))
    # a layer's scales and the ends of experts are less than a byte per token
    assert grouped == pytest.approx(predicted, abs=1)
    of_layers = (
        saved_per_token(m, spread, _system(None)) for m in (model, dataclasses.replace(model, experts=None))
    )
    sparse, dense = of_layers
    assert bf16 == pytest.approx(sparse - dense, abs=1)


# fields of Megatron's config whose arguments have other names, with values that enable a feature
FIELDS = {
    "fp8-format": {"fp8": "hybrid"},
    "fp4-format": {"fp4": "e2m1"},
    "softmax-type": {"softmax_type": "learnable"},
    "cuda-graph-impl": {"cuda_graph_impl": "transformer_engine"},
    "experimental-attention-variant": {"experimental_attention_variant": "gated_delta_net"},
    "heterogeneous-layers-config-path": {"heterogeneous_block_specs": True},
    "kitchen-config-file": {"use_kitchen": True},
    "kitchen-recipe-number": {"use_kitchen": True},
    "moe-shared-expert-overlap": {"moe_shared_expert_overlap": True, "num_moe_experts": 4},
}


@pytest.mark.parametrize("name", [*unplanned.OF_SPEC, *unplanned.FLAGS_OF_SPEC])
def test_arguments_that_the_spec_refuses_are_named(megatron, name):
    value = [] if name in unplanned.FLAGS_OF_SPEC else ["x"]
    assert unplanned.refused_by_spec([f"--{name}", *value, "--num-layers", "2"]) == [f"--{name}"]
    if name == "reset-attention-mask":
        pytest.skip("no field of Megatron's config: tests/megatron_ext/test_pretrain.py")
    config = _build(1, {}).config
    for field, found in FIELDS.get(name, {name.replace("-", "_"): True}).items():
        if not hasattr(config, field):
            pytest.skip("megatron-core of this release has no such field")
        setattr(config, field, found)
    with pytest.raises(ValueError):
        CoatTransformerLayer(config)


def test_what_the_spec_takes_is_not_named():
    words = "--bf16 --cuda-graph-impl none --softmax-type vanilla --swiglu --qk-layernorm"
    assert not unplanned.refused_by_spec(words.split())
