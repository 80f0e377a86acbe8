"""Random models stay within their bounds, and an inserted fault is found."""

import pytest

from tests import random_models


# fused blocks with padding; recomputed attention and a cache; LayerNorm and activation checkpointing
@pytest.mark.parametrize("seed", [4, 39, 27])
def test_a_case_is_within_its_bounds(seed, capsys):
    assert random_models.main(["--seconds", "0", "--seed", str(seed)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 models are within their bounds"
