"""FP8 in groups: kernels against references, errors, extremes."""

import pytest
import torch

from coat_kernels import groups
from coat_kernels.fp8 import E4M3, E5M2
from tests.kernels.inputs import E4M3_RMS, E5M2_RMS, SHAPES, hard, wide
from tests.util import rel_rms

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group_size", [16, 32])
def test_group_kernel_equals_the_reference_bit_for_bit(shape, group_size, fmt, device):
    for x in (wide(*shape), *(v.view(1, -1) for v in hard(shape[0] * shape[1]).values())):
        x = x.to(device).bfloat16()
        expected = groups.quantize_groups_reference(x, group_size, fmt)
        actual = groups.quantize_groups_triton(x, group_size, fmt)
        assert actual.exponent.equal(expected.exponent)
        a, e = actual.codes.float(), expected.codes.float()
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
        values = groups.dequantize_groups_triton(expected, group_size)
        reference = groups.dequantize_groups_reference(expected, group_size)
        torch.testing.assert_close(values, reference, rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_group_error_and_extremes(fmt):
    x = wide(64, 256)
    decoded = groups.dequantize_groups_reference(groups.quantize_groups_reference(x, 16, fmt), 16)
    bound = E4M3_RMS if fmt is E4M3 else E5M2_RMS
    # a few largest values dominate a log-normal sample: the mean over the binade is not reached
    assert 0.5 * bound < rel_rms(decoded, x) < 1.3 * bound
    x = torch.tensor([[3e38, 1.0, -3e38] + [0.0] * 13, [torch.inf, torch.nan, 2.0] + [0.0] * 13])
    decoded = groups.dequantize_groups_reference(groups.quantize_groups_reference(x, 16, fmt), 16)
    assert (
        rel_rms(decoded[0, :1], x[0, :1]) <= (2**-4 if fmt is E4M3 else 2**-3)
        and decoded[0, 0] == -decoded[0, 2]
    )
    assert decoded[1, :2].isnan().all() and decoded[1, 2] == 2 and (decoded[:, 3:] == 0).all()
