"""Multi-latent attention in the COAT layer, against Megatron's own: results, gradients, bytes, errors."""

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules.linear import Gemm
from megatron_ext.hybrid_specs import AttentionLayer
from megatron_ext.layer_specs import coat_layer_spec, coat_parts, sdpa_layer_spec
from megatron_ext.layers.latent import CoatDownProjection, CoatMLASelfAttention
from megatron_ext.layers.linear import CoatColumnParallelLinear
from megatron_ext.saved_bytes import saved_bytes
from megatron_ext.unsupported import NORMS_ALL_QUERIES
from tests.megatron_ext.conftest import one_megatron_process
from tests.megatron_ext.experts import EXPERTS
from tests.megatron_ext.layers import (
    FFN,
    GPT,
    HEADS,
    KV,
    LATENT,
    LINEARS,
    POSITIONS,
    WIDTH,
    B,
    H,
    Q,
    S,
    batch,
    build,
    compared,
    loss_and_grads,
    rounding_error,
    shaken,
    small_input,
    without_rounding,
)
from tests.util import rel_rms, run_distributed

pytestmark = pytest.mark.usefixtures("megatron")

VARIANTS = {
    "v3": LATENT,
    "lite": LATENT | {"q_lora_rank": None, "rope_type": "rope", "qk_layernorm": not NORMS_ALL_QUERIES},
    "no-norms": LATENT | {"qk_layernorm": False},
    "gpt": LATENT | GPT,
}
# heads of one width, as torch's fused attention requires on a CPU
EQUAL = LATENT | {"qk_head_dim": WIDTH - POSITIONS}

# Roundings to E4M3 and to E5M2 between a result and exact arithmetic, counted as in test_layer.py. Queries,
# keys and values have two more roundings, of the compressed tensors and of the up projections' weights:
#   compressed: norm output, weight          2   q, k, v: + norm output, weight            4
#   projection: + attention, weight          6   gate, up: + norm output, weight           8
#   product: of gate and up                 16
#   fc2.weight: product 16 + 2 + 1                   19, 1
#   d product: weight                                 1, 1   d gate, d up: kept up, gate (8 + 1)       10, 1
#   fc1.weight: 10 + norm output (6 + 2)             18, 2   d norm: weight                            11, 2
#   norm weight, d residual: 11 + kept input (6 + 1) 18, 2
#   proj.weight: 18 + attention (4 + 1)              23, 3   d attention: weight                       19, 3
#   d q, k, v: 19 + k, v (4 each)                    27, 3   up.weight: 27 + norm output (2 + 2)       31, 4
#   d norm: weight                                   28, 4   norm weight: 28 + kept input (2 + 1)      31, 4
#   down.weight: 31 + norm output (0 + 2)            33, 5   d norm: weight                            32, 5
#   norm weight, d x: + kept input                   33, 5
ROUNDINGS = {
    "y": (16, 0),
    "mlp.linear_fc2.weight": (19, 1),
    "mlp.linear_fc1.weight": (18, 2),
    "pre_mlp_layernorm.weight": (18, 2),
    "self_attention.linear_proj.weight": (23, 3),
    "self_attention.linear_q_up_proj.weight": (31, 4),
    "self_attention.linear_kv_up_proj.weight": (31, 4),
    "self_attention.q_layernorm.weight": (31, 4),
    "self_attention.kv_layernorm.weight": (31, 4),
}
LONGEST = (33, 5)


class StockAttention(DotProductAttention):
    """Megatron's attention, which computes with narrower value heads, but does not accept their width as an
    argument."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_latent_attention_gradients_against_bf16(device, variant):
    models = [build(spec, HEADS, **VARIANTS[variant]) for spec in (coat_layer_spec, sdpa_layer_spec)]
    shaken(*models)
    coat, bf16 = compared(models, *small_input(device))
    e4m3, e5m2 = (rounding_error(t, device) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
    for name, exact in bf16.items():
        n, m = ROUNDINGS.get(name, LONGEST)
        # the ratio of two root mean squares spreads by 1 / sqrt(N): three times that. GELU's derivative at
        # rounded inputs enlarges errors by a factor of at most two
        bound = (n * e4m3**2 + m * e5m2**2) ** 0.5 * (1 + 3 / exact.numel() ** 0.5) * (1 + (variant == "gpt"))
        error = rel_rms(coat[name], exact)
        assert error < bound, (name, error, bound)
        # the layers did compute in FP8; biases are added to y without rounding
        assert error > e4m3 / 2 or exact.ndim != 2, (name, error)


def both_without_rounding(variant):
    """Loss and gradients of the COAT layer and of Megatron's."""
    config = VARIANTS[variant]
    stock = get_gpt_layer_local_spec(
        multi_latent_attention=True,
        qk_layernorm=config["qk_layernorm"],
        normalization=config.get("normalization", "RMSNorm"),
    )
    stock.submodules.self_attention.submodules.core_attention = StockAttention
    tokens, positions, _ = batch("cpu")
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    results = []
    with one_megatron_process(), without_rounding():
        for spec in (coat_layer_spec, stock):
            model = build(spec, HEADS, 2, bf16=False, **config)
            loss = model(tokens, positions, mask, labels=tokens).mean()
            loss.backward()
            results.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
    return results


@pytest.mark.parametrize("variant", VARIANTS)
def test_latent_attention_without_rounding_equals_megatrons(variant):
    """Against Megatron's modules only, including its attention, which saves the scores.

    In a process that sees no GPU: FP8 GEMMs of a GPU accept no FP32 numbers as codes.
    """
    ((coat, own),) = run_distributed(both_without_rounding, 1, variant)
    unused = {name for name in own if own[name] is None}
    assert coat.keys() == own.keys()
    for name in own.keys() - unused:
        # sums of at most FFN FP32 terms in another order
        assert rel_rms(coat[name], own[name]) < 1e-5, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="other attention kernels keep more beside q, k, v")
def test_latent_attention_saved_bytes(device):
    tokens, layers = S * B, 2
    model = build(coat_layer_spec, HEADS, layers, **EQUAL)
    kept = saved_bytes(model, lambda: model(*batch(device))).per_token_and_layer
    expected = (
        # inputs of four norms, gate and up: one byte and a sixteenth
        1.0625 * (2 * H + Q + KV + 2 * FFN)
        # q, k, v and the output in BF16
        + 2 * 4 * HEADS * WIDTH
        # FP32: the reciprocal root of four norms, the log-sum-exp of each head
        + 4 * 4
        + 4 * HEADS
        # Megatron's cosines and sines of queries and of keys, BF16, for all sequences
        + 2 * 2 * POSITIONS * 2 / B
        # the FP32 largest magnitudes of seven weights, and of the input of each
        + (7 + 7) * 4 / tokens
    )
    assert kept == expected

    def of(activations=None, **config):
        other = build(coat_layer_spec, HEADS, layers, activations=activations, **EQUAL, **config)
        found = saved_bytes(other, lambda: other(*batch(device))).per_token_and_layer
        loss_and_grads(other, device)
        return found

    assert kept - of(ActivationsConfig(attention_format="sqrt8")) == (2 - 1.0625) * 4 * HEADS * WIDTH
    # after the up projections nothing is saved. Megatron saves their inputs: both normed tensors, and the
    # positions as a part of the tensor that they were split from. Each layer saves its angles
    recomputed = of(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
    gone = 2 * 3 * HEADS * WIDTH + 2 * 2 * POSITIONS * 2 / B + 4 * 4 / tokens
    assert kept - recomputed == gone - 2 * (Q + KV + KV + POSITIONS) - 4 * POSITIONS / B


def test_latent_attention_parts_and_checkpoints_are_megatrons(device):
    coat, stock = (build(spec, HEADS, 2, **LATENT, **EXPERTS) for spec in (coat_layer_spec, sdpa_layer_spec))
    attention = coat.decoder.layers[0].self_attention
    assert type(attention) is CoatMLASelfAttention
    linears = {name: type(m) for name, m in attention.named_children() if isinstance(m, LINEARS)}
    assert len(linears) == 5
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        assert linears[name] is CoatDownProjection
    for name in ("linear_q_up_proj", "linear_kv_up_proj"):
        assert linears[name] is CoatColumnParallelLinear
    assert coat.state_dict().keys() == stock.state_dict().keys()
    group = torch.distributed.group.WORLD
    places = [
        {
            name: getattr(entry, "global_shape", None)
            for name, entry in model.sharded_state_dict(metadata={"dp_cp_group": group}).items()
        }
        for model in (coat, stock)
    ]
    assert places[0] == places[1]
    coat.load_state_dict(stock.state_dict())


@pytest.mark.skipif(
    not NORMS_ALL_QUERIES, reason="before megatron-core 0.19 keys and values are normed alone"
)
def test_latent_attention_refuses_norms_of_transformer_engine():
    with pytest.raises(ValueError, match="--qk-layernorm without --q-lora-rank.*take megatron-core 0.18"):
        build(coat_layer_spec, HEADS, **LATENT | {"q_lora_rank": None})


def test_latent_attention_accumulates_what_cancels_exactly():
    """As with queries, keys and values of plain attention: only the gradients of their weights."""
    activations = ActivationsConfig(fast_accumulation="all")
    attention = (
        build(coat_layer_spec, HEADS, activations=activations, **LATENT).decoder.layers[0].self_attention
    )
    expected = {cancels: Gemm(activations, cancels).formats for cancels in (False, True)}
    assert expected[True] != expected[False]
    linears = {name: m._gemm.formats for name, m in attention.named_children() if isinstance(m, LINEARS)}
    assert linears == {name: expected[name != "linear_proj"] for name in linears}
    model = build(
        coat_layer_spec,
        HEADS,
        activations=activations,
        **LATENT | {"q_lora_rank": None, "qk_layernorm": False},
    )
    assert model.decoder.layers[0].self_attention.linear_q_proj._gemm.formats == expected[True]


@pytest.mark.parametrize("config", [LATENT, {}], ids=["latent", "plain"])
def test_attention_format_under_context_parallelism_is_refused(config):
    attention = build(coat_layer_spec, HEADS, **config).decoder.layers[0].self_attention
    attention.config.context_parallel_size = 2
    attention.apply_activations(ActivationsConfig())
    with pytest.raises(ValueError, match='--context-parallel-size is 2.*attention_format is "sqrt8"'):
        attention.apply_activations(ActivationsConfig(attention_format="sqrt8"))


def test_latent_attention_refuses_unsupported_options():
    with pytest.raises(ValueError, match='attention_format is "recompute".*mla_up_proj'):
        build(coat_layer_spec, HEADS, activations=ActivationsConfig(attention_format="recompute"), **LATENT)
    with pytest.raises(ValueError, match='mla_up_proj.*attention_format is "sqrt8"'):
        build(
            coat_layer_spec,
            HEADS,
            activations=ActivationsConfig(attention_format="sqrt8"),
            recompute_granularity="selective",
            recompute_modules=["mla_up_proj"],
            **LATENT,
        )
    with pytest.raises(ValueError, match="--hybrid-layer-pattern"):
        AttentionLayer(build(coat_layer_spec, HEADS, **LATENT).config, parts=coat_parts)
