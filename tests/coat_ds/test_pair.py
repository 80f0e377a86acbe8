"""Two moments, the first stored relative to the second: to a framework each is a tensor of its own."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F

from coat_ds import CoatAdamW
from coat_ds.optim.layouts import Fragment
from coat_ds.optim.moment import Moment, paired
from coat_ds.optim.stored_moment import StoredMoment
from coat_kernels.codecs import GROUP_SIZE, Encoded, codec, get_codec
from tests.coat_ds.optimizers import encoded
from tests.coat_ds.writes import SHAPE, WRITES, values
from tests.util import Made

RATIO, LOG, EXACT = (get_codec(name) for name in ("ratio8", "log8", "fp32"))
GROUP, NUMEL = GROUP_SIZE, torch.Size(SHAPE).numel()
FORMATS = {"exp_avg_format": "ratio8", "exp_avg_sq_format": "log8", "min_numel": 0}
MOMENTS = ("exp_avg", "exp_avg_sq")


def pair_of(m, v, layouts=(RATIO, LOG)):
    first, second = (Moment.zeros(m.shape, layout, "cpu") for layout in layouts)
    first, second = paired(first, second)
    second.copy_(v)
    first.copy_(m)
    return first, second


def some_pair(seed=0):
    """Moments of a usual kind: v over four decades, |m| below its root; some are zero."""
    v = torch.exp(2 * values(*SHAPE, seed=seed) - 20)
    m = torch.tanh(values(*SHAPE, seed=seed + 1)) * v.sqrt()
    m[:, 7::9], v[3, 5:60] = 0, 0
    m[3, 5:60] = 0
    return m, v


def limit(m, second):
    """Largest error of a first moment that is encoded once relative to `second`: half the distance of the two
    largest codes, 1 - (126 / 127)^(3/2), of the group's largest ratio, whose scale is off by 2^-13."""
    roots = Encoded(LOG, second.pieces[0].storage).roots()
    u = F.pad((m.reshape(-1) / roots).nan_to_num(0.0, 0.0, 0.0), (0, -m.numel() % GROUP)).view(-1, GROUP)
    largest = u.abs().amax(1).repeat_interleave(GROUP)[: m.numel()]
    return (largest * roots * (0.5 * (1 - (126 / 127) ** 1.5) + 2**-12)).view(m.shape)


# several writes: each re-encodes the groups, and between two of them a group may be half zeros,
# with ratios that are large
TIMES = {"rows": 7 * 8}


def stored_of(*moments):
    return [t.clone() for moment in moments for piece in moment.pieces for t in piece.storage]


def equal(a, b):
    return all(map(torch.equal, a, b))


def test_pair_stores_both_moments_within_their_bounds():
    m, v = some_pair()
    first, second = pair_of(m, v)
    assert ((first.decode() - m).abs() <= limit(m, second)).all()
    alone = encoded(v, LOG)
    assert torch.equal(second.decode(), alone.decode())
    held = sum(piece.storage.nbytes for moment in pair_of(*some_pair()) for piece in moment.pieces)
    # two codes, and nine bytes for each of six groups
    assert held == 2 * 700 + 9 * 6
    assert first.has_relative_codes and "ratio8" in repr(first)


@pytest.mark.parametrize("write", WRITES)
def test_pair_write_of_the_second_moment_keeps_the_first(write):
    m, v = some_pair()
    first, second = pair_of(m, v)
    alone, before, codes = encoded(v, LOG), first.decode(), stored_of(first)
    old = stored_of(second)
    WRITES[write](second)
    WRITES[write](alone)
    assert equal(stored_of(second), stored_of(alone))
    assert ((first.decode() - before).abs() <= TIMES.get(write, 1) * limit(before, second)).all()
    # groups of a second moment that stayed keep the codes of the first
    changed = torch.zeros(NUMEL, dtype=torch.bool)
    changed |= second.pieces[0].storage.codes != old[0]
    for new, was in zip(second.pieces[0].storage[1:], old[1:], strict=True):
        changed |= (new != was).repeat_interleave(GROUP)[:NUMEL]
    changed = F.pad(changed, (0, -NUMEL % GROUP)).view(-1, GROUP).any(1).repeat_interleave(GROUP)[:NUMEL]
    assert torch.equal(first.pieces[0].storage.codes[~changed], codes[0][~changed])


@pytest.mark.parametrize("write", sorted(WRITES))
def test_pair_write_of_the_first_moment_keeps_the_second(write):
    first, second = pair_of(*some_pair())
    plain, kept = first.decode(), stored_of(second)
    WRITES[write](plain)
    WRITES[write](first)
    assert equal(stored_of(second), kept)
    assert ((first.decode() - plain).abs() <= TIMES.get(write, 1) * limit(plain, second)).all()


def test_pair_keeps_the_first_moment_beside_odd_second_ones():
    """Reset to zero, NaN, negative, huge or tiny: what is stored of the first is what it was."""
    for odd in (0.0, torch.nan, -1.0, torch.inf, 3e38, 1e-45):
        for where in (slice(None), slice(2, 5)):
            first, second = pair_of(*some_pair())
            before = first.decode()
            second[where] = odd
            assert ((first.decode() - before).abs() <= limit(before, second) + 1e-38).all(), odd


def test_pair_shows_non_finite_values_in_their_moment_alone():
    m, v = some_pair()
    m[0, 0], m[0, 1], v[2, 2] = torch.nan, torch.inf, torch.nan
    first, second = pair_of(m, v)
    assert first.decode().isnan().nonzero().tolist() == [[0, 0], [0, 1]]
    assert second.decode().isnan().nonzero().tolist() == [[2, 2]]


@pytest.mark.parametrize(
    "make",
    [
        torch.clone,
        copy.deepcopy,
        lambda m: m.to("cpu", copy=True),
        lambda m: torch.empty_like(m).copy_(m),
        lambda m: torch.zeros_like(m).copy_(m),
    ],
    ids=["clone", "deepcopy", "to", "empty_like-copy", "zeros_like-copy"],
)
def test_pair_copies_are_exact_and_independent(make):
    """As hosts make them to offload states: one at a time, and back one at a time."""
    first, second = pair_of(*some_pair())
    expected, codes = (first.decode(), second.decode()), stored_of(first, second)
    made = make(first), make(second)
    second.mul_(7)
    first.zero_()
    assert torch.equal(made[0].decode(), expected[0]) and torch.equal(made[1].decode(), expected[1])
    assert all(isinstance(x, Moment) for x in made)
    again = paired(*made)
    assert equal(stored_of(*again), codes)
    again[1].mul_(3)
    assert ((again[0].decode() - expected[0]).abs() <= limit(expected[0], again[1])).all()
    # who still holds a copy sees what became of it
    assert torch.equal(made[0].decode(), again[0].decode())


def test_pair_copy_of_zeros():
    first, _ = pair_of(*some_pair())
    assert not torch.zeros_like(first).decode().any()
    taken = torch.zeros_like(first).copy_(torch.ones(SHAPE))
    # relative to nothing, the largest is 1 except for its scale
    torch.testing.assert_close(taken.decode(), torch.ones(SHAPE), rtol=2**-12, atol=0)


def test_pair_copy_into_the_first_keeps_the_second():
    source, target = pair_of(*some_pair()), pair_of(*some_pair(seed=5))
    kept = stored_of(target[1])
    target[0].copy_(source[0])
    assert equal(stored_of(target[1]), kept)
    wanted = source[0].decode()
    assert ((target[0].decode() - wanted).abs() <= limit(wanted, target[1])).all()
    # a second moment takes the codes as they are, and the first keeps what it was given
    given = target[0].decode()
    target[1].copy_(source[1])
    assert equal(stored_of(target[1]), stored_of(source[1]))
    assert ((target[0].decode() - given).abs() <= limit(given, target[1])).all()


def test_pair_of_several_formats():
    numel = 2000
    v = torch.exp(values(numel))
    layouts = [((0, codec), (300, EXACT), (400, codec)) for codec in (RATIO, LOG)]
    first, second = pair_of(values(numel), v, layouts)
    before = first.decode()
    second[250:1500] *= 9
    torch.testing.assert_close(first.decode(), before, rtol=0.02, atol=0.02 * v.max().sqrt().item())
    assert torch.equal(first.decode()[300:400], before[300:400])
    assert torch.equal(second.with_layout(RATIO_TO := ((0, LOG),)).decode().isnan(), torch.zeros(numel) > 0)
    other = second.with_layout(RATIO_TO)
    moved = first.with_layout(((0, RATIO),), second=other)
    torch.testing.assert_close(moved.decode(), first.decode(), rtol=0.02, atol=0.02 * v.max().sqrt().item())


def trained(steps=3, numel=1000, **options):
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(numel))
    optimizer = CoatAdamW([p], **{**FORMATS, **options})
    for _ in range(steps):
        p.grad = torch.randn(numel) * torch.exp(torch.randn(numel) - 8)
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("names", [MOMENTS, MOMENTS[::-1], MOMENTS[:1], MOMENTS[1:]], ids=str)
@pytest.mark.parametrize("kind", ["plain", "clone", "elsewhere"])
def test_pair_of_moments_that_a_framework_put_into_the_state(names, kind):
    """Both, in any order, or one; for FP32 tensors, for copies, or for another parameter's."""
    p, optimizer = trained()
    other, others = trained(steps=2)
    wanted = dict(zip(MOMENTS, optimizer.moments(p), strict=True))
    codes = stored_of(*(optimizer.state[p][name] for name in MOMENTS))
    for name in names:
        if kind == "plain":
            optimizer.state[p][name] = wanted[name].clone()
        elif kind == "clone":
            optimizer.state[p][name] = optimizer.state[p][name].to("cpu", copy=True)
        else:
            wanted[name] = others.state[other][name].decode()
            optimizer.state[p][name] = others.state[other][name].clone()
    optimizer.init_states()
    first, second = (optimizer.state[p][name] for name in MOMENTS)
    assert first.pair is second.pair and first.pair.shared
    if kind != "elsewhere":
        assert equal(stored_of(first, second), codes)
    assert torch.equal(second.decode(), wanted["exp_avg_sq"])
    assert ((first.decode() - wanted["exp_avg"]).abs() <= limit(wanted["exp_avg"], second)).all()
    # and they are a pair: writing one leaves the other
    kept = first.decode()
    second.mul_(4)
    assert ((first.decode() - kept).abs() <= limit(kept, second)).all()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.isfinite().all()


def test_pair_views_see_an_exchanged_moment():
    """DeepSpeed links parameters with narrow views of the flat states, and keeps them."""
    p, optimizer = trained()
    views = {name: optimizer.state[p][name].narrow(0, 100, 50) for name in MOMENTS}
    optimizer.state[p]["exp_avg_sq"] = optimizer.moments(p)[1] * 9
    optimizer.init_states()
    first = optimizer.state[p]["exp_avg"]
    assert torch.equal(views["exp_avg"].decode(), first.decode()[100:150])
    views["exp_avg"].zero_()
    assert not first.decode()[100:150].any()
    p, optimizer = trained()
    views = {name: optimizer.state[p][name].narrow(0, 100, 50) for name in MOMENTS}
    taken, given = optimizer.state[p]["exp_avg"], optimizer.moments(p)[0] + 1e-6
    was = taken.decode()
    optimizer.state[p]["exp_avg"] = given
    optimizer.init_states()
    bound = limit(given, optimizer.state[p]["exp_avg_sq"])
    views["exp_avg_sq"].mul_(100)
    first, second = (optimizer.state[p][name] for name in MOMENTS)
    assert torch.equal(second.decode()[100:150], views["exp_avg_sq"].decode())
    assert ((first.decode() - given).abs() <= bound + limit(given, second)).all()
    # what was taken out stays what it was, and may come back
    assert (taken.decode() - was).abs().max() < 0.02 * was.abs().max()
    optimizer.state[p]["exp_avg"] = taken
    optimizer.init_states()
    assert (optimizer.moments(p)[0] - was).abs().max() < 0.02 * was.abs().max()


def test_pair_ends_with_a_format_that_is_not_relative():
    p, optimizer = trained()
    second = optimizer.moments(p)[1]
    other = CoatAdamW([p], **{**FORMATS, "exp_avg_format": "fp8_expanded"})
    other.load_state_dict(optimizer.state_dict())
    state = other.state[p]
    assert state["exp_avg"].pieces[0].codec.name == "fp8_expanded" and state["exp_avg_sq"].pair is None
    assert torch.equal(other.moments(p)[1], second)
    _, held = pair_of(*some_pair())
    _, alone = paired(Moment.zeros(SHAPE, EXACT, "cpu"), held)
    assert alone.pair is None and alone.pieces is held.pieces


@pytest.mark.parametrize("layout", ["stock", "compressed"])
def test_pair_is_joined_by_load_state_dict(layout):
    p, optimizer = trained(checkpoint_layout=layout)
    optimizer.load_state_dict(optimizer.state_dict())
    first, second = (optimizer.state[p][name] for name in MOMENTS)
    before = first.decode()
    second.mul_(4)
    # re-encoded, it keeps its values except for a rounding
    torch.testing.assert_close(first.decode(), before, rtol=0.1, atol=1e-6)


def test_pair_first_moment_alone_in_a_file():
    first, second = pair_of(*some_pair())
    file = io.BytesIO()
    torch.save(StoredMoment(first.pieces, first.shape, pair=first.pair), file)
    second.mul_(2)
    expected = pair_of(*some_pair())[0].decode()
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True).decode(), expected)


def test_exp_avg_format_follows_exp_avg_sq_format():
    p = torch.nn.Parameter(torch.zeros(8))
    for second, first in (("log8", "ratio8"), ("fp8_expanded", "fp8_expanded"), ("fp32", "fp8_expanded")):
        optimizer = CoatAdamW([p], exp_avg_sq_format=second, min_numel=0)
        optimizer.init_states()
        assert optimizer.state[p]["exp_avg"].pieces[0].codec.name == first


@pytest.mark.parametrize("numel", [20 * 128, 20 * 128 + 45])
def test_states_are_made_and_arranged_part_by_part(numel, monkeypatch):
    """A partition of 7B parameters in FP32 is larger than the memory that is left."""
    monkeypatch.setattr(codec, "AT_ONCE", 256)
    monkeypatch.setattr("coat_ds.optim.moment.AT_ONCE", 256)
    p = torch.nn.Parameter(values(numel, seed=0))
    optimizer = CoatAdamW([p], lr=1e-3, min_numel=0)
    borders = (((0, numel),), ((0, 1300), (1300, numel)))
    with Made() as made:
        optimizer.set_fragments([(p, _fragments(borders[0]), 0)])
    assert made.over(256) == {torch.uint8: 1, torch.int8: 1}
    for seed in range(3):
        p.grad = values(numel, seed=seed)
        optimizer.step()
    before, saved = optimizer.moments(p), optimizer.state_dict()
    codes = stored_of(*(optimizer.state[p][name] for name in MOMENTS))
    for loaded in (saved, {name: value for name, value in saved.items() if name != "coat"}):
        resumed = CoatAdamW([p], lr=1e-3, min_numel=0)
        resumed.set_fragments([(p, _fragments(borders[0]), 0)])
        with Made() as made:
            resumed.load_state_dict(loaded)
        assert made.over(256 + 128) == {torch.uint8: 1, torch.int8: 1}
        assert equal(codes, stored_of(*(resumed.state[p][name] for name in MOMENTS)))
    with Made() as made:
        optimizer.set_fragments([(p, _fragments(borders[1]), 0)])
    assert made.over(256 + 2 * 128) == {torch.uint8: 2, torch.int8: 2}
    for name, old, new in zip(MOMENTS, before, optimizer.moments(p), strict=True):
        # groups that another border cuts are re-encoded: off by half the distance of two codes at most
        error = ((new - old).abs().max() / old.abs().max()).item()
        assert error < {"exp_avg": 0.5 * (1 - (126 / 127) ** 1.5) + 2**-12, "exp_avg_sq": 0.05}[name]
        assert len(optimizer.state[p][name].pieces) == 2


def _fragments(borders):
    return [Fragment(first, last - first, 0, False) for first, last in borders]
