"""Nothing as large as a whole FP32 moment is allocated with it: on a GPU that exceeds the free memory."""

import copy
import io

import pytest
import torch
from torch import nn

from coat_ds import CoatAdamW
from coat_ds.optim.layouts import Fragment
from coat_ds.optim.options import MOMENTS
from coat_ds.optim.saving import decoding_on_save
from coat_ds.zero.offloading import _move_states
from tests.coat_ds.optimizers import assert_equal
from tests.coat_ds.writes import values
from tests.util import Made

NUMEL, PART = 20 * 128 + 45, 256
# a part, with the rest of the groups that a border within a parameter cuts
MOST = PART + 2 * 128
CODES = {torch.uint8: 1, torch.int8: 1}


def in_parts(patch, numel):
    for name in ("coat_kernels.codecs.codec.AT_ONCE", "coat_ds.optim.moment.AT_ONCE"):
        patch.setattr(name, numel)


def stepped(p=None, **options):
    p = nn.Parameter(values(NUMEL, seed=0)) if p is None else p
    optimizer = CoatAdamW([p], min_numel=0, **options)
    # a border within a group, as ZeRO makes them
    optimizer.set_fragments(
        [(p, [Fragment(0, 1300, 0, False), Fragment(1300, p.numel() - 1300, 0, False)], 0)]
    )
    for seed in range(2):
        p.grad = values(p.numel(), seed=seed).to(p.device, p.dtype)
        optimizer.step()
    return p, optimizer


def stored(optimizer):
    return [
        t
        for state in optimizer.state.values()
        for name in MOMENTS
        for piece in state[name].pieces
        for t in piece.storage
    ]


def copied_into(name):
    def write(optimizer):
        (state,) = optimizer.state.values()
        # some groups as they are
        x = state[name].decode()
        x[: 10 * 128] = values(10 * 128, seed=7).abs()
        with Made() as made:
            state[name].copy_(x)
        return made

    return write


def written_within(optimizer):
    """A part of a parameter, as `safe_set_full_optimizer_state` writes it."""
    (state,) = optimizer.state.values()
    x = values(2000, seed=8).square()
    with Made() as made:
        state["exp_avg_sq"].narrow(0, 100, 2000).copy_(x)
    return made


def kept(optimizer):
    (p,) = optimizer.state
    with Made() as made:
        optimizer.set_fragments(
            [(p, [Fragment(0, 1300, 0, True), Fragment(1300, NUMEL - 1300, 0, False)], 0)]
        )
    return made


WAYS = {"m": copied_into("exp_avg"), "v": copied_into("exp_avg_sq"), "part": written_within, "keep": kept}


@pytest.mark.parametrize("way", WAYS)
def test_moment_is_written_part_by_part(way, monkeypatch):
    whole = stepped()[1]
    WAYS[way](whole)
    in_parts(monkeypatch, PART)
    optimizer = stepped()[1]
    made = WAYS[way](optimizer)
    # but what is stored in place of what was
    assert made.over(MOST) == ({torch.float32: 2, **CODES} if way == "keep" else {})
    assert_equal(stored(whole), stored(optimizer))


def saved_by(optimizer):
    with decoding_on_save():
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
    return file


READS = {
    # operations, and how many tensors as large as a moment they give
    "state_dict": (lambda optimizer: optimizer.state_dict(), 2),
    "save": (saved_by, 2),
    "pickle": (lambda optimizer: copy.copy(*optimizer.state.values())["exp_avg"].__reduce_ex__(2), 1),
    "moments": (lambda optimizer: optimizer.moments(*optimizer.state), 2),
    "sum": (lambda optimizer: copy.copy(*optimizer.state.values())["exp_avg_sq"].sum(), 1),
}


@pytest.mark.parametrize("way", READS)
def test_moment_is_read_part_by_part(way, monkeypatch):
    read, count = READS[way]
    p, optimizer = stepped()
    whole = optimizer.moments(p)
    in_parts(monkeypatch, PART)
    with Made() as made:
        read(optimizer)
    assert made.over(MOST) == {torch.float32: count}
    assert_equal(whole, optimizer.moments(p))


def test_moment_in_place_ops_hold_one_copy_of_the_values(monkeypatch):
    in_parts(monkeypatch, PART)
    p, optimizer = stepped()
    with Made() as made:
        optimizer.state[p]["exp_avg_sq"].mul_(0.5)
    assert made.over(MOST) == {torch.float32: 1}


def test_moments_move_without_copies_of_one_another():
    """Pinned memory that was taken for a copy stays taken."""
    p, optimizer = stepped()
    before, moments = [t.clone() for t in stored(optimizer)], optimizer.moments(p)
    with Made() as made:
        _move_states(optimizer, "cpu", True, False)
        optimizer.init_states()
    # two pieces each
    assert made.over(MOST) == {torch.uint8: 2, torch.int8: 2}
    assert_equal(before, stored(optimizer))
    assert_equal(moments, optimizer.moments(p))
    # the first follows the second again
    optimizer.state[p]["exp_avg_sq"].mul_(4)
    first, _ = optimizer.moments(p)
    assert ((first - moments[0]).abs() <= 0.01 * moments[0].abs().max()).all()
