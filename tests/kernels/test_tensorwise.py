"""FP8 with one scale per tensor: kernels against references, scales, operators."""

import pytest
import torch

from coat_kernels import tensorwise
from coat_kernels.autograd.origin import with_maxima
from coat_kernels.fp8 import E4M3, E5M2
from tests.kernels.inputs import SHAPES, check_sums, hard, wide
from tests.util import rel_rms

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensorwise_kernel_equals_the_reference_bit_for_bit(dtype, shape, fmt, device):
    for i, x in enumerate((wide(*shape), *(v.view(*shape) for v in hard(shape[0] * shape[1]).values()))):
        x = x.to(device, dtype)
        maxima = tensorwise.scale.maxima_triton(x)
        assert maxima.amax() == tensorwise.scale.maxima_reference(x).amax()
        amax = tensorwise.tensor_amax(with_maxima(x, maxima))
        expected = tensorwise.quantize.quantize_tensor_reference(x, amax, fmt, columns=True)
        for rows in (True, False) if i == 0 else (True,):
            actual = tensorwise.quantize.quantize_tensor_triton(x, amax, fmt, rows, columns=True)
            for a, e in zip(actual, expected, strict=True):
                if a is not None:
                    torch.testing.assert_close(a.float(), e.float(), rtol=0, atol=0, equal_nan=True)
        assert expected[1].shape == (shape[1], -(-shape[0] // 16) * 16)


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensorwise_sums_of_columns(dtype, shape, device):
    quantizers = tensorwise.quantize.quantize_tensor_reference, tensorwise.quantize.quantize_tensor_triton
    x = wide(*shape)
    for i, vector in enumerate(hard(shape[1]).values()):
        x[3 * i : 3 * i + 1] = vector
    x = x.to(device, dtype)
    amax = tensorwise.tensor_amax(x)
    for layouts in ((True, False), (False, True), (True, True)):
        for quantize in quantizers:
            *codes, sums = quantize(x, amax, E5M2, *layouts, sums=True)
            check_sums(sums, x)
            for a, e in zip(codes, quantize(x, amax, E5M2, *layouts), strict=False):
                assert a is e is None or a.view(torch.uint8).equal(e.view(torch.uint8))
    nothing = torch.empty(0, 4, device=device)
    for quantize in quantizers:
        assert quantize(nothing, amax, E5M2, sums=True).sums.equal(torch.zeros(4, device=device))


@FORMATS
@pytest.mark.parametrize("layouts", [(True, False), (False, True), (True, True)], ids=str)
def test_tensorwise_maxima_decide_as_their_largest(layouts, fmt, device):
    """The number of maxima is what a program reads at a time, fewer, or more."""
    x = wide(20, 48).to(device)
    amax = tensorwise.tensor_amax(x)
    for count in (1, 7, 4096, 4097, 10000):
        maxima = torch.rand(count, device=device) * amax
        maxima[count // 2] = maxima[-1] = amax
        for found in (None, torch.empty(1, device=device)):
            actual = tensorwise.quantize.quantize_tensor_triton(x, maxima, fmt, *layouts, amax=found)
            assert found is None or found.equal(amax)
            expected = tensorwise.quantize.quantize_tensor_reference(x, amax, fmt, *layouts)
            for a, e in zip(actual, expected, strict=True):
                assert a is e is None or a.float().equal(e.float())


@pytest.mark.parametrize(
    "quantize", [tensorwise.quantize.quantize_tensor_reference, tensorwise.quantize.quantize_tensor_triton]
)
def test_tensorwise_scale_of_zeros_and_of_what_is_not_finite(quantize, device):
    for empty in (torch.zeros(4, 4, device=device), torch.zeros(0, 4, device=device)):
        assert quantize(empty, tensorwise.tensor_amax(empty), E4M3).scale == 1
    x = torch.tensor([[2.0, torch.inf], [torch.nan, -1.0]], device=device)
    codes, _, scale, _ = quantize(x, tensorwise.tensor_amax(x), E4M3)
    # the largest finite element, 2, maps to the format's largest magnitude, 448
    assert scale == torch.tensor(2 / 448, dtype=torch.float32)
    assert codes.float().isnan().equal(~x.isfinite()) and codes.float()[0, 0] == 448
    tiny = torch.full((4, 4), 1e-45, device=device)
    smallest = 8 / 7 * tiny.new_tensor(2.0**-126)
    assert quantize(tiny, tensorwise.tensor_amax(tiny), E4M3).scale == smallest


@pytest.mark.parametrize("step, fmt", [(1, E4M3), (4, E5M2)], ids=["e4m3", "e5m2"])
def test_tensorwise_scales_are_the_smallest_of_their_steps_that_suffice(step, fmt, device):
    powers = torch.arange(-149, 128).float().exp2()
    amax = torch.cat((powers, 1.75 * powers, powers.nextafter(torch.tensor(torch.inf))))
    amax = amax[amax.isfinite()]
    scale = torch.cat([tensorwise.scale.tensor_scale_reference(x[None], fmt) for x in amax])
    _, power = torch.frexp(scale)
    e = power - 1
    assert scale.equal(torch.ldexp(torch.full_like(scale, 8 / 7), e))
    assert ((e % step == 0) | (e == -126)).all() and (e >= -126).all() and (e <= 126).all()
    # scales are rounded to FP32
    most = fmt.max * scale.double() * (1 + 2**-24)
    assert (amax.double() <= most).all()
    # a scale smaller by one step would overflow
    assert ((amax.double() > most / 2**step) | (e - step < -126)).all()
    for x, expected in zip(amax[::17], scale[::17], strict=True):
        x = x.reshape(1, 1).to(device)
        assert tensorwise.quantize.quantize_tensor_triton(x, x[0], fmt).scale == expected


def test_tensorwise_bf16_values_lie_between_codes_no_more_often_than_by_chance(device):
    """With a scale that is a power of two, one BF16 value in 16 would lie half way between two codes, which
    makes the error 1.004 times that of FP32 values."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(device)

    def error(x):
        codes, _, scale = tensorwise.quantize_tensor(x[None], tensorwise.tensor_amax(x), E4M3)[:3]
        return rel_rms(codes.float() * scale, x[None].float())

    # the standard error of each error over 2^20 elements is about 0.0007 of it
    assert error(x.bfloat16()) < 1.002 * error(x)


def test_tensorwise_operators_pass_opcheck(device):
    x = torch.randn(20, 48, device=device)
    torch.library.opcheck(tensorwise.scale.compute_amax.op, (x,))
    for wanted in ((True, False, False), (False, True, False), (True, True, False), (True, False, True)):
        torch.library.opcheck(
            tensorwise.quantize.quantize_codes.op, (x, x.abs().max()[None], "e5m2", *wanted)
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensorwise_transposed_codes(shape, device):
    codes = torch.randint(0, 255, shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    expected = tensorwise.transpose.transpose_codes_reference(codes).view(torch.uint8)
    assert expected[:, : shape[0]].equal(codes.view(torch.uint8).t()) and not expected[:, shape[0] :].any()
    assert tensorwise.transpose.transpose_codes_triton(codes).view(torch.uint8).equal(expected)
