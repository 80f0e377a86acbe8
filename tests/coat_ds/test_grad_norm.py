"""The norm of gradients read together, compared with DeepSpeed's own of the same gradients, one by one."""

import collections
import functools
import math
from importlib.metadata import version

import deepspeed
import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coat_ds.zero.grad_norm import _norms
from tests.coat_ds import engines
from tests.coat_ds.engines import STATES
from tests.util import run_distributed

# before, DeepSpeed did not look for inf and NaN in BF16, nor align parameters
SINCE_0_19 = Version(version("deepspeed")) >= Version("0.19")
# tensors of this width do not fill the 16 bytes to which a cell aligns them
WIDTH, LAYERS, CLIP = 46, 4, 0.1
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)
# stage, dtype, and whether a parameter is one that pipeline stages share, in partitions with padding within
CELLS = [(1, "bf16", False), (2, "bf16", False), (2, "bf16", True), (2, "fp16", False), (3, "bf16", False)]
# what one element of one gradient becomes on rank 1, before it is averaged; the last's square is beyond FP32
POISONS = [None, math.inf, math.nan, 1e20]
every_cell = pytest.mark.parametrize("cell", CELLS, ids=str)


class Readers(TorchDispatchMode):
    """The operations that read one of `tensors`."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor) and func is not torch.ops.aten.detach.default
        }
        if read & self.storages:
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def watch(wrapper, seen):
    """Notes what both ways say at each call, and what reads the gradients."""
    ours, theirs = wrapper.get_grad_norm_direct, type(wrapper).get_grad_norm_direct

    def norm(gradients, params, *rest):
        with Readers(gradients) as readers:
            found = ours(gradients, params, *rest)
        seen["readers"] += readers.seen
        seen["norms"].append((float(found), float(theirs(wrapper, gradients, params, *rest))))
        asked = ours, functools.partial(theirs, wrapper)
        largest = (float(ask(gradients, params, math.inf)) for ask in asked)
        seen["largest"].append(tuple(largest))
        # outside of a step, where they are not checked
        kept = gradients[0].clone()
        gradients[0].zero_()
        seen["changed"].append(tuple(float(ask(gradients, params, *rest)) for ask in asked))
        gradients[0].copy_(kept)
        return found

    wrapper.get_grad_norm_direct = norm
    look, looked = (
        wrapper.has_overflow_partitioned_grads_serial,
        type(wrapper).has_overflow_partitioned_grads_serial,
    )

    def check():
        with Readers([g for group in wrapper.averaged_gradients.values() for g in group]) as readers:
            found = look()
        seen["readers"] += readers.seen
        seen["checks"].append((found.tolist(), looked(wrapper).tolist()))
        return found

    wrapper.has_overflow_partitioned_grads_serial = check


def masters(wrapper):
    flats = getattr(wrapper, "single_partition_of_fp32_groups", None)
    return [p.detach().clone() for p in flats or wrapper.fp32_partitioned_groups_flat]


def engine_of(stage, dtype, shared, apart=False):
    """apart: whether biases are a parameter group of their own, the second one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model[1].weight.ds_pipe_replicated = shared
    keys = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero": {"parameter_alignment": True} if shared and SINCE_0_19 else {},
    }
    if dtype == "fp16":
        keys |= {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 4}}
    groups = [{"params": [p for p in model.parameters() if p.dim() == n]} for n in (2, 1)]
    given = {"model_parameters": groups if apart else model.parameters()}
    return engines.engine_of(model, stage, STATES, given, **keys)


def train(stage, dtype, shared):
    engine = engine_of(stage, dtype, shared)
    rank, given, poison = torch.distributed.get_rank(), [], None

    def spoil(grad):
        grad = grad.clone()
        if poison is not None and rank == 1:
            grad[0] = poison
        return grad

    engine.module[0].bias.register_hook(spoil)
    step = engine.basic_optimizer.step

    def note(*args, **kwargs):
        for group in engine.basic_optimizer.param_groups:
            given.extend((p.grad + 0).square().sum().item() for p in group["params"])
        return step(*args, **kwargs)

    engine.basic_optimizer.step = note
    seen = {"norms": [], "largest": [], "changed": [], "checks": [], "readers": []}
    watch(engine.optimizer, seen)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)).to(engine.module[0].bias.dtype)
    out = {}
    for poison in POISONS:
        before = masters(engine.optimizer)
        engine.backward((engine(x) - 1).float().square().mean())
        engine.step()
        moved = not all(map(torch.equal, before, masters(engine.optimizer)))
        out[str(poison)] = {**{name: list(what) for name, what in seen.items()}, "moved": moved}
        out[str(poison)]["given"] = math.fsum(given)
        out[str(poison)]["skipped"] = engine.optimizer.overflow
        for what in (*seen.values(), given):
            what.clear()
    return out


def bad_in_the_second_group(stage):
    """What both ways say of a step whose second parameter group has an infinite gradient."""
    engine, seen = engine_of(stage, "fp16", False, apart=True), collections.defaultdict(list)
    engine.module[0].bias.register_hook(lambda grad: grad * math.inf)
    watch(engine.optimizer, seen)
    engine.backward((engine(torch.ones(4, WIDTH, dtype=torch.float16)) - 1).float().square().mean())
    engine.step()
    return seen["checks"]


def train_all():
    deepspeed.init_distributed("gloo")
    second = {stage: bad_in_the_second_group(stage) for stage in (1, 2)}
    return {cell: train(*cell) for cell in CELLS} | {"second group": second}


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(train_all, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_foreach_norms_are_those_of_fp64(device, dtype):
    # more than a block of CUDA's kernel takes, and one that starts off its alignment
    flat = torch.randn(200_003, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    flat[0] = torch.finfo(dtype).max
    grads = [flat[:150_000], flat[150_000:150_001], flat[150_001:], flat[:0]]
    for found, g in zip(_norms(grads), grads, strict=True):
        expected = g.double().square().sum().sqrt()
        # two sums of n terms in any order
        torch.testing.assert_close(found, expected, rtol=max(1, g.numel()) * 2.0**-52, atol=0)
    for bad in (math.inf, -math.inf, math.nan):
        flat[170_000] = bad
        assert [bool(norm.isfinite()) for norm in _norms(grads)] == [True, True, False, True]


@every_cell
def test_grad_norm_is_deepspeeds(ranks, cell):
    # sums of FP64 in another order; ZeRO 1 and 2 then round the sum to FP32, which may fall on either side,
    # and take the root in FP32
    bound = NUMEL * 2.0**-52 if cell[0] == 3 else 2.0**-23
    for rank in ranks:
        ((ours, theirs),) = rank[cell]["None"]["norms"]
        assert theirs > CLIP and ours == pytest.approx(theirs, rel=bound)
        ((changed, expected),) = rank[cell]["None"]["changed"]
        assert expected < 0.999 * theirs and changed == pytest.approx(expected, rel=bound)
    if cell[2]:
        assert ours < 0.99 * ranks[0][*cell[:2], False]["None"]["norms"][0][0]


@every_cell
def test_grad_norm_inf_is_deepspeeds(ranks, cell):
    """Not asked for by DeepSpeed itself."""
    for rank in ranks:
        ((ours, theirs),) = rank[cell]["None"]["largest"]
        assert ours == theirs < rank[cell]["None"]["norms"][0][1]


@every_cell
def test_grad_norm_reads_each_gradient_once(ranks, cell):
    for rank in ranks:
        assert rank[cell]["None"]["readers"] == ["_foreach_norm"]


@every_cell
def test_grad_norm_clips_the_step(ranks, cell):
    _, dtype, shared = cell
    given = math.sqrt(sum(rank[cell]["None"]["given"] for rank in ranks))
    norm = ranks[0][cell]["None"]["norms"][0][0] / (2.0**4 if dtype == "fp16" else 1)
    if shared:
        # it is left out of the norm, not of the clipping
        assert given > CLIP * 1.01
    else:
        # DeepSpeed adds 1e-6 to the norm; the factor is FP32, in four operations
        assert given == pytest.approx(CLIP, rel=1e-6 / norm + 4 * 2.0**-24)
    assert all(rank[cell]["None"]["moved"] for rank in ranks)


@every_cell
@pytest.mark.parametrize("poison", POISONS[1:], ids=str)
def test_grad_norm_of_one_bad_element_on_one_rank(ranks, cell, poison):
    stage, dtype, _ = cell
    runs = [rank[cell][str(poison)] for rank in ranks]
    for run in runs:
        assert all(ours == theirs for ours, theirs in run["checks"])
        assert all(ours == pytest.approx(theirs, rel=2.0**-23) for ours, theirs in run["norms"])
    if dtype == "bf16" and not SINCE_0_19:
        return
    if stage < 3:
        # FP16 has no such number; the check finds what is not finite, and the norm, on all ranks, the square
        found = not math.isfinite(poison) or dtype == "fp16"
        assert any(ours == [True] for run in runs for ours, _ in run["checks"]) == found
        assert [pair for run in runs for pair in run["norms"]] == ([] if found else [(-1, -1)] * 2)
    # ZeRO-3 has FP64 to the end
    ends_well = stage == 3 and math.isfinite(poison)
    assert [run["skipped"] for run in runs] == [not ends_well] * 2
    assert [run["moved"] for run in runs] == [ends_well] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_overflow_check_looks_at_every_group(ranks, stage):
    checks = [rank["second group"][stage] for rank in ranks]
    assert all(ours == theirs for ((ours, theirs),) in checks)
    # the bias of the first layer is the first rank's
    assert [ours for ((ours, _),) in checks] == [[True], [False]]
