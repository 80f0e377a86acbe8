"""FP8 inputs of checkpointed regions under DeepSpeed; `tests/kernels/test_saved.py` has torch's own."""

import contextlib
import copy
import functools
import gc
import logging
import warnings
import weakref

import deepspeed
import pytest
import torch

import coat_ds
from coat_ds.zero.recompute import compressed
from coat_kernels.autograd.checkpointing import compressed_bytes
from coat_kernels.autograd.origin import COMPRESSED, noted
from tests.coat_ds.engines import STATES, engine_of
from tests.kernels.mixture import CHOOSE, TOKENS, Mixture
from tests.util import listening, rel_rms, run_distributed

ROWS, WIDTH, GROUP = 64, 128, 128
COMPRESSES = {**STATES, "fp8_activation_checkpointing": True}
# arguments of deepspeed.checkpointing.configure that are refused, with the key of each
REFUSED = {
    "partition_activations": {"partition_activations": True},
    "cpu_checkpointing": {"checkpoint_in_cpu": True},
    "contiguous_memory_optimization": {
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 1,
    },
}


class Mpu:
    """Each rank alone is one tensor-parallel group."""

    def __init__(self):
        self.group = torch.distributed.new_subgroups(1)[0]

    def get_model_parallel_rank(self):
        return 0

    def get_model_parallel_world_size(self):
        return 1

    def get_model_parallel_group(self):
        return self.group


def representable(generator):
    """What E4M3 holds exactly: 3 fraction bits, 4 binades."""
    mantissa = torch.randint(8, 16, (ROWS, WIDTH), generator=generator).float()
    return torch.ldexp(mantissa, torch.randint(-6, -2, (ROWS, WIDTH), generator=generator))


def layers():
    torch.manual_seed(1)
    nn = torch.nn
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, WIDTH))


def one_region(host, compress, x):
    """Gradients, and bytes kept until and after backward, of a region that also takes a mask."""
    net = layers()
    mask = torch.zeros(ROWS, WIDTH).masked_fill(torch.arange(WIDTH) % 3 == 0, -torch.inf)

    def run(h, mask):
        return (net(h) + mask).softmax(-1)

    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    inputs = x * 1, mask
    if compress:
        with compressed():
            y = host.checkpoint(run, *inputs)
    else:
        y = host.checkpoint(run, *inputs)
    del inputs
    kept = compressed_bytes()
    y.square().sum().backward()
    del y
    gc.collect()
    return [x.grad, *(p.grad for p in net.parameters())], kept, compressed_bytes()


def chain(host):
    """A chain of regions: is anything but the codes kept?"""
    net, outputs = layers(), []
    with compressed():
        h = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
        for _ in range(4):
            h = host.checkpoint(net, h)
            outputs.append(weakref.ref(h))
    gc.collect()
    return [ref() is None for ref in outputs], compressed_bytes()


def chosen(host):
    """Which experts a router in a region has chosen, forward and where that is recomputed."""
    torch.manual_seed(2)
    net = Mixture("cpu", CHOOSE["topk"])
    h = torch.randn(TOKENS, net.gate.in_features, requires_grad=True) * 1
    with compressed():
        y = host.checkpoint(net, h)
    del h
    y.sum().backward()
    return net.taken


def twice(host):
    """A tensor that two regions take, and one that says that it is to be left alone: bytes kept of each, and
    whether it is freed and what it says then."""
    net, found = layers(), []
    for alone in (False, True):
        h = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
        if alone:
            h.no_checkpointing = True
        with compressed():
            y = [host.checkpoint(net, h) for _ in range(2)]
        says, ref = getattr(h, "no_checkpointing", None), weakref.ref(h)
        del h
        gc.collect()
        found.append((compressed_bytes()[1], ref() is None, says))
        del y
    return found


def failed(host):
    """What a tensor says after a region that took it has failed."""

    def fails(h):
        raise OSError("no room")

    h = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    with compressed(), pytest.raises(OSError, match="no room"):
        host.checkpoint(fails, h)
    return getattr(h, "no_checkpointing", None)


def pair(host, x):
    """A region that takes two activations: bytes kept of both, and what backward makes of them."""
    kept, gradients = [], []
    for compress in (False, True):
        a, b = x.clone().requires_grad_(), x.flip(0).clone().requires_grad_()
        with compressed() if compress else contextlib.nullcontext():
            y = host.checkpoint(torch.mul, a * 1, b * 2)
        kept.append(compressed_bytes())
        y.square().sum().backward()
        gradients.append((a.grad, b.grad))
    return kept, [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]


def modes():
    from deepspeed.runtime.activation_checkpointing import checkpointing as host

    deepspeed.init_distributed("gloo")
    mpu = Mpu()
    exact = representable(torch.Generator().manual_seed(3))
    rough = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))
    host.configure(mpu)
    expected, expected_of_rough = (one_region(host, False, x)[0] for x in (exact, rough))
    found, *kept = one_region(host, True, exact)
    noisy, *_ = one_region(host, True, rough)
    out = {
        "equal": [torch.equal(a, b) for a, b in zip(found, expected, strict=True)],
        "any": all(g.any() and g.isfinite().all() for g in expected),
        "error": [rel_rms(a, b) for a, b in zip(noisy, expected_of_rough, strict=True)],
        "kept": kept,
    }
    out["chain"], out["chosen"], out["twice"] = chain(host), chosen(host), twice(host)
    out["pair"], out["failed"], out["refused"] = pair(host, exact), failed(host), []
    for key, arguments in REFUSED.items():
        host.configure(mpu, **arguments)
        with pytest.raises(coat_ds.CoatConfigError) as error:
            one_region(host, True, exact)
        out["refused"].append((key, str(error.value)))
    host.configure(mpu, partition_activations=False, contiguous_checkpointing=False, checkpoint_in_cpu=False)
    # outside of the context DeepSpeed's own keeps nothing of ours
    out["outside"] = one_region(host, False, exact)[1]
    return out


@pytest.fixture(scope="module")
def two():
    return run_distributed(everything, 2)


def test_deepspeed_region_is_recomputed_from_fp8_inputs(two):
    for run in two:
        # bit for bit, dropout replayed
        assert all(run["equal"]) and run["any"]
        # inputs are off by 2^-4 of themselves at most, and gradients move no more than they do, since the
        # region is smooth with a slope of about 1. By something, or it were not the codes that were used
        assert all(2**-10 < error < 2**-4 for error in run["error"])
        during, after = run["kept"]
        numel = ROWS * WIDTH
        assert during == (numel + numel // GROUP, 4 * numel)
        assert after == (0, 0)


def test_deepspeed_regions_keep_codes_alone(two):
    for rank in two:
        freed, kept = rank["chain"]
        assert freed == [True, True, True, False]
        assert kept == (4 * ROWS * WIDTH * (GROUP + 1) // GROUP, 4 * ROWS * WIDTH * 4)


def test_deepspeed_region_keeps_two_inputs_in_8_bits(two):
    for rank in two:
        (stock, kept), equal = rank["pair"]
        assert stock == (0, 0) and kept == (2 * ROWS * WIDTH * (GROUP + 1) // GROUP, 2 * ROWS * WIDTH * 4)
        assert equal == [True, True]


def test_deepspeed_region_repeats_the_routers_choices(two):
    for rank in two:
        first, again = rank["chosen"]
        assert torch.equal(first, again)


def test_deepspeed_regions_share_codes_and_respect_no_checkpointing(two):
    """Regions take the same codes of one tensor, and none of a tensor that DeepSpeed is to leave alone."""
    for rank in two:
        assert rank["twice"] == [(4 * ROWS * WIDTH, True, None), (0, False, True)]
        # and it is not left alone from then on
        assert rank["failed"] is None


def test_deepspeed_region_refuses_other_places_of_inputs(two):
    for rank in two:
        assert [key for key, _ in rank["refused"]] == list(REFUSED)
        for key, error in rank["refused"]:
            # contiguous buffers need partitions
            named = "partition_activations" if key.startswith("contiguous") else key
            assert f"activation_checkpointing.{named}: " in error
            assert "coat.fp8_activation_checkpointing" in error
        assert rank["outside"] == (0, 0)


class Net(torch.nn.Module):
    """Half of its layers are checkpointed by DeepSpeed, half by torch, the way models import them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(layers() for _ in range(4))

    def forward(self, x, target):
        from deepspeed import checkpointing
        from torch.utils.checkpoint import checkpoint

        x = x * self.blocks[0][0].weight.new_ones(()).requires_grad_()
        for i, block in enumerate(self.blocks):
            x = checkpointing.checkpoint(block, x) if i % 2 else checkpoint(block, x, use_reentrant=i == 0)
        return (x.float() - target).square().mean()


def train(stage, compress, lines):
    """For four passes, two to a step: losses, bytes in FP8 after each, after all, and lines logged."""
    lines.clear()
    block = {**STATES, "fp8_activation_checkpointing": compress}
    rows = ROWS // torch.distributed.get_world_size()
    batches = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": 2}
    engine = engine_of(Net(), stage, block, **batches)
    losses, kept = [], []
    for step in range(4):
        torch.manual_seed(step)
        x, target = torch.randn(rows, WIDTH).bfloat16(), torch.randn(rows, WIDTH)
        loss = engine(x, target)
        kept.append(compressed_bytes())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        engine(x, target)
    return losses, kept, compressed_bytes(), [line for line in lines if "COAT" in line]


def engines():
    warnings.simplefilter("ignore")
    from deepspeed.runtime.activation_checkpointing import checkpointing as host

    host.configure(Mpu())
    with listening() as lines:
        out = {(stage, on): train(stage, on, lines) for stage in (1, 3) for on in (False, True)}
    return out | {"each": each_its_own(), "nothing to compress": idle()}


def idle():
    """What is warned of in a block that compresses checkpoints, where the model makes none, and when."""
    with listening(logging.WARNING) as lines:
        engine = engine_of(torch.nn.Linear(WIDTH, WIDTH), 0, COMPRESSES, bf16=None)
        with contextlib.suppress(RuntimeError):
            engine(torch.zeros(1, 1))
        with torch.no_grad():
            engine(torch.zeros(1, WIDTH))
        early = [line for line in lines if "checkpoint" in line]
        for _ in range(2):
            engine(torch.zeros(1, WIDTH))
    return early, [line for line in lines if "checkpoint" in line]


def are_packed() -> list[bool]:
    """Whether the inputs of DeepSpeed's and torch's regions that start here are packed."""
    from deepspeed import checkpointing
    from torch.utils.checkpoint import checkpoint

    ways = [checkpointing.checkpoint]
    ways += [functools.partial(checkpoint, use_reentrant=reentrant) for reentrant in (True, False)]
    found = []
    for way in ways:
        h = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
        y = way(torch.exp, h)
        found.append(noted(h, COMPRESSED) is not None)
        del y
    return found


class Acts(torch.nn.Module):
    """Does something, before or in the middle of its forward."""

    def __init__(self, action):
        super().__init__()
        self.layer, self.action = torch.nn.Linear(WIDTH, WIDTH), action

    def forward(self, x):
        return self.layer(x), self.action()


def each_its_own():
    """Whether regions keep their inputs in FP8: in an engine, in another within its forward and alone, after
    the forward was interrupted, and in a copy of its module. Of threads: tests/kernels/test_saved.py."""
    x, found = torch.randn(ROWS, WIDTH), {}
    stock = engine_of(Acts(are_packed), 0, STATES, bf16=None)

    def around():
        found["within"] = stock(x)[1]
        return are_packed()

    def interrupt():
        raise KeyboardInterrupt

    outer = engine_of(Acts(around), 0, COMPRESSES, bf16=None)
    found["itself"], found["stock"] = outer(x)[1], stock(x)[1]
    outer.module.action = interrupt
    with contextlib.suppress(KeyboardInterrupt):
        outer(x)
    found["interrupted"] = are_packed()
    outer.module.action = are_packed
    found["copy"] = copy.deepcopy(outer.module)(x)[1]
    return found


def everything():
    return modes() | engines()


@pytest.mark.parametrize("stage", [1, 3])
def test_engine_compresses_checkpointed_inputs(two, stage):
    for number, rank in enumerate(two):
        losses, kept, _, _ = rank[stage, False]
        compressed_losses, compressed_kept, after, lines = rank[stage, True]
        # the forward pass does not change; the first update is the same except for gradients' errors
        assert compressed_losses[:2] == losses[:2]
        assert compressed_losses == pytest.approx(losses, rel=1e-2) and compressed_losses != losses
        numel = ROWS // 2 * WIDTH
        assert set(kept) == {(0, 0)} and after == (0, 0)
        assert set(compressed_kept) == {(4 * numel * (GROUP + 1) // GROUP, 4 * numel * 2)}
        said = [line for line in lines if "checkpointed inputs are kept" in line]
        assert len(said) == (number == 0)
        if said:
            codes, plain = f"{4 * numel * (GROUP + 1) // GROUP:,}", f"{4 * numel * 2:,}"
            assert f"4 checkpointed inputs are kept in FP8, in {codes} bytes in place of {plain}" in said[0]


def test_engine_warns_once_of_nothing_to_compress(two):
    for number, rank in enumerate(two):
        early, said = rank["nothing to compress"]
        assert early == [] and len(said) == (number == 0)
        assert all("coat.fp8_activation_checkpointing: found True" in line for line in said)
        assert all("gradient_checkpointing" in line for line in said)


def test_engine_compresses_in_its_own_forward_alone(two):
    # DeepSpeed's regions keep codes as an attribute of a stand-in, torch's by hooks
    fp8, plain = [True] * 3, [False] * 3
    expected = {"itself": fp8, "within": fp8, "stock": plain, "interrupted": plain, "copy": fp8}
    for rank in two:
        assert rank["each"] == expected
