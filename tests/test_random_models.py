"""Random models stay within their bounds, and an inserted fault is found."""

import pytest

from coat_kernels.blocks import qkv
from coat_kernels.linear import op as linear
from tests import random_models


# fused blocks with padding; recomputed attention and a cache; LayerNorm and activation checkpointing
@pytest.mark.parametrize("seed", [4, 39, 27])
def test_a_case_is_within_its_bounds(seed, capsys):
    assert random_models.main(["--seconds", "0", "--seed", str(seed)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 models are within their bounds"


def larger(function):
    """Its first result is a tenth too large."""

    def faulty(*args, **kwargs):
        found = function(*args, **kwargs)
        return (1.1 * found[0], *found[1:]) if isinstance(found, tuple) else 1.1 * found

    return faulty


@pytest.mark.parametrize("module, name", [(linear, "scaled_matmul"), (qkv, "norm_gradients")], ids=str)
def test_a_fault_is_found_with_the_line_that_repeats_it(module, name, monkeypatch, capsys):
    monkeypatch.setattr(module, name, larger(getattr(module, name)))
    assert random_models.main(["--seconds", "0", "--seed", "1"]) == 1
    printed = capsys.readouterr()
    assert "AssertionError" in printed.err
    assert printed.out.splitlines()[-1].endswith("python -m tests.random_models --seconds 0 --seed 1")
