"""What the log says of states, where a script makes a CoatAdamW itself. Of engines: test_host_config.py;
of Megatron: megatron_ext/test_options.py."""

import pytest
import torch

from coat_ds import CoatAdamW, state_bytes
from tests.coat_ds.optimizers import FP32, parameters, set_grads

# the paper's formats and today's default ones
OLD = {"exp_avg_sq_format": "fp8_expanded", "betas": (0.9, 0.95)}
NEW = {"betas": (0.9, 0.95)}


def stepped(optimizer, params):
    for seed in range(2):
        set_grads(params, seed)
        optimizer.step()
    return optimizer


@pytest.fixture
def lines(caplog):
    """Lines of the optimizer, of at least INFO, with their levels."""
    caplog.set_level("INFO", "coat_ds.optim.lines")

    def taken():
        found = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "coat_ds.optim.lines"]
        caplog.clear()
        return found

    return taken


def test_the_constructor_says_how_states_are_stored(lines):
    params = parameters()
    for betas, rounded in (((0.9, 0.95), "to nearest"), ((0.9, 0.999), "stochastically")):
        optimizer = CoatAdamW(params, min_numel=100, betas=betas)
        ((level, line),) = lines()
        optimizer.init_states()
        held = state_bytes(optimizer)
        assert level == "INFO" and f"{held['bytes_per_parameter']:.3f} bytes per parameter" in line
        sizes = held["by_codec"]
        assert (
            f"({sizes['fp32']:,} in fp32, {sizes['log8']:,} in log8, {sizes['ratio8']:,} in ratio8)" in line
        )
        assert line.endswith(f"), exp_avg_sq rounded {rounded}")
    # of the groups one dithers
    halves = [{"params": params[:4], "betas": (0.9, 0.95)}, {"params": params[4:]}]
    CoatAdamW(halves, min_numel=100)
    assert lines()[0][1].endswith("exp_avg_sq rounded to nearest or stochastically, by group")
    # nothing is rounded
    CoatAdamW(params, **FP32)
    assert lines()[0][1].endswith(" in fp32)")
    narrow = parameters(torch.bfloat16)
    optimizer = CoatAdamW(narrow, min_numel=100)
    optimizer.init_states()
    assert f"{state_bytes(optimizer)['by_codec']['int16']:,} in int16" in lines()[0][1]


def test_second_moments_that_stall_are_named_once(lines):
    for options, way_out in (
        ({"exp_avg_sq_format": "fp8_expanded"}, "exp_avg_sq_format to 'log8'"),
        ({"exp_avg_sq_format": "fp8"}, "exp_avg_sq_format to 'log8'"),
        ({"exp_avg_sq_rounding": "nearest"}, "exp_avg_sq_rounding to 'stochastic'"),
    ):
        params = parameters()
        optimizer = CoatAdamW(params, min_numel=100, betas=(0.9, 0.999), **options)
        stepped(optimizer, params)
        (line,) = [line for level, line in lines() if level == "WARNING"]
        assert line.startswith("CoatAdamW: exp_avg_sq_format: found ") and f"Set {way_out}," in line
        assert "beside beta2 0.999" in line
    for options in (OLD, NEW, {}, FP32, {"exp_avg_sq_format": "fp8", "min_numel": 10**6}):
        CoatAdamW(parameters(), **{"min_numel": 100, **options})
        assert [level for level, _ in lines()] == ["INFO"]
