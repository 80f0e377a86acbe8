"""What the log says of states, where a script makes a CoatAdamW itself. Of engines: test_checkpoints.py,
test_host_config.py; of Megatron: megatron_ext/test_optimizer.py."""

import copy
from pathlib import Path

import pytest
import torch

from coat_ds import CoatAdamW
from coat_ds.optim.options import MOMENTS
from tests.coat_ds.optimizers import FP32, parameters, set_grads, through_file

# the paper's formats and today's default ones
OLD = {"exp_avg_sq_format": "fp8_expanded", "betas": (0.9, 0.95)}
NEW = {"betas": (0.9, 0.95)}
AS_OLD = "exp_avg from ratio8 to fp8_expanded and exp_avg_sq from log8 to fp8_expanded in 5 tensors"
AS_NEW = "exp_avg from fp8_expanded to ratio8 and exp_avg_sq from fp8_expanded to log8 in 5 tensors"
FROM_FP32 = "exp_avg from fp32 to ratio8 and exp_avg_sq from fp32 to log8 in 5 tensors"
TO_FP32 = "exp_avg from ratio8 to fp32 and exp_avg_sq from log8 to fp32 in 5 tensors"


def stepped(optimizer, params):
    for seed in range(2):
        set_grads(params, seed)
        optimizer.step()
    return optimizer


def ours(**options):
    params = parameters()
    return stepped(CoatAdamW(params, min_numel=100, **options), params)


def stock(state_dict=None):
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    if state_dict is not None:
        optimizer.load_state_dict(state_dict)
    return stepped(optimizer, params)


@pytest.fixture
def lines(caplog):
    """Lines of the optimizer, of at least INFO, with their levels."""

    def taken():
        found = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "coat_ds"]
        caplog.clear()
        return found

    return taken


def loaded(lines, state_dict, **options):
    """What is logged while a new optimizer loads a state dict, and continues from it."""
    params = parameters()
    optimizer = CoatAdamW(params, min_numel=100, **options)
    lines()
    optimizer.load_state_dict(through_file(state_dict))
    said = lines()
    stepped(optimizer, params)
    assert all(p.isfinite().all() for p in params) and not lines()
    return said


@pytest.mark.parametrize("layout", ["stock", "compressed"])
@pytest.mark.parametrize(
    "before, after, said",
    [(OLD, NEW, AS_NEW), (NEW, OLD, AS_OLD), (NEW, FP32, TO_FP32), (FP32, NEW, FROM_FP32)],
    ids=["old to new", "new to old", "to FP32", "from FP32"],
)
def test_other_formats_are_named(lines, layout, before, after, said, monkeypatch):
    state_dict = ours(**before, checkpoint_layout=layout).state_dict()
    if layout == "compressed":
        monkeypatch.setattr("tests.coat_ds.test_lines.through_file", copy.deepcopy)
    ((level, line),) = loaded(lines, state_dict, **after)
    assert level == "WARNING" and line == f"COAT: moments change their formats in this load: {said}"


@pytest.mark.parametrize("layout", ["stock", "compressed"])
def test_a_file_of_the_papers_formats_loads(lines, layout):
    """The file was written at fda3ef9: three steps of 200 elements, by layout."""
    state_dict = torch.load(Path(__file__).with_name("papers_states.pt"), weights_only=True)[layout]
    moments = []
    for options in (OLD, NEW):
        p = torch.nn.Parameter(torch.zeros(2, 100))
        optimizer = CoatAdamW([p], min_numel=100, **options)
        lines()
        optimizer.load_state_dict(state_dict)
        moments.append(optimizer.moments(p))
        assert optimizer.state[p]["step"] == 3
        if options is OLD:
            assert not lines() and optimizer.take_arrivals() == "2 restored to the bit"
    ((_, line),) = lines()
    assert line.endswith(AS_NEW.replace("5 tensors", "1 tensor"))
    for old, new in zip(*moments, strict=True):
        assert 0 < (old - new).norm() < 0.03 * old.norm()


@pytest.mark.parametrize("layout", ["stock", "compressed"])
def test_a_file_of_todays_formats_loads(lines, layout):
    """The file was written at fda3ef9: three steps of 200 elements, by layout."""
    states = torch.load(Path(__file__).with_name("todays_states.pt"), weights_only=True)
    p = torch.nn.Parameter(torch.zeros(2, 100))
    optimizer = CoatAdamW([p], min_numel=100, **NEW)
    lines()
    optimizer.load_state_dict(states[layout])
    assert not lines() and optimizer.take_arrivals() == "2 restored to the bit"
    assert optimizer.state[p]["step"] == 3
    saved = states["stock"]["state"][0]
    for name, moment in zip(MOMENTS, optimizer.moments(p), strict=True):
        # another CPU than the file's decodes the same codes to other bits: on each exp2 is off by up to 1.2
        # roundings (2^-24), 4.8 of a root that is squared; three products after it may be rounded otherwise
        torch.testing.assert_close(moment, saved[name], rtol=2**-21, atol=0, msg=name)
