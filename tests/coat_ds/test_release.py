"""Gradients that backward applies and frees: the bits of a step after backward."""

import copy
import itertools

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

import coat_ds
from coat_ds import CoatAdamW, CoatConfigError
from coat_ds.optim import host_states, release
from coat_ds.optim.shards import local
from coat_ds.zero import convert_optimizer
from tests.coat_ds.optimizers import assert_equal, stored, through_file
from tests.coat_ds.sharded import VOCABULARY, build
from tests.families import FAMILIES
from tests.util import run_distributed

# GB of states that stay on the device
BUDGET = 1e-4
STEPS = 4

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several steps in each backward."""
    monkeypatch.setattr(host_states, "CHUNK", 13 * 256)
    monkeypatch.setattr(release, "CHUNK", 13 * 256)


def net(device, dtype=torch.bfloat16, frozen=True):
    """A Llama whose layers are converted, with tied embeddings and a frozen norm."""
    model = FAMILIES["llama"].build(seed=0)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight.requires_grad_(not frozen)
    model = model.to(device, dtype)
    coat_ds.convert(model)
    return model


def backward(model, seed):
    device = next(model.parameters()).device
    loss = model(
        **{k: v.to(device) for k, v in FAMILIES["llama"].batch(seed=seed, rows=2, tokens=32).items()}
    ).loss
    loss.backward()
    return loss.item()


def adamw(model, **options):
    names = list(model.named_parameters())
    return CoatAdamW(
        [{"params": names[::2]}, {"params": names[1::2], "weight_decay": 0.0}],
        lr=1e-2,
        min_numel=100,
        **options,
    )


def run(model, optimizer, steps=range(STEPS), scale_of=None):
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        scale = None if scale_of is None else scale_of(model)
        if scale_of is None or scale is not None:
            optimizer.step(grad_scale=scale)
        optimizer.zero_grad()
    return losses


DTYPES = torch.float32, torch.bfloat16
# on a CPU each type, and each place of the states
RUNS = [(True, STEPS, torch.float32, "none"), (True, STEPS, torch.bfloat16, "cpu")]
RUNS += [(True, STEPS, torch.bfloat16, BUDGET)]
RUNS += [
    pytest.param(*run, marks=pytest.mark.gpu)
    for run in itertools.product((False, True), (50,), DTYPES, ("none", "cpu", BUDGET))
]


@pytest.mark.parametrize("released, steps, dtype, offload", RUNS)
def test_release_gradients_steps_as_after_backward(released, dtype, offload, steps, device):
    model, other = (net(device, dtype) for _ in range(2))
    after, during = adamw(model), adamw(other, offload=offload)
    if released:
        during.release_gradients()
    assert run(model, after, range(steps)) == run(other, during, range(steps))
    assert_equal(list(model.parameters()), list(other.parameters()))
    assert_equal(stored(after), stored(during))


def test_release_gradients_frees_them_during_backward(device):
    model = net(device)
    optimizer = adamw(model, offload="cpu")
    optimizer.release_gradients()
    trained = [p for p in model.parameters() if p.requires_grad]
    most = 0

    def count(p):
        nonlocal most
        most = max(most, sum(x.numel() for x in trained if x.grad is not None))

    for p in trained:
        # after that of the optimizer
        p.register_post_accumulate_grad_hook(count)
    backward(model, 0)
    # what is left is less than a chunk, before the last parameter is added
    assert most < release.CHUNK < sum(p.numel() for p in trained) / 4
    optimizer.step()
    assert all(p.grad is None for p in trained)
    assert sum(len(state) > 0 for state in optimizer.state.values()) == len(trained)


def test_release_gradients_clips_by_the_norm_of_the_backward_before(device):
    most, norms = 0.5, []

    def factor(model):
        squares = [p.grad.norm().float().square() for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack(squares).sum().sqrt())
        if len(norms) == 1:
            # its gradients are dropped
            return None
        return torch.full((), min(1.0, most / (float(norms[-2]) + 1e-6)), device=device)

    model, other = (net(device, torch.float32) for _ in range(2))
    after, during = adamw(model), adamw(other, offload="cpu")
    during.release_gradients(clip_by_last_norm=most)
    losses = run(model, after, scale_of=factor), run(other, during)
    assert float(max(norms)) > most
    # the squares are summed in another order: some 2^-22 of a gradient
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    far = count = 0
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        # a moment next to the middle of two codes gets the other one, up to 2^-4 off, and so is its update,
        # which is about the learning rate
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2**-4 * 1e-2)
        far += int((~torch.isclose(p, q, rtol=1e-3, atol=1e-4)).sum())
        count += p.numel()
    assert far < 1e-3 * count


@pytest.mark.parametrize("change", ["added", "unfrozen"])
def test_release_gradients_clips_those_of_parameters_that_come_later(change):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    late = list(model[1].parameters())
    model[1].requires_grad_(False)
    optimizer = CoatAdamW(model[: 1 if change == "added" else 2].parameters(), weight_decay=0.0)
    optimizer.release_gradients(clip_by_last_norm=1e-9)
    for step in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        if step == 0:
            model.requires_grad_(True)
            if change == "added":
                optimizer.add_param_group({"params": late})
            before = [p.detach().clone() for p in late]
    assert all(p.grad is None for p in model.parameters())
    for p, old in zip(late, before, strict=True):
        # clipped, gradients are below eps of 1e-8; unclipped, the first step would be lr = 1e-3
        assert 0 < (p - old).abs().max() < 1.1e-4


def test_release_gradients_goes_on_from_a_checkpoint(device):
    model = net(device)
    optimizer = adamw(model, offload="cpu")
    optimizer.release_gradients()
    run(model, optimizer)
    resumed = copy.deepcopy(model)
    other = adamw(resumed)
    other.load_state_dict(through_file(optimizer.state_dict()))
    other.release_gradients()
    later = range(STEPS, STEPS + 2)
    assert run(model, optimizer, later) == run(resumed, other, later)


def test_release_gradients_under_trainer(tmp_path):
    losses = []
    for released in (False, True):
        model = net("cpu", torch.float32, frozen=False)
        optimizer = adamw(model)
        if released:
            optimizer.release_gradients()
        rows = [
            {k: v[0] for k, v in FAMILIES["llama"].batch(seed=s, rows=1, tokens=32).items()} for s in range(8)
        ]
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, max_grad_norm=0.0, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        losses.append(
            Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None)).train().training_loss
        )
    assert losses[0] == losses[1]


def fails(action, words):
    with pytest.raises((RuntimeError, ValueError), match=words):
        action()


def test_release_gradients_refusals(device, monkeypatch):
    model = net(device)
    optimizer = adamw(model)
    optimizer.release_gradients()
    fails(optimizer.release_gradients, "a second call")
    with pytest.raises(CoatConfigError, match="a CoatAdamW that releases gradients"):
        convert_optimizer.check(optimizer)
    backward(model, 0)
    fails(lambda: backward(model, 0), "found a second gradient of a parameter of shape .* Call step\\(\\)")
    model = net(device)
    optimizer = adamw(model)
    fails(lambda: optimizer.release_gradients(clip_by_last_norm="1"), "clip_by_last_norm: expected a number")
    for wrong in (0, -1.0, float("nan")):
        fails(lambda: optimizer.release_gradients(wrong), f"expected a number above 0, found {wrong}. None")  # noqa: B023
    optimizer.release_gradients()
    # the gradients then wait for the step
    monkeypatch.setattr(release, "CHUNK", 2**25)
    backward(model, 0)
    optimizer.zero_grad()
    fails(optimizer.step, "found no gradient of a parameter .* Call zero_grad\\(\\) after step")
    optimizer.step()
    backward(model, 0)
    fails(
        lambda: optimizer.step(grad_scale=torch.ones((), device=device)),
        "found a gradient scaler or grad_scale",
    )
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))
    fails(lambda: scaler.step(optimizer), "found a gradient scaler or grad_scale")

    class Other(CoatAdamW):
        pass

    fails(Other(net(device).parameters()).release_gradients, "or Other of partitions")


def sharded(offload, released):
    model = build(dtype=torch.bfloat16)
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = CoatAdamW(model.named_parameters(), lr=1e-2, min_numel=100, offload=offload)
    if released:
        optimizer.release_gradients()
        fails(lambda: adamw(model).release_gradients(clip_by_last_norm=1.0), "found DTensors")
    for step in range(3):
        tokens = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(step))
        model(tokens).float().square().mean().backward()
        assert not released or any(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [local(p).clone() for p in model.parameters()]


def both():
    torch.distributed.init_process_group("gloo")
    host_states.CHUNK = release.CHUNK = 13 * 256
    plain = build()
    optimizer = CoatAdamW(plain.parameters())
    optimizer.release_gradients()
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    fails(lambda: plain(tokens).sum().backward(), "that is not sharded, in one of 2 processes")
    return [sharded("none", False), *(sharded(offload, True) for offload in ("none", "cpu"))]


def test_release_gradients_of_fsdp2_shards():
    for after, *during in run_distributed(both, 2):
        for shards in during:
            assert_equal(after, shards)
