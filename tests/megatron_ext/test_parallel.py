"""The COAT layer over tensor-parallel ranks: the same numbers as on one rank, and FP8 on the wire."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.util import rel_rms, run_distributed

S, B, VOCAB, LAYERS = 32, 2, 64, 2
H, FFN, HEADS, GROUPS = 64, 96, 4, 4
LLAMA: dict = {"qk_layernorm": True}
GPT = {
    "normalization": "LayerNorm",
    "activation_func": F.gelu,
    "gated_linear_unit": False,
    "add_bias_linear": True,
}
VARIANTS = {"llama": LLAMA, "gpt": GPT}


def _without_rounding():
    """Makes E4M3 and E5M2 codes FP32 numbers: what is left is the arithmetic of the layers."""
    from coat_kernels import fp8, groups

    for fmt in (fp8.E4M3, fp8.E5M2):
        object.__setattr__(fmt, "dtype", torch.float32)
    groups.round_to_fp8 = lambda x, fmt: x


def _whole(parameter, value):
    """The gradient of the whole parameter from those of its shards, on every rank."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if not getattr(parameter, "tensor_model_parallel", False):
        return value
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    # a rank's part of a gated projection is its part of the gate and its part of up
    strides = [part.chunk(parameter.partition_stride, parameter.partition_dim) for part in parts]
    return torch.cat(
        [part for stride in zip(*strides, strict=True) for part in stride], parameter.partition_dim
    )


def _bytes_sent(record):
    """Notes (bytes of an element, elements) of each gather and scatter of activations."""
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def counting_gather(output, tensor, **kwargs):
        record.append(("gather", tensor.element_size(), tensor.numel()))
        return gather(output, tensor, **kwargs)

    def counting_scatter(output, tensor, **kwargs):
        record.append(("scatter", tensor.element_size(), output.numel()))
        return scatter(output, tensor, **kwargs)

    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = counting_gather, counting_scatter


def _run(cases, exact):
    """Loss, gradients and messages of each (tp, sequence_parallel, variant)."""
    from megatron.core import parallel_state

    from megatron_ext import cpu, mpu
    from megatron_ext.layer_specs import coat_layer_spec
    from megatron_ext.model import ModelShape, build_gpt, initialize_model_parallel

    cpu.enable()
    dist.init_process_group("gloo")
    if exact:
        _without_rounding()
    record = []
    _bytes_sent(record)
    tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(5))
    results = {}
    for tp, sequence_parallel, variant in cases:
        initialize_model_parallel(tp)
        model = build_gpt(
            ModelShape(LAYERS, H, FFN, HEADS, GROUPS),
            coat_layer_spec,
            seq_length=S,
            vocab_size=VOCAB,
            bf16=False,
            sequence_parallel=sequence_parallel,
            **VARIANTS[variant],
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim == 1 and not getattr(parameter, "tensor_model_parallel", False):
                parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        summed = mpu.sum_shared_gradients(model)
        record.clear()
        loss = model(tokens, torch.arange(S).expand(B, S), None, labels=tokens).mean()
        forward = list(record)
        record.clear()
        loss.backward()
        grads = {name: _whole(p, p.grad) for name, p in model.named_parameters()}
        results[tp, sequence_parallel, variant] = {
            "loss": loss.detach(),
            "grads": grads,
            "forward": forward,
            "backward": list(record),
            "summed": summed,
        }
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return results


ONE = [(1, False, variant) for variant in VARIANTS]
TWO = [(2, sequence, variant) for sequence in (False, True) for variant in VARIANTS]
FOUR = [(4, True, "llama")]


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "fp8"])
def runs(request):
    exact = request.param
    one = run_distributed(_run, 1, ONE, exact)[0]
    two = run_distributed(_run, 2, TWO, exact)
    four = run_distributed(_run, 4, FOUR, exact)
    return exact, one, two, four


@pytest.mark.parametrize("case", TWO + FOUR, ids=str)
def test_equals_one_rank(runs, case):
    exact, one, *more = runs
    ranks = more[0] if case[0] == 2 else more[1]
    expected = one[1, False, case[2]]
    for rank in ranks:
        found = rank[case]
        # without rounding to FP8: sums of at most FFN FP32 terms in another order. With it, a value next to a
        # border between two codes may change sides, by which it moves by a step of 2^-3 of itself: that
        # happens to one in 2^-3 / 2^-24 / sqrt(FFN) values, once in each of some twenty roundings
        bound = 1e-5 if exact else 2e-2
        assert abs(found["loss"] - expected["loss"]) < bound * expected["loss"]
        assert found["grads"].keys() == expected["grads"].keys()
        for name, grad in expected["grads"].items():
            assert rel_rms(found["grads"][name], grad) < bound, name


def test_ranks_agree_bitwise_on_what_they_share(runs):
    _, _, *more = runs
    for ranks in more:
        for case, first in ranks[0].items():
            for other in ranks[1:]:
                for name, grad in first["grads"].items():
                    assert grad.equal(other[case]["grads"][name]), (case, name)


def test_sequence_parallelism_moves_one_byte_an_element(runs):
    """Forward gathers two norm outputs a layer, backward gathers them again and two gradients; Megatron's
    BF16 layers move two bytes. Partial sums are scattered as they are."""
    exact, _, two, _ = runs
    if exact:
        pytest.skip("codes are FP32 here")
    run = two[0][2, True, "llama"]
    shard = S * B * H // 2
    of = {way: [m for m in run[way] if m[0] == "gather" and m[2] == shard] for way in ("forward", "backward")}
    assert [m[1] for m in of["forward"]].count(1) == 2 * LAYERS
    assert [m[1] for m in of["backward"]].count(1) == 4 * LAYERS
    # nothing of the layers travels as anything else
    assert {m[1] for m in of["forward"] + of["backward"]} == {1}


def test_which_gradients_are_summed(runs):
    _, one, two, _ = runs
    assert one[1, False, "llama"]["summed"] == []
    heads = [f"decoder.layers.{i}.self_attention.{n}_layernorm.weight" for i in range(LAYERS) for n in "qk"]
    assert two[0][2, False, "llama"]["summed"] == heads
    assert set(two[0][2, True, "llama"]["summed"]) == {*heads, "decoder.final_layernorm.weight"} | {
        f"decoder.layers.{i}.{n}_layernorm.weight" for i in range(LAYERS) for n in ("input", "pre_mlp")
    }
