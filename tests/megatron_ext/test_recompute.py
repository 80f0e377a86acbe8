"""Megatron's recompute in COAT layers: it changes no result, and can save its inputs in FP8."""

import pytest
import torch
from megatron.core import tensor_parallel

from coat_kernels.autograd.checkpointing import compressed_bytes
from megatron_ext import layer_specs
from megatron_ext.layers import recompute
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext import layers
from tests.megatron_ext.experts import EXPERTS as SOME_EXPERTS
from tests.megatron_ext.layers import LATENT as SOME_LATENT
from tests.megatron_ext.ranks import join
from tests.util import rel_rms, run_distributed

# the smallest input that is packed has 4096 elements
S, B, H, FFN, HEADS, LAYERS, VOCAB = 64, 2, 64, 96, 4, 2, 64
GROUP = 128
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def selective(module):
    return {"recompute_granularity": "selective", "recompute_modules": [module]}


CASES = {
    "uniform": FULL,
    "block": FULL | {"recompute_method": "block"},
    "core_attn": selective("core_attn"),
    "mlp": selective("mlp"),
    "experts": FULL | {"num_moe_experts": 8, "moe_router_topk": 2},
}
# saved inputs of S * B * H elements: of both layers; of one layer; q, k and v of both; norms' outputs
KEPT = {"uniform": 2, "block": 1, "core_attn": 6, "mlp": 2, "experts": 2}


EXPERTS = {"layers": 2} | SOME_EXPERTS
LATENT = {"groups": layers.HEADS} | SOME_LATENT
# a model, what is recomputed, and a part of the names of weights whose gradients may differ: the input of
# their layer is then the norm's output itself, not one rebuilt from the norm's saved input
UNCHANGED = {
    "full": ({}, FULL, None),
    # linear_proj then saves attention's output in FP8: the codes that it would compute in backward
    "core_attn": ({}, selective("core_attn"), None),
    "mlp": ({}, selective("mlp"), "mlp.linear_fc1.weight"),
    "latent, full": (LATENT, FULL, None),
    "latent, core_attn": (LATENT, selective("core_attn"), None),
    "latent, mla_up_proj": (LATENT, selective("mla_up_proj"), "_up_proj"),
    "moe": (EXPERTS, selective("moe"), "shared"),
    "shared_experts": (EXPERTS, selective("shared_experts"), "shared"),
    "moe, grouped": (
        EXPERTS | {"moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": None},
        selective("moe"),
        None,
    ),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_recompute_changes_nothing_else(megatron, device, case):
    config, recomputed, other = UNCHANGED[case]
    found = [
        layers.loss_and_grads(layers.build(layer_specs.coat_layer_spec, **config, **more), device)
        for more in ({}, recomputed)
    ]
    (loss, grads), (again, again_grads) = found
    assert torch.equal(again, loss)
    for name, grad in grads.items():
        if other is None or other not in name:
            assert torch.equal(again_grads[name], grad), name
        else:
            # one rounding of the saved input, and one of each result as it enters the GEMM
            bound = 3**0.5 * layers.rounding_error(torch.float8_e4m3fn, device)
            assert rel_rms(again_grads[name], grad) < bound, name


@pytest.fixture
def compressing(megatron):
    recompute.install()
    yield recompute
    recompute.CHECKPOINT.remove()


def _model(spec_name, **options):
    shape = ModelShape(LAYERS, H, FFN, HEADS, HEADS)
    spec = getattr(layer_specs, spec_name)
    return build_gpt(shape, spec, seq_length=S, vocab_size=VOCAB, **options).train()


def _pass(model):
    """Loss, gradients, and bytes of packed inputs (and of the tensors that they replace)."""
    loss = layers.loss_of(model, layers.random_tokens(B, S, VOCAB, 3))
    kept = compressed_bytes()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients, kept


@pytest.mark.each_value
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spec", ["sdpa_layer_spec", "coat_layer_spec"])
def test_fp8_recompute_halves_inputs(compressing, spec, case):
    # dropout shows whether random states are replayed
    model = _model(spec, hidden_dropout=0.1, **CASES[case])
    torch.manual_seed(7)
    loss, gradients, (codes, instead_of) = _pass(model)
    compressing.CHECKPOINT.remove()
    torch.manual_seed(7)
    stock_loss, stock_gradients, nothing = _pass(model)
    assert torch.equal(loss, stock_loss) and nothing == (0, 0)

    assert instead_of == KEPT[case] * S * B * H * 2
    # one code per element, and one byte per group
    assert codes * 2 == instead_of * (1 + 1 / GROUP)
    # an input is off by at most 2^-4 of itself, 2.7 % relative RMS, and a gradient by a few times that, for
    # the inputs of its region's layers
    layers.assert_close(gradients, stock_gradients, 2**-3)
    assert any(not torch.equal(gradients[n], g) for n, g in stock_gradients.items())


def test_fp8_recompute_replays_random_states(megatron, device):
    torch.manual_seed(0)
    # E4M3 holds these exactly
    x = torch.randint(-8, 9, (S, B, H)).to(device, torch.bfloat16)
    weight = torch.randn(H, H, device=device, dtype=torch.bfloat16).requires_grad_()

    def region(x):
        with tensor_parallel.get_cuda_rng_tracker().fork():
            x = torch.nn.functional.dropout(x @ weight, 0.5)
        return torch.nn.functional.dropout(x, 0.5)

    def gradients():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = tensor_parallel.checkpoint(region, False, leaf * 1)
        kept = compressed_bytes()
        y.square().sum().backward()
        return leaf.grad, weight.grad, kept

    *expected, nothing = gradients()
    weight.grad = None
    recompute.install()
    try:
        *found, (codes, _) = gradients()
    finally:
        recompute.CHECKPOINT.remove()
    assert nothing == (0, 0) and codes == x.numel() * (1 + 1 / GROUP)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _distributed():
    join(2)
    recompute.install()
    results = []
    for distribute in (False, True):
        model = _model("coat_layer_spec", distribute_saved_activations=distribute, **FULL)
        results.append(_pass(model))
    return results


def test_fp8_recompute_with_distributed_inputs():
    for (loss, gradients, kept), (loss_of_shares, gradients_of_shares, shares) in run_distributed(
        _distributed, 2
    ):
        assert [2 * n for n in shares] == list(kept) and kept[1] == LAYERS * S * B * H * 2
        # shares consist of whole groups: the codes are the same
        assert torch.equal(loss, loss_of_shares)
        assert all(torch.equal(gradients_of_shares[name], g) for name, g in gradients.items())
