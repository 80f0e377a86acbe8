"""FP8 inputs of regions that Megatron recomputes."""

import pytest
import torch
from megatron.core import tensor_parallel

from coat_kernels.autograd.checkpointing import packed_bytes
from megatron_ext import layer_specs
from megatron_ext.layers import recompute
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext.ranks import join
from tests.util import rel_rms, run_distributed

# the smallest input that is packed has 4096 elements
S, B, H, FFN, HEADS, LAYERS, VOCAB = 64, 2, 64, 96, 4, 2, 64
GROUP = 128
CASES = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "experts": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
    },
}
# saved inputs of S * B * H elements: of both layers; of one layer; q, k and v of both; norms' outputs
KEPT = {"uniform": 2, "block": 1, "core_attn": 6, "mlp": 2, "experts": 2}


@pytest.fixture
def compressing(megatron):
    recompute.install()
    yield recompute
    recompute.uninstall()


def _model(spec_name, **options):
    shape = ModelShape(LAYERS, H, FFN, HEADS, HEADS)
    spec = getattr(layer_specs, spec_name)
    return build_gpt(shape, spec, seq_length=S, vocab_size=VOCAB, **options).train()


def _pass(model):
    """Loss, gradients, and bytes of packed inputs (and of the tensors that they replace)."""
    tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(3))
    device = next(model.parameters()).device
    tokens, positions = tokens.to(device), torch.arange(S, device=device).expand(B, S)
    loss = model(tokens, positions, None, labels=tokens).mean()
    kept = packed_bytes()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients, kept


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spec", ["sdpa_layer_spec", "coat_layer_spec"])
def test_forward_stays_and_inputs_take_half(compressing, spec, case):
    # dropout shows whether random states are replayed
    model = _model(spec, hidden_dropout=0.1, **CASES[case])
    torch.manual_seed(7)
    loss, gradients, (codes, instead_of) = _pass(model)
    compressing.uninstall()
    torch.manual_seed(7)
    stock_loss, stock_gradients, nothing = _pass(model)
    assert torch.equal(loss, stock_loss) and nothing == (0, 0)

    assert instead_of == KEPT[case] * S * B * H * 2
    # one code per element, and one byte per group
    assert codes * 2 == instead_of * (1 + 1 / GROUP)
    # an input is off by at most 2^-4 of itself, 2.7 % relative RMS, and a gradient by a few times that, for
    # the inputs of its region's layers
    for name, expected in stock_gradients.items():
        assert rel_rms(gradients[name], expected) < 2**-3, name
    assert any(not torch.equal(gradients[n], g) for n, g in stock_gradients.items())


def test_random_states_are_replayed_exactly(megatron, device):
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
        kept = packed_bytes()
        y.square().sum().backward()
        return leaf.grad, weight.grad, kept

    *expected, nothing = gradients()
    weight.grad = None
    recompute.install()
    try:
        *found, (codes, _) = gradients()
    finally:
        recompute.uninstall()
    assert nothing == (0, 0) and codes == x.numel() * (1 + 1 / GROUP)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _distributed():
    join(2)
    recompute.install()
    options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    results = []
    for distribute in (False, True):
        model = _model("coat_layer_spec", distribute_saved_activations=distribute, **options)
        results.append(_pass(model))
    return results


def test_distributed_inputs_are_codes_of_a_share():
    for (loss, gradients, kept), (loss_of_shares, gradients_of_shares, shares) in run_distributed(
        _distributed, 2
    ):
        assert [2 * n for n in shares] == list(kept) and kept[1] == LAYERS * S * B * H * 2
        # shares consist of whole groups: the codes are the same
        assert torch.equal(loss, loss_of_shares)
        assert all(torch.equal(gradients_of_shares[name], g) for name, g in gradients.items())
