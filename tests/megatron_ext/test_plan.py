"""`coat plan --megatron`: parameters of Megatron's models, and the bytes that their layers save."""

import functools
import inspect

import pytest
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.moe import moe_utils

from coat_ds import plan
from coat_ds.config import ActivationsConfig
from coat_ds.plan.model_states import ModelStates
from coat_ds.plan.read import from_values
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.systems import all_systems, coat
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from megatron_ext.model import ModelShape, build_gpt
from megatron_ext.saved_bytes import saved_bytes
from tests.megatron_ext.layers import loss_of, random_tokens
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

pytestmark = pytest.mark.early

H, FFN, HEADS, GROUPS, VOCAB, S, B = 256, 512, 4, 2, 512, 128, 2


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize(
    "activations",
    [{}, {"attention_format": "sqrt8"}, {"attention_format": "recompute"}],
    ids=["COAT", "8-bit attention", "recomputed attention"],
)
def test_plan_predicts_saved_bytes_of_megatrons_layers(megatron, activations, head_norms):
    saved = []
    for layers in (2, 4):
        model = _build(layers, activations, qk_layernorm=head_norms)
        run = functools.partial(loss_of, model, random_tokens(B, S, VOCAB))
        saved.append(saved_bytes(model, run).total)
    sizes = plan.Sizes(
        layers=4,
        hidden=H,
        ffn=FFN,
        heads=HEADS,
        groups=GROUPS,
        head_dim=H // HEADS,
        vocabulary=VOCAB,
        head_norms=head_norms,
    )
    # norms of queries and keys
    numel = sum(p.numel() for p in model.parameters())
    assert numel - sizes.parameters == 2 * 4 * sizes.head_dim * head_norms
    predicted = saved_per_token(sizes, coat("COAT", {"activations": activations}))
    # a layer's scales are a few more bytes
    assert abs((saved[1] - saved[0]) / 2 / (B * S) - predicted) < 0.005 * predicted


def _build(layers, activations, **config):
    shape, block = ModelShape(layers, H, FFN, HEADS, GROUPS), ActivationsConfig(**activations)
    return build_gpt(shape, coat_layer_spec, seq_length=S, vocab_size=VOCAB, activations=block, **config)


EXPERTS = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 384,
    "moe_shared_expert_intermediate_size": 128,
}


def _measure_experts() -> dict:
    """Of BF16 and of COAT: parameters of a rank, bytes of gradients, elements of the part that it steps, and
    the bytes that a token saves where the second of two layers has experts, less those where it is dense."""
    join(expert_model_parallel_size=2)
    experts = {name.replace("num_experts", "num_moe_experts"): value for name, value in EXPERTS.items()}
    experts |= {"moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 2}
    found = {}
    for name, spec in (("BF16", sdpa_layer_spec), ("COAT", coat_layer_spec)):
        saved, experts["moe_grouped_gemm"] = [], spec is coat_layer_spec
        for every in (1, 2):
            shape = ModelShape(2, H, FFN, HEADS, GROUPS)
            model = build_gpt(shape, spec, seq_length=S, vocab_size=VOCAB, moe_layer_freq=every, **experts)
            run = functools.partial(loss_of, model, random_tokens(B, S, VOCAB, seed=dist.get_rank()))
            saved.append(saved_bytes(model, run).total)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(model.config, settings, model)
        buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
        found[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "gradients": sum(b.grad_data.nbytes for b in buffers),
            "part": sum(b.numel / b.data_parallel_world_size for b in buffers),
            "saved": (saved[0] - saved[1]) / (B * S),
        }
    return found


def test_plan_of_megatrons_experts_on_two_ranks():
    """The second of two layers has experts or is dense. Each rank has half of the experts, and their tokens
    are not spread evenly."""
    ranks = run_distributed(_measure_experts, 2)
    shape = dict(zip(("num_layers", "hidden_size", "ffn_hidden_size"), (2, H, FFN), strict=True))
    shape |= EXPERTS | {"num_attention_heads": HEADS, "num_query_groups": GROUPS}
    sparse, sizes = (from_values(shape | {"moe_layer_freq": every}, VOCAB) for every in (1, [1, 0]))
    layout = plan.Layout(
        framework="megatron", fp32_gradients=True, gpus=2, expert=2, micro_batch=B, sequence=S
    )
    for system in (all_systems()["BF16"], coat("COAT", {})):
        found, states = [rank[system.name] for rank in ranks], ModelStates(sizes, layout, system)
        for rank in found:
            assert rank["parameters"] == states.parameters
            assert rank["gradients"] == states.held()["gradients"]
            assert rank["part"] == states.part
        # rows that one rank has more the other one has less. Attention saves other bytes on a CPU
        saved = sum(rank["saved"] for rank in found) / 2
        predicted = 2 * (saved_per_token(sparse, system) - saved_per_token(sizes, system))
        if "tokens_per_expert" not in inspect.signature(moe_utils.permute).parameters:
            # 3 bytes of each expert instead of 8, as coat_ds/plan/experts.py says
            predicted -= (8 - 3) * EXPERTS["num_experts"]
        assert abs(saved - predicted) < 0.005 * predicted
