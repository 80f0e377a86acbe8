"""The COAT layer over tensor-parallel ranks: the same numbers as on one rank, and FP8 on the wire."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from coat_ds.layers.fused_layer import is_small
from coat_kernels.graphs import MOVES_IN_BACKWARD, max_graphed_work
from megatron_ext import mpu
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.layers.decoder_layer import dense_parts, ranks_of
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext.layers import GPT, assert_close, loss_of, random_tokens, whole, without_rounding
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

S, B, VOCAB, LAYERS = 32, 2, 64, 2
# a rank's part of FFN consists of whole groups, as on one rank
H, FFN, HEADS, GROUPS = 64, 128, 4, 4
LLAMA: dict = {"qk_layernorm": True}
LATENT: dict = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 32,
    "qk_layernorm": True,
}
NO_NORMS = LATENT | {"qk_layernorm": False}
VARIANTS = {
    "llama": LLAMA,
    "gpt": GPT,
    "one group": {"num_query_groups": 1},
    "latent": LATENT,
    "latent, no norms": NO_NORMS,
    "latent, whole queries": NO_NORMS | {"q_lora_rank": None, "rope_type": "rope"},
}


class _Awaited:
    """A pending message that records when it is waited for."""

    def __init__(self, work, order, name):
        self.work, self.order, self.name = work, order, name

    def wait(self):
        self.order.append(("wait", self.name))
        return self.work.wait()


def _watch(record, order):
    """Records (kind, bytes of an element, elements of a rank) of each gather, scatter and agreement on a
    magnitude, and the order in which messages start and end and FP8 GEMMs run."""
    from coat_kernels.linear import op as linear

    def watched(call, kind, own):
        def collective(*args, async_op=False, **kwargs):
            if own is not None:
                record.append((kind, args[own].element_size(), args[own].numel()))
            elif kwargs.get("op") == dist.ReduceOp.MAX and args[0].numel() == 1:
                record.append(("agreement", args[0].element_size(), 1))
            order.append(("start" if async_op else "blocking", kind))
            work = call(*args, async_op=async_op, **kwargs)
            return _Awaited(work, order, kind) if async_op else work

        return collective

    dist.all_gather_into_tensor = watched(dist.all_gather_into_tensor, "gather", 1)
    dist.reduce_scatter_tensor = watched(dist.reduce_scatter_tensor, "scatter", 0)
    dist.all_reduce = watched(dist.all_reduce, "reduce", None)

    def product(call):
        def multiply(*args):
            order.append(("product", None))
            return call(*args)

        return multiply

    linear.scaled_matmul = product(linear.scaled_matmul)
    linear.accumulate_matmul = product(linear.accumulate_matmul)


def run_cases(cases, exact):
    """Loss, gradients and messages of each (tp, sequence_parallel, variant); for some also with
    `main_grad`."""
    record, order = [], []
    _watch(record, order)
    results = {}
    for tp, sequence_parallel, variant in cases:
        with without_rounding() if exact else contextlib.nullcontext():
            device = join(tp)
            tokens = random_tokens(B, S, VOCAB).to(device)
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
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.data.add_(0.3 * noise.to(device))
            summed = mpu.sum_shared_gradients(model)
            record.clear()
            loss = loss_of(model, tokens)
            forward = list(record)
            record.clear()
            order.clear()
            loss.backward()
            run = {"forward": forward, "backward": list(record), "order": list(order), "summed": summed}
            if "latent" not in variant:
                run["small"] = _are_small(model.decoder.layers[0], tp, tp if sequence_parallel else 1)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            run["places"] = {
                name: getattr(entry, "global_shape", None)
                for name, entry in model.sharded_state_dict(metadata={"dp_cp_group": group}).items()
            }
            grads = {name: whole(p, p.grad).cpu() for name, p in model.named_parameters()}
            if (tp, variant) == (2, "llama"):
                run |= _into_main_grad(model, tokens, order)
        results[tp, sequence_parallel, variant] = run | {"loss": loss.detach().cpu(), "grads": grads}
        parallel_state.destroy_model_parallel()
    return results


def _are_small(layer, tp, shares):
    """Whether the layer is small with the largest number of tokens that "auto" records, and with one more per
    rank: if gradients stay with their parameters, and if not."""
    parts, x, found = dense_parts(layer), torch.empty(1, 1, 1), []
    weights = [linear.weight for linear in parts.linears]
    for leave in (False, True):
        setattr(parts.qkv.weight, MOVES_IN_BACKWARD, leave)
        most = int(max_graphed_work(tp, leave)) // sum(w.numel() for w in weights) // shares
        inputs = [x.expand(tokens, 1, H) for tokens in (most, most + 1)]
        found += [is_small(x, weights, *ranks_of(parts)) for x in inputs]
    return found


def _into_main_grad(model, tokens, order):
    """The order of events in a backward that adds to `main_grad`, and the values after two of them."""
    weights = {n: p for n, p in model.named_parameters() if "linear_" in n and p.ndim == 2}
    for weight in weights.values():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model, tokens)
        order.clear()
        loss.backward()
    return {
        "main order": list(order),
        "main grads": {n: whole(p, p.main_grad).cpu() for n, p in weights.items()},
        "added": [p.grad_added_to_main_grad for p in weights.values()],
    }


ONE = [(1, False, variant) for variant in VARIANTS]
TWO = [(2, sequence, variant) for sequence in (False, True) for variant in VARIANTS]
FOUR = [(4, True, "llama")]


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "fp8"])
def runs(request):
    exact = request.param
    one = run_distributed(run_cases, 1, ONE, exact)[0]
    two = run_distributed(run_cases, 2, TWO, exact)
    four = run_distributed(run_cases, 4, FOUR, exact)
    return exact, one, two, four


@pytest.mark.parametrize("case", TWO + FOUR, ids=str)
def test_tensor_parallel_layers_equal_one_rank(runs, case):
    exact, one, *more = runs
    ranks = more[0] if case[0] == 2 else more[1]
    expected = one[1, False, case[2]]
    for rank in ranks:
        found = rank[case]
        assert found["places"] == expected["places"]
        # without rounding to FP8: sums of at most FFN FP32 terms in another order. With rounding, a value
        # next to the border between two codes may change sides, which moves it by a step of 2^-3 of itself:
        # that happens to one in 2^-3 / 2^-24 / sqrt(FFN) values, once in each of some twenty roundings
        bound = 1e-5 if exact else 2e-2
        assert abs(found["loss"] - expected["loss"]) < bound * expected["loss"]
        assert_close(found["grads"], expected["grads"], bound)


def test_tensor_parallel_layers_are_small_up_to_larger_sizes(runs):
    """Over ranks the CPU launches messages as well."""
    _, one, *more = runs
    assert max_graphed_work(2) > max_graphed_work(1)
    for found in (one, *(rank for ranks in more for rank in ranks)):
        assert all(run["small"] == [True, False, True, False] for run in found.values() if "small" in run)


def test_tensor_parallel_gradients_are_the_same_bits_on_all_ranks(runs):
    _, _, *more = runs
    for ranks in more:
        for case, first in ranks[0].items():
            for other in ranks[1:]:
                for name, grad in first["grads"].items():
                    assert grad.equal(other[case]["grads"][name]), (case, name)


def test_sequence_parallelism_moves_one_byte_an_element(runs):
    """Forward gathers two norm outputs per layer; backward gathers them again, and two gradients. Megatron's
    BF16 layers move two bytes per element. Partial sums are scattered in their own dtype."""
    exact, _, two, _ = runs
    if exact:
        pytest.skip("codes are FP32 here")
    run = two[0][2, True, "llama"]
    shard = S * B * H // 2
    of = {way: [m for m in run[way] if m[0] == "gather" and m[2] == shard] for way in ("forward", "backward")}
    assert [m[1] for m in of["forward"]].count(1) == 2 * LAYERS
    assert [m[1] for m in of["backward"]].count(1) == 4 * LAYERS
    # no other tensor of the layers is sent in another dtype
    assert {m[1] for m in of["forward"] + of["backward"]} == {1}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "latent" not in name])
def test_sequence_parallel_ranks_agree_on_scales(runs, variant):
    """Under sequence parallelism, ranks agree on the scales of two inputs and two gradients per layer, and of
    nothing else."""
    _, _, two, _ = runs
    for rank in two:
        for sequence in (False, True):
            run = rank[2, sequence, variant]
            agreed = [[m[0] for m in run[way]].count("agreement") for way in ("forward", "backward")]
            assert agreed == [2 * LAYERS * sequence] * 2


def _hidden(order, kind):
    """The number of messages of a kind that overlap with a GEMM, if that GEMM does not wait for a message
    started later."""
    count = 0
    for index, event in enumerate(order):
        if event == ("start", kind):
            meanwhile = [what for what, _ in order[index + 1 : order.index(("wait", kind), index)]]
            count += "product" in meanwhile and "blocking" not in meanwhile[: meanwhile.index("product")]
    return count


def test_tensor_parallel_messages_overlap_with_gemms(runs):
    """In the backward of each of the two layers split by output, the gather of the saved input overlaps with
    the GEMM of the input's gradient, and the sum of the input's gradient with the GEMM of the weight's
    gradient. As in Megatron's own layers."""
    _, _, two, _ = runs
    for order in ("order", "main order"):
        parallel, sequence = (two[0][2, split, "llama"][order] for split in (False, True))
        assert _hidden(parallel, "reduce") == 2 * LAYERS
        assert _hidden(sequence, "gather") == _hidden(sequence, "scatter") == 2 * LAYERS


def test_tensor_parallel_main_grad_is_the_sum_of_two_passes(runs):
    _, _, two, _ = runs
    for rank in two:
        for split in (False, True):
            run = rank[2, split, "llama"]
            assert len(run["added"]) == 4 * LAYERS and all(run["added"])
            for name, grad in run["main grads"].items():
                # sums of equal numbers are exact
                assert grad.equal(2 * run["grads"][name]), name


def test_sum_shared_gradients_names_parameters(runs):
    _, one, two, _ = runs
    assert one[1, False, "llama"]["summed"] == []
    heads = [f"decoder.layers.{i}.self_attention.{n}_layernorm.weight" for i in range(LAYERS) for n in "qk"]
    assert two[0][2, False, "llama"]["summed"] == heads
    # without sequence parallelism the norms of latent attention come before the split into heads
    assert two[0][2, False, "latent"]["summed"] == []
    norms = ("input", "pre_mlp", "self_attention.q", "self_attention.kv")
    latent = {f"decoder.layers.{i}.{norm}_layernorm.weight" for i in range(LAYERS) for norm in norms}
    assert set(two[0][2, True, "latent"]["summed"]) == latent | {"decoder.final_layernorm.weight"}
    assert set(two[0][2, True, "llama"]["summed"]) == {*heads, "decoder.final_layernorm.weight"} | {
        f"decoder.layers.{i}.{n}_layernorm.weight" for i in range(LAYERS) for n in ("input", "pre_mlp")
    }
