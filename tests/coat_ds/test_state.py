"""With the codec "fp32" a Moment must not be told from a plain tensor; with FP8, not from its values."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_ds.optim.moment import Moment
from coat_kernels.codecs import get_codec
from tests.coat_ds.faithful import assert_faithful
from tests.coat_ds.optimizers import encoded
from tests.coat_ds.writes import SHAPE, WRITES, values

EXACT, FP8 = get_codec("fp32"), get_codec("fp8_expanded")


def fp8_moment(x):
    return encoded(x, FP8)


# writes through these raise
REFUSED = {
    "transpose-in-place": lambda m: m.t_(),
    "resize": lambda m: m.resize_(3, 3),
    "unsqueeze-in-place": lambda m: m.unsqueeze_(0),
    "numpy": lambda m: m.numpy().__setitem__(0, 1.0),
    "expand": lambda m: m[:1].expand(7, 100).mul_(2),
    "data-of-another-shape": lambda m: setattr(m[3], "data", values(8)),
    "column": lambda m: m.__setitem__((slice(None), 3), 0),
    "rows-with-step": lambda m: m.__setitem__(slice(None, None, 2), 0),
    "t": lambda m: m.t().copy_(values(100, 7)),
    "unbind": lambda m: m.unbind(1)[4].zero_(),
    "diagonal": lambda m: m.diagonal().fill_(9),
    "as-strided": lambda m: m.as_strided((3, 4), (200, 2), 1).zero_(),
    "bits": lambda m: m.view(torch.int32)[:, 3].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_moment_writes_arrive_as_in_a_plain_tensor(write):
    plain = values(*SHAPE)
    moment = encoded(plain, EXACT)
    write(moment)
    write(plain)
    assert isinstance(moment, Moment)
    assert torch.equal(moment.decode(), plain)


@pytest.mark.parametrize("write", REFUSED.values(), ids=REFUSED)
def test_moment_refuses_writes_that_would_be_lost(write):
    moment = fp8_moment(values(*SHAPE))
    before = moment.decode()
    with pytest.raises((NotImplementedError, ValueError, RuntimeError)):
        write(moment)
    assert torch.equal(moment.decode(), before) and moment.shape == SHAPE


@pytest.mark.parametrize("name", ["fp8_expanded", "log8", "bf16"])
@pytest.mark.parametrize("write", ["select", "rows", "scatter", "index-put"])
def test_moment_writes_encode_the_groups_that_they_change(write, name):
    """And leave every other one as it is stored, to the bit."""
    codec = get_codec(name)
    moment = encoded(values(*SHAPE).abs(), codec)
    before, codes = moment.decode(), moment.pieces[0].storage.codes.clone()
    exact = before.clone()
    WRITES[write](exact)
    WRITES[write](moment)
    groups = F.pad((exact != before).view(-1), (0, 68)).view(-1, 128).any(1).repeat_interleave(128)[:700]
    whole = encoded(exact, codec).pieces[0].storage.codes
    assert torch.equal(moment.pieces[0].storage.codes, torch.where(groups, whole, codes))


@pytest.mark.parametrize("name", ["fp8_expanded", "log8"])
def test_moment_write_of_what_is_there_changes_nothing(name):
    moment = encoded(values(*SHAPE).abs(), get_codec(name))
    before = [t.clone() for t in moment.stored()]
    for window in (moment, moment[2:5], moment[3, 4:]):
        window.copy_(window.decode())
        window.mul_(1.0)
    assert all(map(torch.equal, moment.stored(), before))


def test_moment_in_place_ops_encode_their_result():
    moment, other = fp8_moment(values(*SHAPE)), values(*SHAPE, seed=1)
    start = moment.decode()
    moment.lerp_(other, 0.1)
    assert torch.equal(moment.decode(), fp8_moment(start.lerp(other, 0.1)).decode())
    assert_faithful(moment.decode(), start.lerp(other, 0.1))


@given(
    numel=st.integers(1, 700),
    data=st.data(),
    codec=st.sampled_from(["fp32", "bf16", "fp8_expanded"]),
)
@settings(max_examples=60, deadline=None)
def test_moment_windows_touch_their_groups_alone(numel, data, codec):
    start = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - start))
    moment = encoded(values(numel), get_codec(codec))
    before, new = moment.decode(), values(length, seed=1)
    window = moment.narrow(0, start, length)
    assert torch.equal(window.decode(), before[start : start + length])
    window.copy_(new)
    first, last = start // 128 * 128, -(-(start + length) // 128) * 128
    expected = before.clone()
    expected[start : start + length] = new
    after = moment.decode()
    if length:
        group = encoded(expected[first:last], get_codec(codec)).decode()
        assert torch.equal(after[first:last], group)
        before[first:last] = group
    assert torch.equal(after, before)


def test_moment_reads_are_reads_of_the_values():
    moment = fp8_moment(values(*SHAPE))
    plain = moment.decode()
    other = values(*SHAPE, seed=3)
    for read in (
        lambda m: m + other,
        lambda m: other - m,
        lambda m: m.sum(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: torch.cat([m, m]),
        lambda m: torch.empty_like(other).copy_(m),
        lambda m: m[3, 4:7],
        lambda m: m.clone(),
        lambda m: m.norm(),
        lambda m: m == other,
        lambda m: torch.tensor(m.tolist()),
        lambda m: torch.from_numpy(m.numpy()),
        lambda m: torch.from_numpy(m.cpu().numpy()),
        lambda m: torch.tensor(m[1, 1].item()),
    ):
        assert torch.equal(torch.as_tensor(read(moment)), read(plain))


@pytest.mark.parametrize(
    "make",
    [
        torch.clone,
        copy.deepcopy,
        torch.empty_like,
        torch.zeros_like,
        lambda m: m.to("cpu", copy=True),
        lambda m: m.detach().clone(),
        lambda m: torch.zeros_like(m, device="cpu"),
    ],
    ids=["clone", "deepcopy", "empty_like", "zeros_like", "to", "detach-clone", "zeros_like-device"],
)
def test_moment_copies_stay_compressed_and_are_copies(make):
    moment = fp8_moment(values(*SHAPE))
    before = moment.decode()
    made = make(moment)
    assert isinstance(made, Moment) and made.shape == moment.shape
    assert made.pieces[0].storage.nbytes == moment.pieces[0].storage.nbytes == 700 + 6 * 5
    assert made.pieces[0].storage.codes.data_ptr() != moment.pieces[0].storage.codes.data_ptr()
    made.fill_(3)
    assert torch.equal(moment.decode(), before)


def test_moment_copy_is_exact():
    source, target = fp8_moment(values(*SHAPE)), Moment.zeros(SHAPE, FP8, "cpu")
    target.copy_(source)
    for a, b in zip(source.pieces[0].storage, target.pieces[0].storage, strict=True):
        assert torch.equal(a, b)
    # the same number of elements, but not the same shape
    with pytest.raises(RuntimeError):
        Moment.zeros(SHAPE[::-1], FP8, "cpu").copy_(source)


def test_moment_pickles_as_a_plain_tensor():
    moment = fp8_moment(values(*SHAPE))
    file = io.BytesIO()
    torch.save({"exp_avg": moment}, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True)["exp_avg"], pickle.loads(pickle.dumps(moment))):
        assert type(loaded) is torch.Tensor
        assert torch.equal(loaded, moment.decode())


def test_moment_refuses_what_would_corrupt():
    moment = fp8_moment(values(*SHAPE))
    with pytest.raises(ValueError, match=r"\(2, 100\).*next step encodes"):
        moment.data = values(2, 100)
    with pytest.raises(RuntimeError):
        moment.view(-1)[:3].copy_(values(4))
    with pytest.raises(RuntimeError):
        moment.view(13, 13)
