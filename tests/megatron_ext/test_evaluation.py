"""`activations.evaluation` "stock" in Megatron's layers: they evaluate in BF16, and train as with "fp8"."""

from dataclasses import replace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext

from coat_ds.config import ActivationsConfig
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from megatron_ext.saved_bytes import saved_bytes
from tests.megatron_ext.experts import EXPERTS
from tests.megatron_ext.layers import HEADS, LATENT, LINEARS, B, S, batch, build, loss_and_grads
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

KINDS = {
    "llama": {},
    "gpt": {"add_bias_linear": True, "gated_linear_unit": False},
    "experts": EXPERTS,
    "latent": LATENT | {"groups": HEADS},
}


def evaluated(model, device):
    model.eval()
    with torch.no_grad():
        logits = model(*batch(device))
    model.train()
    return logits


def in_bf16(model, device):
    """The evaluation with all linear layers in BF16."""
    linears = [module for module in model.modules() if isinstance(module, LINEARS)]
    own = [linear.activations for linear in linears]
    for linear in linears:
        linear.apply_activations(replace(linear.activations, enabled=False))
    logits = evaluated(model, device)
    for linear, activations in zip(linears, own, strict=True):
        linear.apply_activations(activations)
    return logits


def built(evaluation, **options):
    torch.manual_seed(0)
    return build(coat_layer_spec, layers=2, activations=ActivationsConfig(evaluation=evaluation), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_stock_evaluation_is_in_bf16(device, megatron, kind):
    if kind == "latent" and device.type == "cuda":
        pytest.skip("the evaluation of latent attention was compared on CPUs only")
    fp8, stock = (built(evaluation, **KINDS[kind]) for evaluation in ("fp8", "stock"))
    stock.load_state_dict(fp8.state_dict())
    expected = in_bf16(fp8, device)
    assert not evaluated(fp8, device).equal(expected)
    for _ in range(2):
        (loss, gradients), (again, same) = (loss_and_grads(model, device) for model in (fp8, stock))
        assert again == loss
        if device.type == "cpu":
            assert all(same[name].equal(gradient) for name, gradient in gradients.items())
        # in the second pass outputs are still deferred to their GEMM
        assert evaluated(stock, device).equal(expected)
    kept = [saved_bytes(model, lambda model=model: model(*batch(device))) for model in (fp8, stock)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("spec", [coat_layer_spec, sdpa_layer_spec], ids=["coat", "sdpa"])
def test_decoding_with_a_cache_is_refused(device, megatron, spec):
    model = build(spec).eval()
    tokens, positions, _ = batch(device)
    context = StaticInferenceContext(max_batch_size=B, max_sequence_length=S)
    options = {"inference_context": context, "runtime_gather_output": True}
    with torch.no_grad():
        model(tokens[:, :-1], positions[:, :-1], None, **options)
        context.increment_sequence_len_offset(S - 1)
        with pytest.raises(ValueError, match=f"1 queries and {S} keys.*Give no inference_context"):
            model(tokens[:, -1:], positions[:, -1:], None, **options)


def in_parts():
    join(2)
    found = []
    for sequence_parallel in (False, True):
        model = built("stock", sequence_parallel=sequence_parallel)
        trained = [loss_and_grads(model, "cpu")[0]]
        logits = evaluated(model, "cpu")
        trained.append(loss_and_grads(model, "cpu")[0])
        found.append((logits, in_bf16(model, "cpu"), trained))
    return found


def test_stock_evaluation_of_tensor_parallel_layers_is_in_bf16():
    for found in run_distributed(in_parts, 2):
        for logits, expected, (before, after) in found:
            assert logits.equal(expected) and before == after
