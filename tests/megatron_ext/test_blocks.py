"""A COAT layer gives the same bits with its fused blocks as with its modules, uses the blocks unless a module
is observed, and makes no more calls and launches than the numbers below."""

import collections
import sys
import warnings
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from coat_ds.layers import fused_layer
from coat_ds.log import forget_logged
from coat_kernels.autograd import observers
from coat_kernels.prepared import PreparedKernel
from megatron_ext.layer_specs import sdpa_layer_spec
from megatron_ext.saved_bytes import saved_bytes
from tests.megatron_ext.blocks import VARIANTS, B, H, S, batch, build, loss_and_grads, node, take_modules
from tests.megatron_ext.ranks import join
from tests.util import rel_rms, run_distributed

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_layer_gives_the_bits_of_the_modules(variant, device):
    model = build(*VARIANTS[variant])
    assert "MlpBlock" in node(model.decoder.layers[0], device)
    found = [loss_and_grads(model, device) for _ in range(2)]
    kept = saved_bytes(model, lambda: model(*batch(device))).total
    handles = take_modules(model)
    assert "MlpBlock" not in node(model.decoder.layers[0], device)
    expected = loss_and_grads(model, device)
    assert saved_bytes(model, lambda: model(*batch(device))).total == kept
    for handle in handles:
        handle.remove()
    assert "MlpBlock" in node(model.decoder.layers[0], device)
    for once in found:
        for name, value in expected.items():
            assert torch.equal(once[name], value), name


@pytest.mark.parametrize("name", ["llama", "gpt", "cached", "8-bit attention", "head norms", "recomputes"])
def test_fused_layer_evaluates_with_the_bits_of_the_modules(name, device):
    config, activations = (VARIANTS | {"recomputes": ({}, {"attention_format": "recompute"})})[name]
    found = []
    for evaluation in ("fp8", "stock"):
        model = build(config, activations | {"evaluation": evaluation}).eval()
        with (
            mock.patch.object(fused_layer, "fused_layer", wraps=fused_layer.fused_layer) as compute,
            torch.no_grad(),
        ):
            y = model(*batch(device))
            # evaluation as a stock model runs the modules
            assert compute.call_count == (2 if evaluation == "fp8" else 0)
            handles = take_modules(model)
            assert torch.equal(y, model(*batch(device)))
            assert compute.call_count == (2 if evaluation == "fp8" else 0)
            for handle in handles:
                handle.remove()
            # the first pass of a checkpoint, which differs from evaluation only in the training mode
            model.train()(*batch(device))
            assert compute.call_count == (2 if evaluation == "fp8" else 0)
        found.append(y)
    assert not torch.equal(*found)


def test_fused_layer_follows_the_dtype_of_the_weights(device):
    """In a user's own script `params_dtype` of Megatron's config may still be FP32."""
    model = build({"params_dtype": torch.float32})
    with mock.patch.object(fused_layer, "fused_layer", wraps=fused_layer.fused_layer) as compute:
        loss_and_grads(model, device)
    assert model.decoder.layers[0].mlp.linear_fc1.weight.dtype == torch.bfloat16 and compute.call_count == 2


@pytest.mark.parametrize("variant", ["llama", "gpt", "head norms"])
def test_fused_layer_recomputes_attention(variant, device, caplog):
    """The output is that of attention in BF16, to the bit. Gradients are no further from FP32's than with
    8-bit attention. Only attention's output is saved."""
    # logged once
    forget_logged()
    config, _ = VARIANTS[variant]
    exact = build(config | {"bf16": False}, spec=sdpa_layer_spec)
    expected, results, kept = loss_and_grads(exact, device), {}, {}
    for form in ("bf16", "sqrt8", "recompute"):
        model = build(config, {"attention_format": form})
        for p, weight in zip(model.parameters(), exact.parameters(), strict=True):
            p.data.copy_(weight)
        results[form] = loss_and_grads(model, device)
        kept[form] = saved_bytes(model, lambda model=model: model(*batch(device))).per_token_and_layer
    assert torch.equal(results["recompute"]["loss"], results["bf16"]["loss"])
    for name, value in expected.items():
        error, other = (rel_rms(results[form][name], value) for form in ("recompute", "sqrt8"))
        # gradients are sums over 64 tokens; the root mean square of their errors spreads by 1 / sqrt(64):
        # equal within three times that
        assert error <= other * (1 + 3 / (S * B) ** 0.5), (name, error, other)
    # q (H), k and v (H / 2 each) in groups of 16 with one byte each, and one number per head and token
    assert kept["sqrt8"] - kept["recompute"] >= 2 * H * 17 / 16
    assert "keep q, k, v" not in caplog.text
    take_modules(model)
    with torch.no_grad():
        model(*batch(device))
    # if nothing is saved, no warning about saved tensors is needed
    assert "keep q, k, v" not in caplog.text
    assert saved_bytes(model, lambda: model(*batch(device))).per_token_and_layer == kept["sqrt8"]
    assert "keep q, k, v" in caplog.text


EXPERTS = {"num_moe_experts": 2, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}


@pytest.mark.parametrize("config", [{"qk_layernorm": True}, EXPERTS], ids=["head norms", "grouped experts"])
def test_fused_layer_waits_for_gathered_parameters(config, device):
    model = build(config)
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    # one bucket for each parameter
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1, **overlaps)
    wrapped = DistributedDataParallel(model.config, settings, model)
    layer = model.decoder.layers[0]
    assert not any(group.param_gather_dispatched for group in wrapped.bucket_groups)
    made = node(layer, device)
    assert "MlpBlock" in made or "moe_grouped_gemm" in config
    for name, p in layer.named_parameters():
        group = wrapped.param_to_bucket_group[p]
        assert len(group.params) == 1
        assert group.param_gather_dispatched and group.param_gather_handle is None, name
    # a user's hook in addition to Megatron's hook
    layer.mlp.register_forward_pre_hook(lambda *_: None)
    assert "MlpBlock" not in node(layer, device)


def _ranks():
    """Losses and gradients of two tensor-parallel ranks, with blocks and with modules."""
    warnings.simplefilter("ignore")
    join(2)
    cases = {}
    for name in ("llama", "gpt", "cached"):
        for sequence_parallel in (False, True):
            config, activations = VARIANTS[name]
            model = build(config | {"sequence_parallel": sequence_parallel}, activations)
            assert "MlpBlock" in node(model.decoder.layers[0], torch.device("cpu"))
            blocks = loss_and_grads(model, "cpu")
            take_modules(model)
            modules = loss_and_grads(model, "cpu")
            cases[name, sequence_parallel] = [
                n for n, value in modules.items() if not torch.equal(blocks[n], value)
            ]
    return cases


def test_fused_layer_gives_the_bits_of_the_modules_on_tensor_parallel_ranks():
    for cases in run_distributed(_ranks, 2):
        assert len(cases) == 6 and not any(cases.values()), cases


# Calls of Python and C functions, and launches of kernels, of one layer, forward and backward: the CPU cost
# of an eager step. Lower these numbers when you can; a change that raises them has to be worth it.
CALLS = {"forward": (605, 15), "backward": (666, 26)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts with launches that do nothing, on CPU tensors")
def test_fused_layer_stays_within_its_calls_and_launches(monkeypatch):
    launched = collections.Counter()
    layer = build(layers=1).decoder.layers[0]
    x, grad = torch.randn(2, S, B, H).bfloat16()
    for name, module in list(sys.modules.items()):
        if name.startswith("coat_kernels") and hasattr(module, "uses_kernels"):
            monkeypatch.setattr(module, "uses_kernels", lambda _: True)
    monkeypatch.setattr(
        PreparedKernel, "_launch", lambda self, grid, *_, **__: launched.update([self.__name__])
    )

    def product(a, b, *_, out_dtype, **__):
        launched.update(["product"])
        return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    calls = collections.Counter()

    def count(frame, event, _):
        if event in ("call", "c_call"):
            calls[event] += 1

    found = {}
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        for name in CALLS:
            calls.clear()
            launched.clear()
            sys.setprofile(count)
            try:
                if name == "forward":
                    y, _ = layer(leaf, attention_mask=None)
                else:
                    y.backward(grad)
            finally:
                sys.setprofile(None)
            found[name] = calls.total(), launched.total()
        layer.zero_grad()
    for name, (most_calls, launches) in CALLS.items():
        assert found[name][0] <= most_calls and found[name][1] <= launches, found


class Formats(list):
    """An observer: the names of the formats in which tensors are saved for backward."""

    def codes(self, *_):
        pass

    def saves(self, q):
        self.append(q.format.name)


def formats_kept(device, modules=False, **activations) -> collections.Counter:
    """The number of tensors of each format that a layer saves for backward, with its blocks or with its
    modules."""
    kept, model = Formats(), build({}, activations, layers=1)
    if modules:
        take_modules(model)
    layer = model.decoder.layers[0]
    x = torch.randn(S, B, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    observers.observe(kept)
    try:
        layer(x, attention_mask=None)
    finally:
        observers.observe(None)
    return collections.Counter(kept)


def test_fused_layer_saves_attention_in_attention_format(device):
    """The other tensors of the layer are saved in `saved_format`."""
    # queries, keys, values and the output, which the projection also saves as its origin
    assert formats_kept(device, attention_format="sqrt8", saved_format="e4m3")["sqrt8"] == 5
