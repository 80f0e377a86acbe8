"""BF16 weights with every remainder that may lie beside them, edited weights among them."""

from tests.hostile.conftest import EXAMPLES
from tests.kernels.test_adamw_masters import assert_pairs_are_right, pairs


def test_every_pair_of_weight_and_remainder():
    """All 2^32 where as many inputs are asked for as there are weights, else some of them."""
    step = max(1, 2**16 // EXAMPLES)
    for first in range(0, 2**16, 32 * step):
        # neighbours, and far apart: any two have another sign, exponent or fraction
        assert_pairs_are_right(*pairs(first, 32, "cpu"), by_kernel=False)
