"""Gradients that ZeRO hands over in BF16 or FP16, under the name of FP32."""

from importlib.metadata import version

import deepspeed
import pytest
import torch
from packaging.version import Version

from coat_ds import CoatAdamW
from coat_ds.optim.narrow_grad import NarrowGrad, narrow_and_scale
from tests.coat_ds.engines import STATES, engine_of
from tests.util import run_distributed

N = 5000
# before, the step of stages 1 and 2 did not ask for what is flat already
HANDS_OVER = Version(version("deepspeed")) >= Version("0.19")
# before, gradients were reduced into one tensor for each parameter
REDUCES_FLAT = Version(version("deepspeed")) >= Version("0.19.8")


def gradient(dtype=torch.bfloat16):
    return torch.randn(N, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_narrow_grad_is_an_fp32_tensor_until_it_is_read():
    narrow = gradient()
    grad = NarrowGrad.of(narrow)
    assert grad.dtype == torch.float32 and grad.shape == narrow.shape and grad.numel() == N
    assert grad.to(torch.float32) is grad
    p = torch.nn.Parameter(torch.zeros(N))
    p.grad = grad
    p.grad.data.mul_(torch.tensor(0.25)).mul_(2)
    values, scale = narrow_and_scale(p.grad)
    assert values.dtype == torch.bfloat16 and values.data_ptr() == narrow.data_ptr() and scale == 0.5


def test_narrow_grad_is_read_as_fp32():
    grad = NarrowGrad.of(gradient())
    grad.mul_(0.3)
    expected = gradient().float() * 0.3
    assert (grad + 0).equal(expected) and type(grad + 0) is torch.Tensor
    # what is written has to stay
    grad.add_(1)
    grad.data.mul_(2)
    torch._foreach_add_([grad], 1)
    expected = expected.add(1).mul(2).add(1)
    values, scale = narrow_and_scale(grad)
    assert values.equal(expected) and scale is None and grad.norm() == expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("more", [None, 0.7], ids=["", "grad_scale"])
def test_narrow_grad_step_has_the_bits_of_the_fp32_gradient(dtype, more):
    weights, states = [], []
    for narrow in (True, False):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, N)) for _ in range(3)]
        optimizer = CoatAdamW(params, lr=1e-2)
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = NarrowGrad.of(gradient(dtype)) if narrow else gradient(dtype).float()
                # the first is not scaled, the others by factors of their own
                if i:
                    p.grad.data.mul_(torch.tensor(i * (0.5 + step)))
            optimizer.step(grad_scale=None if more is None else torch.tensor(more))
        weights.append(params)
        states.append([optimizer.state[p]["exp_avg"].dequantize() for p in params])
    for one, other in zip(*weights, strict=True):
        # (g a) b and g (a b) differ by two roundings to FP32, where both scale
        torch.testing.assert_close(one, other, rtol=0, atol=0 if more is None else 1e-6)
    if more is None:
        assert all(one.equal(other) for one, other in zip(*states, strict=True))


def config_of(dtype: str, keys: dict) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        # in force at some steps only
        "gradient_clipping": 0.1,
        # at stage 3 a step in parts
        "zero": {"sub_group_size": 5000, **keys.get("zero", {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **({"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 8}} if dtype == "fp16" else {}),
        **{key: value for key, value in keys.items() if key != "zero"},
    }


def zero_steps(stage, dtype, keys, narrow):
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    from coat_ds.zero import engine as hooks

    kept = hooks.keep_gradients_narrow
    if not narrow:
        hooks.keep_gradients_narrow = lambda wrapper: None
    torch.manual_seed(0)
    # stage 3 does not set its padding, which there is where two ranks share what is odd
    width = 98 if stage == 3 else 97
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 64))
    try:
        engine = engine_of(model, stage, {**STATES, "optimizer": {"min_numel": 1}}, **config_of(dtype, keys))
    finally:
        hooks.keep_gradients_narrow = kept
    seen, step = [], engine.basic_optimizer.step
    # where gradients are between their reduction and the step
    reduced, read, asked = [], [], []

    def watch(*args, **kwargs):
        groups = engine.basic_optimizer.param_groups
        seen.append({(type(p.grad) is NarrowGrad, narrow_and_scale(p.grad)[0].dtype)
                     for group in groups for p in group["params"]})  # fmt: skip
        read.append([narrow_and_scale(p.grad)[0].data_ptr() for group in groups for p in group["params"]])
        return step(*args, **kwargs)

    engine.basic_optimizer.step = watch
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(8, 4, 64, generator=generator).to(next(engine.module.parameters()).dtype)
    losses = []
    for number, batch in enumerate(x):
        if number == 3:
            # dropped, as where a script does not like the loss
            engine.backward(100 * engine(batch).float().square().mean())
            engine.zero_grad()
        loss = (engine(batch) - batch).float().square().mean()
        engine.backward(loss)
        if stage < 3 and engine.is_gradient_accumulation_boundary():
            groups = engine.optimizer.averaged_gradients.values()
            flat = [getattr(gradients, "flat_partition", None) for gradients in groups]
            reduced.append([None if t is None else t.data_ptr() for t in flat])
            # as a script that looks at gradients, and changes one
            found = [safe_get_full_grad(p) for p in engine.module.parameters()]
            safe_set_full_grad(engine.module[0].weight, found[0] / 2)
            asked.append(found)
        engine.step()
        losses.append(loss.item())
    masters = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    partitions = [p.detach().clone() for p in getattr(engine.optimizer, masters)]
    return {
        "losses": losses,
        "masters": partitions,
        "seen": seen,
        "reduced": reduced,
        "read": read,
        "asked": asked,
        "norm": float(engine.get_global_grad_norm()),
    }


WIDE = (False, torch.float32)
CASES = [
    (1, "bf16", {}),
    (2, "bf16", {}),
    (2, "fp16", {}),
    (3, "bf16", {}),
    # during backward, in FP32, and the first matrix larger than a bucket
    (1, "bf16", {"zero": {"overlap_comm": True, "reduce_bucket_size": 5000}}),
    (2, "bf16", {"zero": {"overlap_comm": True, "reduce_bucket_size": 5000}}),
    (2, "bf16", {"communication_data_type": "fp32"}),
    (2, "bf16", {"zero": {"reduce_scatter": False}}),
    (2, "bf16", {"zero": {"contiguous_gradients": False}}),
]
# gradients in FP32 go DeepSpeed's way. Those that no step takes, too: 0.19.8 adds the next ones to them
IN_FP32 = (2, "bf16", {"gradient_accumulation_steps": 1, "data_types": {"grad_accum_dtype": "fp32"}})


def work():
    """The steps of each case with narrow and with wide gradients, and with a large one."""
    deepspeed.init_distributed("gloo")
    steps = {str(case): [zero_steps(*case, narrow) for narrow in (True, False)] for case in [*CASES, IN_FP32]}
    return steps, [large_gradient(bucket) for bucket in (64 * 256 - 1, 64 * 256 + 64 * 64)]


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(work, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_narrow_grads_of_zero_train_to_the_same_bits(ranks, case):
    stage, dtype, keys = case
    handed = (True, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    flat = REDUCES_FLAT and keys.get("zero", {}).get("contiguous_gradients", True)
    for one, other in (steps[str(case)] for steps, _ in ranks):
        assert {pair for step in one["seen"] for pair in step} == {
            handed if HANDS_OVER or stage == 3 else WIDE
        }
        assert {pair for step in other["seen"] for pair in step} == {WIDE}
        assert one["losses"] == other["losses"] and one["losses"][-1] < one["losses"][0]
        assert one["norm"] == other["norm"]
        assert all(map(torch.equal, one["masters"], other["masters"]))
        if stage < 3:
            assert all(map(torch.equal, sum(one["asked"], []), sum(other["asked"], [])))
            # no copy
            assert (one["reduced"] == one["read"]) is flat and len(one["read"]) == 4
            assert {pointer for step in other["reduced"] for pointer in step} == {None}


def test_narrow_grads_leave_fp32_gradients_to_deepspeed(ranks):
    for one, other in (steps[str(IN_FP32)] for steps, _ in ranks):
        assert one["losses"] == other["losses"]
        assert all(map(torch.equal, one["masters"], other["masters"]))


def large_gradient(bucket):
    """Whether the last layer's gradient has memory of its own when backward reaches the first."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 256, bias=False))
    sizes = {"zero": {"reduce_bucket_size": bucket}, "train_micro_batch_size_per_gpu": 4}
    engine = engine_of(model, 2, STATES, **sizes)
    found, last = [], engine.module[1].weight

    def look(grad):
        found.append(last.grad is not None and last.grad.untyped_storage().nbytes() == last.nbytes)

    engine.module[0].weight.register_hook(look)
    engine.backward(engine(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean())
    return found


def test_narrow_grads_larger_than_a_bucket_stay_until_backward_is_done(ranks):
    for _, large in ranks:
        assert large == [[True], [False]]
