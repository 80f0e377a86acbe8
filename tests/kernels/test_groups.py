"""8-bit codes in groups: kernels against references, errors, extremes."""

import pytest
import torch

from coat_kernels import groups
from tests.hosts import TEST_ALL
from tests.kernels.agreement import ROUNDING, grouped
from tests.kernels.inputs import SHAPES, hard, wide
from tests.util import rel_rms

FORMATS = pytest.mark.parametrize("fmt", groups.GROUP_FORMATS)


@pytest.mark.pairwise
@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group_size", [16, 32])
def test_group_kernel_equals_the_reference_bit_for_bit(shape, group_size, fmt, device):
    # a row of many tiles takes the interpreter long
    width = shape[0] * shape[1] if TEST_ALL else min(shape[0] * shape[1], 300)
    for x in (wide(*shape), *(v.view(1, -1) for v in hard(width).values())):
        x = x.to(device).bfloat16()
        expected = groups.quantize_groups_reference(x, group_size, fmt)
        actual = groups.kernels.quantize_groups_triton(x, group_size, fmt)
        assert grouped(actual, expected) == 0
        values = groups.kernels.dequantize_groups_triton(expected, group_size)
        reference = groups.reference.dequantize_groups_reference(expected, group_size)
        torch.testing.assert_close(values, reference, rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_group_codes_have_their_error_and_extremes(fmt):
    def decoded(x):
        return groups.reference.dequantize_groups_reference(groups.quantize_groups_reference(x, 16, fmt), 16)

    x = wide(64, 256)
    bound = ROUNDING[fmt]
    # a few largest values dominate a log-normal sample, so the error does not reach the mean over the binade
    assert 0.5 * bound < rel_rms(decoded(x), x) < 1.3 * bound
    x = torch.tensor([[3e38, 1.0, -3e38] + [0.0] * 13, [torch.inf, torch.nan, 2.0] + [0.0] * 13])
    y = decoded(x)
    # half a step of the largest: 2^-4 of it, and of a root of 90 to 127 half of 1, which the square doubles
    assert rel_rms(y[0, :1], x[0, :1]) <= (2**-4 if fmt == "e4m3" else 1 / 90)
    assert y[0, 0] == -y[0, 2]
    # NaN spoils neither its neighbours nor their scale
    assert y[1, :2].isnan().all() and rel_rms(y[1, 2:3], x[1, 2:3]) <= 1 / 90 and (y[:, 3:] == 0).all()


def test_group_roots_keep_a_small_value_beside_an_outlier():
    """Half a step of a root of 127 at 1000 is 1 / 8 at 1: (sqrt(1) + 1 / 8)^2 is 27 % off at most. Linear
    integers would lose the value, since their half step is 1000 / 254."""
    x = torch.cat((torch.tensor([1000.0]), torch.linspace(0.5, 2, 15)))[None]
    y = groups.reference.dequantize_groups_reference(groups.quantize_groups_reference(x, 16, "sqrt8"), 16)
    half_step = 1000**0.5 / 2 / 90
    assert ((y.sqrt() - x.sqrt()).abs() <= half_step).all() and rel_rms(y[:, 1:], x[:, 1:]) < 0.2
