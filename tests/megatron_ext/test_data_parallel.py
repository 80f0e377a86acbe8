"""Two tensor-parallel ranks times two data-parallel ones, under DeepSpeed's ZeRO 1, 2 and 3 and under
Megatron's DistributedDataParallel: the numbers of one tensor-parallel rank, and the same bits on ranks that
share them.
"""

import contextlib
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.hosts import TEST_ALL
from tests.megatron_ext.layers import assert_close, loss_of, whole, without_rounding
from tests.util import run_distributed

pytestmark = pytest.mark.early

S, B, VOCAB, LAYERS, MICRO_BATCHES = 32, 2, 64, 2, 2
H, FFN, HEADS, GROUPS = 64, 96, 4, 2
STEPS, SAVED_AT = 6, 4
# of this model, only norms stay gathered
GATHERED = {"stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 0}


def _setup():
    """The backend and the device of this process: a GPU of its own, or the CPU."""
    from megatron_ext import cpu

    warnings.simplefilter("ignore")
    cpu.enable()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    return device


def _model(tp, sequence_parallel, bf16, **config):
    """The same weights at any size, with norms that differ from one another."""
    from megatron_ext.layer_specs import coat_layer_spec
    from megatron_ext.model import ModelShape, build_gpt, initialize_model_parallel

    initialize_model_parallel(tp)
    model = build_gpt(
        ModelShape(LAYERS, H, FFN, HEADS, GROUPS),
        coat_layer_spec,
        seq_length=S,
        vocab_size=VOCAB,
        bf16=bf16,
        sequence_parallel=sequence_parallel,
        qk_layernorm=True,
        **config,
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise.to(parameter))
    return model


def _batches(device):
    """Micro-batches of each pair of ranks; a pair is a tensor-parallel group. If all ranks are data-parallel,
    both ranks of a pair get the same batches, and the mean over all ranks is the same."""
    generator = torch.Generator().manual_seed(5)
    sizes = (dist.get_world_size() // 2, MICRO_BATCHES, B, S)
    return torch.randint(0, VOCAB, sizes, generator=generator).to(device)


def _own_batches(device):
    return _batches(device)[dist.get_rank() // 2]


def _mean(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


# name: tensor-parallel size, sequence parallel, ZeRO stage, BF16 and FP8 or FP32 without rounding, whether we
# sum gradients that ranks share
ZERO = {
    "exact-1": (1, False, 1, False, True),
    "exact-2-sequence": (2, True, 1, False, True),
    "fp8-1": (1, False, 1, True, True),
    "fp8-2-zero2": (2, False, 2, True, True),
    "fp8-2-zero3-sequence": (2, True, 3, True, True),
    "not-summed": (2, True, 1, True, False),
}
SPLIT = [name for name, (tp, *_, sums) in ZERO.items() if tp == 2 and sums]
# moments in FP32 are resumed in tests/coat_ds
RESUMED = [name for name in SPLIT if name.startswith("fp8")]
# what `make test` leaves out on a CPU: stage 3 is resumed too, and test_mpu.py has the groups
LEFT_OUT = () if TEST_ALL else ("fp8-2-zero2",)
split_cases = pytest.mark.parametrize("name", [name for name in SPLIT if name not in LEFT_OUT])


def _engine(tp, sequence_parallel, stage, rounds, sums):
    """The engine as launch/pretrain_gpt.py builds it; norms have compressed moments too."""
    import deepspeed

    from coat_launch.model import parameter_groups
    from megatron_ext import mpu

    model = _model(tp, sequence_parallel, bf16=rounds)
    if sums:
        mpu.sum_shared_gradients(model)
    moments = {} if rounds else {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"}
    config = {
        "train_micro_batch_size_per_gpu": B,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **(GATHERED if stage == 3 else {})},
        "coat": {
            "enabled": True,
            "optimizer": {"keep_fp32": [], "min_numel": 1, **moments},
        },
    }
    if rounds:
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), mpu=mpu, config=config
    )
    return engine


def _step(engine, batches):
    """The mean loss, and the norm of the gradients."""
    losses = []
    for tokens in batches:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return _mean(torch.stack(losses).mean()), float(engine.get_global_grad_norm())


def _shared_bits(engine):
    """This rank's part of the parameters that every tensor-parallel rank holds whole: weights, masters, and
    the codes and metadata of moments."""
    from deepspeed.runtime.zero import GatheredParameters

    from coat_ds.zero.partitions import partitions

    shared = {
        p: name
        for name, p in engine.module.named_parameters()
        if not getattr(p, "tensor_model_parallel", False)
    }
    # does nothing for parameters that are not partitioned
    with GatheredParameters(list(shared)):
        held = {name: [p.detach().cpu().clone()] for p, name in shared.items()}
    inner = engine.optimizer.optimizer
    # the other parameters are in the partition of another data-parallel rank
    for _, flat, placed in partitions(engine.optimizer, len(inner.param_groups)):
        for p, start, numel, _ in placed:
            if p not in shared:
                continue
            found = held[shared[p]]
            found.append(flat.detach()[start : start + numel].cpu().clone())
            for moment in (inner.state[flat][name] for name in ("exp_avg", "exp_avg_sq")):
                # these parameter groups contain nothing else
                (piece,) = (
                    piece for piece in moment.pieces if (piece.begin, piece.end) == (start, start + numel)
                )
                found += [t.cpu().clone() for t in piece.storage]
    return held


def _zero(device, folder, left_out):
    from megatron.core import parallel_state

    results = {}
    for name, case in ZERO.items():
        tp, _, _, rounds, sums = case
        # kernels round
        if name in left_out or (device.type == "cuda" and not rounds):
            continue
        with contextlib.nullcontext() if rounds else without_rounding():
            engine = _engine(*case)
            batches = _own_batches(device)
            steps = []
            # two steps show that ranks drift apart
            for step in range(STEPS if sums else 2):
                if step == SAVED_AT and name in RESUMED:
                    engine.save_checkpoint(f"{folder}/{name}", tag="half")
                steps.append(_step(engine, batches))
            result = {"losses": [loss for loss, _ in steps], "norms": [norm for _, norm in steps]}
            result["shared"] = _shared_bits(engine)
            if name in RESUMED:
                parallel_state.destroy_model_parallel()
                again = _engine(*case)
                again.load_checkpoint(f"{folder}/{name}", tag="half")
                result["resumed"] = [_step(again, batches) for _ in range(STEPS - SAVED_AT)]
                result["resumed bits"] = _shared_bits(again)
        results[name] = result
        parallel_state.destroy_model_parallel()
    return results


# sequence parallel, whether communication overlaps, and whether nothing is rounded. Of sequence parallelism
# without overlap: test_parallel.py
MEGATRON = [(split, split, exact) for split in (False, True) for exact in (True, False)]
HERE = MEGATRON if TEST_ALL else [case for case in MEGATRON if case[0] != case[2]]
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def _one_rank(device, exact):
    """Gradients of one rank that sees all batches; the first rank alone computes them."""
    from megatron.core import parallel_state

    with without_rounding() if exact else contextlib.nullcontext():
        model = _model(1, False, bf16=False)
        batches = _batches(device)
        for tokens in batches.flatten(0, 1) if dist.get_rank() == 0 else ():
            (loss_of(model, tokens) / len(batches)).backward()
    parallel_state.destroy_model_parallel()
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


def exact_gradients():
    """Gradients without rounding, which needs no kernels: on the CPU."""
    return _one_rank(_setup(), True)


def _megatron(device, cases):
    """Gradients of whole parameters as Megatron's own data parallelism passes them to its optimizer, and the
    gradients of one rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    results = {}
    for exact in (True, False) if device.type == "cpu" else (False,):
        results["one", exact] = _one_rank(device, exact)
    for split, overlap, exact in cases:
        if ("one", exact) not in results:
            continue
        with without_rounding() if exact else contextlib.nullcontext():
            model = _model(2, split, bf16=False)
            ddp = DistributedDataParallel(
                config=model.config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=20_000
                ),
                module=model,
            )
            ddp.zero_grad_buffer()
            *first, last = _own_batches(device)
            with ddp.no_sync():
                for tokens in first:
                    loss_of(ddp, tokens).backward()
            loss_of(ddp, last).backward()
            finalize_model_grads([ddp])
            linears = [m for n, m in model.named_modules() if n.endswith(LINEARS)]
            results[split, overlap, exact] = {
                "grads": {n: whole(p, p.main_grad).cpu() for n, p in model.named_parameters()},
                "added": [m.weight.grad_added_to_main_grad for m in linears],
                "buckets": len(ddp.bucket_groups),
            }
        parallel_state.destroy_model_parallel()
    return results


def work(folder, left_out=(), cases=MEGATRON):
    device = _setup()
    return {"zero": _zero(device, folder, left_out), "megatron": _megatron(device, cases)}


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(work, 4, folder, LEFT_OUT, HERE)


def same(first, second):
    return first.keys() == second.keys() and all(
        len(first[n]) == len(second[n]) and all(map(torch.equal, first[n], second[n])) for n in first
    )


def pairs(ranks, name):
    """The parts of shared parameters that the two ranks of each tensor-parallel group hold."""
    held = [rank["zero"][name]["shared"] for rank in ranks]
    return list(zip(held[::2], held[1::2], strict=True))


@split_cases
def test_zero_over_tensor_parallel_ranks_trains_as_on_one(ranks, name):
    for rank in ranks:
        check_losses(rank["zero"], name)


def check_losses(runs, name):
    found, one = runs[name], runs["exact-1" if name.startswith("exact") else "fp8-1"]
    assert one["losses"][0] - one["losses"][-1] > 0.3 * one["losses"][0]
    if name.startswith("exact"):
        # sums of at most FFN FP32 terms in another order
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-5)
        return
    # the first loss is from the same weights: FP8 itself moves the loss of an untrained model by 1.5e-4
    assert found["losses"][0] == pytest.approx(one["losses"][0], rel=3e-4)
    # gradients agree to 2 %, as derived in test_parallel.py, and so does the decrease of the loss; weights
    # are rounded to BF16
    for a, b in zip(found["losses"], one["losses"], strict=True):
        assert abs(a - b) <= 2e-2 * (one["losses"][0] - b) + 2**-10 * b
    assert found["norms"] == pytest.approx(one["norms"], rel=2e-2)


@split_cases
def test_zero_keeps_shared_parameters_equal_on_tensor_parallel_ranks(ranks, name):
    for first, second in pairs(ranks, name):
        assert same(first, second)
        # each partition has some of it, including moments in FP8
        held = [tensors for tensors in first.values() if len(tensors) > 1]
        assert held and (name.startswith("exact") or all(len(tensors) == 2 + 2 * 3 for tensors in held))
    all_weights = [
        {n: tensors[:1] for n, tensors in rank["zero"][name]["shared"].items()} for rank in ranks[::2]
    ]
    assert same(*all_weights)


def test_shared_parameters_drift_apart_without_sum_shared_gradients(ranks):
    for first, second in pairs(ranks, "not-summed"):
        assert not same(first, second)
        for name in ("final_layernorm", "layers.0.input_layernorm", "layers.0.self_attention.q_layernorm"):
            name = f"decoder.{name}.weight"
            assert not torch.equal(first[name][0], second[name][0]), name


@pytest.mark.parametrize("name", [name for name in RESUMED if name not in LEFT_OUT])
def test_zero_over_tensor_parallel_ranks_resumes_to_the_bit(ranks, name):
    for rank in ranks:
        run = rank["zero"][name]
        assert [loss for loss, _ in run["resumed"]] == run["losses"][SAVED_AT:]
        assert [norm for _, norm in run["resumed"]] == run["norms"][SAVED_AT:]
        assert same(run["resumed bits"], run["shared"])


@pytest.mark.parametrize("case", HERE, ids=str)
def test_megatron_ddp_gives_the_gradients_of_one_rank(ranks, case):
    # as derived in test_parallel.py
    bound = 1e-5 if case[-1] else 2e-2
    first, *_ = runs = [rank["megatron"] for rank in ranks]
    for run in runs:
        check_wrapper(run, case)
        assert_close(run[case]["grads"], first["one", case[-1]], bound)
        for name, grad in run[case]["grads"].items():
            assert torch.equal(grad, first[case]["grads"][name]), name


def check_wrapper(runs, case):
    found = runs[case]
    # more than one bucket, so that there is something to overlap
    assert found["buckets"] > 1 or not case[1]
    # our code adds the gradient in every linear layer, not Megatron's hook
    assert found["added"] == [True] * len(LINEARS) * LAYERS
