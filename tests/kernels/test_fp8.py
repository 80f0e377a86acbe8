import pytest
import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import E4M3, E5M2, cast, from_fp8, round_to_fp8, to_fp8


@triton.jit
def round_trip_kernel(p_x, p_codes, p_values, p_bf16, n, E5M2: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o, mask=o < n, other=0.0)
    tl.store(p_codes + o, to_fp8(b_x, E5M2), mask=o < n)
    b_codes = tl.load(p_codes + o, mask=o < n, other=0)
    tl.store(p_values + o, from_fp8(b_codes, E5M2), mask=o < n)
    tl.store(p_bf16 + o, cast(b_x, tl.bfloat16), mask=o < n)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_fp8_kernel_rounds_as_the_reference(fmt, device):
    every_code = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    every_code = every_code[every_code.isfinite()]
    ties = (every_code.sort().values[:-1] + every_code.sort().values[1:]) / 2
    spread = torch.randn(3000) * torch.exp2(torch.randint(-20, 9, (3000,)).float())
    special = torch.tensor(
        [torch.nan, -torch.nan, 0.0, -0.0, fmt.max, -fmt.max, fmt.tiny / 2, fmt.tiny * 0.51]
    )
    x = torch.cat((every_code, ties, spread.clamp(-fmt.max, fmt.max), special)).to(device)
    codes = torch.zeros(x.numel(), dtype=torch.uint8, device=device)
    values, bf16 = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bfloat16)
    round_trip_kernel[(1,)](x, codes, values, bf16, x.numel(), E5M2=fmt.is_e5m2, BLOCK=4096)
    expected = round_to_fp8(x, fmt).float()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(codes.view(fmt.dtype).float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(bf16, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_fp8_rounding_saturates_and_shows_what_is_not_finite():
    x = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan])
    for fmt in (E4M3, E5M2):
        rounded = round_to_fp8(x, fmt).float()
        assert rounded[:2].tolist() == [fmt.max, -fmt.max]
        assert rounded[2:].isnan().all()
