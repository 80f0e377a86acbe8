"""States in host memory that pass through the device in chunks: the bits of resident states."""

import copy
import io
import logging
from itertools import pairwise

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from coat_ds import CoatAdamW, state_bytes
from coat_ds.optim import host_memory, host_states
from coat_ds.optim import step as optimizer_step
from coat_ds.optim.host_memory import HostMemoryError
from coat_ds.optim.host_states import chunks_of, runs_of
from coat_ds.optim.layouts import Fragment
from coat_ds.optim.moment import Moment
from coat_ds.optim.pieces import Operands
from coat_ds.optim.shards import local
from tests.coat_ds.optimizers import assert_equal, stored, through_file
from tests.coat_ds.sharded import VOCABULARY, build
from tests.util import listening, run_distributed

SHAPES = [(100, 130), (7,), (64, 64), (5000,), (3, 33, 100), (0,), (), (1, 4096)]
EXPANDED = {"exp_avg_format": "fp8_expanded", "exp_avg_sq_format": "fp8_expanded"}
KINDS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16 stochastic": (torch.bfloat16, {"bf16_params": "stochastic", "seed": 3}),
    "expanded": (torch.float32, EXPANDED),
    "fp32 moments": (torch.bfloat16, {"min_numel": 2**30}),
    "fp32 first moments": (torch.bfloat16, {"exp_avg_format": "fp32"}),
}
# each parameter is left out of two of them, and one is skipped
STEPS = 8
# GB of states that stay on the device: some states of each kind
BUDGET = 4e-5

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks that cut large tensors, at no multiple of the kernel's tiles, and join small ones."""
    monkeypatch.setattr(host_states, "CHUNK", 13 * 256)


def made(device, dtype, offload, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]
    # not contiguous
    params.append(torch.nn.Parameter(torch.randn(90, 70, generator=generator).to(device, dtype).t()))
    params.append(torch.nn.Parameter(torch.ones(5000, device=device, dtype=dtype), requires_grad=False))
    groups = [
        {"params": params[:4]},
        {"params": params[4:], "lr": 2e-3, "weight_decay": 0.0, "maximize": True},
    ]
    return params, CoatAdamW(groups, **{"lr": 1e-2, "min_numel": 100, **options}, offload=offload)


def set_grads(params, step):
    """Gradients of some parameters, others in each step."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        p.grad = g if p.requires_grad and (i + step) % 4 else None


def train(params, optimizer, steps, first=0):
    flag = torch.zeros((), device=params[0].device)
    for step in range(first, first + steps):
        set_grads(params, step)
        # as a gradient scaler does, which skips the fourth step
        optimizer.found_inf = flag.fill_(float(step == 3))
        optimizer.step(grad_scale=torch.tensor(0.5, device=flag.device))


def allocations(optimizer):
    """The parts of host memory that the states lie in, consecutive except for less than an alignment."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes)
        for state in optimizer.state.values()
        for t in (*state["exp_avg"].stored(), *state["exp_avg_sq"].stored(), state.get("remainder"))
        if t is not None and t.numel()
    )
    return 1 + sum(after - end >= host_states.ALIGNMENT for (_, end), (after, _) in pairwise(spans))


@pytest.mark.each_value
@pytest.mark.parametrize("offload", ["cpu", BUDGET])
@pytest.mark.parametrize("kind", KINDS)
def test_host_states_step_with_the_bits_of_resident_ones(kind, offload, device):
    dtype, options = KINDS[kind]
    (params, resident), (others, host) = (
        made(device, dtype, where, **options) for where in ("none", offload)
    )
    train(params, resident, STEPS)
    train(others, host, STEPS)
    assert_equal(params, others)
    assert_equal(stored(resident), stored(host))
    assert state_bytes(resident) == state_bytes(host)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_host_states_of_parameters_on_the_cpu_are_stepped_by_the_gpu(kind, pinned):
    """As with DeepSpeed's `offload_optimizer`, which pins masters and gradients or does not."""
    dtype, options = KINDS[kind]
    params, resident = made(torch.device("cuda"), dtype, "none", **options)
    others, host = made(torch.device("cpu"), dtype, "cpu", **options)
    for p in others if pinned else ():
        p.data = p.data.pin_memory()
    train(params, resident, STEPS)
    train(others, host, STEPS)
    assert_equal([p.cpu() for p in params], others)
    assert_equal(stored(resident), stored(host))
    assert all(state["exp_avg"].is_pinned() for state in host.state.values() if state["exp_avg"].numel())


def test_host_states_stay_as_fit_into_the_budget(device):
    for budget in (0, BUDGET, 1):
        params, optimizer = made(device, torch.bfloat16, budget)
        with listening(logging.INFO, "offload") as lines:
            train(params, optimizer, 2)
        sizes = dict.fromkeys((False, True), 0)
        for p in params[:-1]:
            held = [*optimizer.state[p]["exp_avg"].stored(), *optimizer.state[p]["exp_avg_sq"].stored()]
            sizes[optimizer.is_offloaded(p)] += sum(
                map(host_states.aligned, (*held, optimizer.state[p]["remainder"]))
            )
            assert {t.device.type for t in held} == {"cpu" if optimizer.is_offloaded(p) else device.type}
        assert sizes[False] <= 1e9 * budget and all(sizes.values()) == (budget == BUDGET)
        (line,) = lines
        assert f"{sizes[False]:,} bytes of states stay" in line and f"{sizes[True]:,} bytes stream" in line


@pytest.mark.parametrize("offload, passes", [("cpu", True), (0.0, True), (1.0, False), ("none", False)])
def test_host_states_are_stepped_in_chunks(offload, passes, device, monkeypatch):
    """On the CPU, where states could be stepped in place."""
    sizes, stepped = [], optimizer_step.adamw_

    def counted(params, *rest, **more):
        sizes.append(sum(p.numel() for p in params))
        stepped(params, *rest, **more)

    monkeypatch.setattr(optimizer_step, "adamw_", counted)
    params, optimizer = made(device, torch.float32, offload)
    train(params, optimizer, 1)
    assert (max(sizes) <= host_states.CHUNK) == passes


def test_host_states_lie_in_one_pinned_allocation(device):
    params, optimizer = made(device, torch.bfloat16, "cpu")
    optimizer.init_states()
    assert allocations(optimizer) == 1
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(m.device.type == "cpu" and (m.is_pinned() or device.type == "cpu") for m in moments)
    train(params, optimizer, 2)
    optimizer.load_state_dict(through_file(optimizer.state_dict()))
    assert allocations(optimizer) == 1


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["stock", "compressed"])
@pytest.mark.parametrize("there", ["none", "cpu", BUDGET])
def test_host_states_resume_to_the_bit_on_either_side(layout, there, device):
    options = {"checkpoint_layout": layout}
    params, whole = made(device, torch.bfloat16, "cpu", **options)
    train(params, whole, 5)
    saved, weights = through_file(whole.state_dict()), [p.detach().clone() for p in params]
    train(params, whole, 5, first=5)
    others, resumed = made(device, torch.bfloat16, there, **options)
    with torch.no_grad():
        for p, w in zip(others, weights, strict=True):
            p.copy_(w)
    resumed.load_state_dict(saved)
    train(others, resumed, 5, first=5)
    assert_equal(params, others)
    assert_equal(stored(whole), stored(resumed))


@pytest.mark.parametrize("room", [256, 512, 2048])
def test_host_states_of_no_chunk_copy_bytes_of_an_earlier_one(room):
    """The copy back of the earlier chunk may still run when the later one is copied in."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in (host_states.CHUNK - room, 3000)]
    optimizer = CoatAdamW(params, min_numel=0, offload="cpu")
    optimizer.init_states()
    states = [optimizer.state[p] for p in params]
    whole = [
        Operands(p.detach(), p.detach(), s["exp_avg"].pieces[0], s["exp_avg_sq"].pieces[0], s["step"], None)
        for p, s in zip(params, states, strict=True)
    ]
    earlier: set[int] = set()
    chunks = list(chunks_of(whole))
    for chunk in chunks:
        tensors = [t for x in chunk for t in x.states]
        runs, _ = runs_of(tensors)
        assert earlier.isdisjoint(b for run in runs for b in range(run.start, run.stop))
        earlier |= {b for t in tensors for b in range(t.data_ptr(), t.data_ptr() + t.nbytes)}


def test_host_states_are_read_by_a_stock_adamw(device):
    params, optimizer = made(device, torch.float32, "cpu")
    train(params, optimizer, 3)
    stock = torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}])
    stock.load_state_dict(optimizer.state_dict())
    for p, state in stock.state.items():
        assert_equal(optimizer.moments(p), [state["exp_avg"].cpu(), state["exp_avg_sq"].cpu()])


@pytest.mark.parametrize("offload", ["none", "cpu", BUDGET])
def test_host_states_of_a_copy_and_a_pickle_go_on(offload, device):
    params, optimizer = made(device, torch.float32, offload)
    train(params, optimizer, 3)
    file = io.BytesIO()
    torch.save((params, optimizer), file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    copied = copy.deepcopy((params, optimizer))
    train(params, optimizer, 3, first=3)
    for others, other in (copied, pickled):
        train(others, other, 3, first=3)
        assert_equal(params, others)
        assert_equal(stored(optimizer), stored(other))
        assert offload == "none" or len(other._host._pages) == 1


def test_host_states_of_flat_partitions_take_one_allocation(device):
    flats = [torch.nn.Parameter(torch.randn(n, device=device)) for n in (5000, 9000)]
    optimizer = CoatAdamW(flats, min_numel=0, offload="cpu")
    optimizer.set_fragments(
        (p, [Fragment(0, 1300, 0, True), Fragment(1300, p.numel() - 1300, 0, False)], 0) for p in flats
    )
    assert allocations(optimizer) == 1
    for p in flats:
        p.grad = torch.ones_like(p)
    optimizer.step()


def shards(offload):
    """Weights and states of this rank's shards after six steps, resumed after three by another optimizer."""
    model = build(dtype=torch.bfloat16)
    for part in model:
        fully_shard(part)
    fully_shard(model)
    out, saved = [], None
    for first in (0, 3):
        optimizer = CoatAdamW(model.named_parameters(), lr=1e-2, min_numel=100, offload=offload)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for step in range(first, first + 3):
            tokens = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(step))
            model(tokens).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()
        states = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "remainder")]
        out += [local(p).clone() for p in model.parameters()] + [local(x).clone() for x in states]
    return [x.decode() if isinstance(x, Moment) else x for x in out]


def shard_both():
    torch.distributed.init_process_group("gloo")
    host_states.CHUNK = 13 * 256
    return [shards(offload) for offload in ("none", "cpu")]


def test_host_states_of_fsdp2_shards_step_as_resident_ones():
    """Over two ranks. One row of the last layer lies on the second, of three."""
    for resident, host in run_distributed(shard_both, 2):
        assert_equal(resident, host)


@pytest.mark.parametrize(
    "total, available, ranks, refused",
    [(100, 100, 1, False), (100, 40, 1, True), (100, 100, 4, True), (1000, 60, 4, False)],
)
def test_host_states_find_too_little_memory_before_it_is_allocated(
    total, available, ranks, refused, device, monkeypatch, tmp_path
):
    """One process of four may find memory that the other three have taken already."""
    p = torch.nn.Parameter(torch.ones(2**20, device=device))
    # codes, a scale of each group of both moments, an exponent of each group of one; and the end
    size = 2 * 2**20 + 2 * 4 * 2**13 + 2**13 + 256
    unit = -(-size // (50 * 1024))
    info = tmp_path / "meminfo"
    info.write_text(f"MemTotal: {total * unit} kB\nMemAvailable: {available * unit} kB\n")
    monkeypatch.setattr(host_memory, "MEMORY_INFO", info)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    optimizer = CoatAdamW([p], offload="cpu")
    if not refused:
        optimizer.init_states()
        return
    with pytest.raises(HostMemoryError, match=rf"{size:,} bytes in each of {ranks} processes"):
        optimizer.init_states()
    assert not optimizer.state[p].get("remainder")


def test_host_states_count_limits_of_the_cgroup(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    total, available = host_memory.host_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.host_memory()[0] == total
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    # 1000 bytes of files, which give way, and shared memory, which does not
    (tmp_path / "memory.stat").write_text("anon 2500\nfile 1500\nshmem 500\n")
    assert host_memory.host_memory() == (5000, 2000) and available > 2000
