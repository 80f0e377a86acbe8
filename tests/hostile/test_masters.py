"""BF16 weights with every possible remainder, including edited weights."""

from tests.hostile.conftest import EXAMPLES
from tests.kernels.masters import assert_pairs_are_right, pairs


def test_every_pair_of_weight_and_remainder():
    """All 2^32 pairs if the number of inputs is at least that of weights, else some of them."""
    step = max(1, 2**16 // EXAMPLES)
    for first in range(0, 2**16, 32 * step):
        # neighbouring weights, and distant ones: any two differ in sign, exponent or fraction
        assert_pairs_are_right(*pairs(first, 32, "cpu"), by_kernel=False)
