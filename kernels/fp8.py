"""The two 8-bit floating-point formats, and how values are rounded to them.

Every quantizer of this package follows these rules:
- rounding is to nearest, ties to even, and saturates at the format's largest magnitude;
- scales come from the finite values only, and a NaN or an infinity is stored as NaN, so it stays visible and
  does not change its neighbours;
- zero is stored as zero.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """An 8-bit floating-point format: `max` is its largest magnitude, `tiny` its smallest non-zero one."""

    name: str
    dtype: torch.dtype
    max: float
    tiny: float

    @property
    def is_e5m2(self) -> bool:
        """The flag that selects the format in the Triton kernels."""
        return self.dtype == torch.float8_e5m2


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16)


def fp8_format(name: str) -> Fp8Format:
    """The format called `name`. Raises ValueError for an unknown one."""
    for known in (E4M3, E5M2):
        if known.name == name:
            return known
    raise ValueError(f"FP8 format: expected 'e4m3' or 'e5m2', found {name!r}")


def round_to_fp8(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """`x` (FP32, any shape) as `fmt.dtype`: nearest even, saturating; NaN and infinities become NaN."""
    finite = torch.where(x.isfinite(), x, torch.nan)
    return finite.clamp(-fmt.max, fmt.max).to(fmt.dtype)


@triton.jit
def to_fp8(b_x, E5M2: tl.constexpr):
    """FP32 values as codes (uint8), saturating as the conversion instruction does; NaN stays NaN."""
    if INTERPRET:
        MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
        b_x = tl.where(b_x == b_x, tl.minimum(tl.maximum(b_x, -MAX), MAX), b_x)
        # the interpreter truncates and loses NaN, so the bits are rounded here
        MANTISSA: tl.constexpr = 2 if E5M2 else 3
        BIAS: tl.constexpr = 15 if E5M2 else 7
        SHIFT: tl.constexpr = 23 - MANTISSA
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_abs = b_bits & 0x7FFFFFFF
        b_normal = b_abs + ((1 << (SHIFT - 1)) - 1) + ((b_abs >> SHIFT) & 1)
        b_normal = (b_normal >> SHIFT) - ((127 - BIAS) << MANTISSA)
        # adding 2^23 rounds to an integer number of subnormal steps, to nearest even
        b_steps = tl.abs(b_x) * float(2 ** (BIAS - 1 + MANTISSA)) + 8388608.0
        b_code = tl.where(b_abs < ((128 - BIAS) << 23), b_steps.to(tl.int32, bitcast=True) & 0xFF, b_normal)
        b_code = tl.where(b_x == b_x, b_code | ((b_bits >> 24) & 0x80), 0x7F)
        return b_code.to(tl.uint8)
    if E5M2:
        return b_x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return b_x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def to_fp8_words(b_x, E5M2: tl.constexpr):
    """`to_fp8` as int32, for shifting into words of four codes. triton 3.6 generates wrong code if codes are
    widened and then shifted, or used twice."""
    if INTERPRET:
        return to_fp8(b_x, E5M2).to(tl.int32)
    PAIR: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
    CONVERT: tl.constexpr = "cvt.rn.satfinite." + PAIR + ".f32 t, 0f00000000, $1; "
    PTX: tl.constexpr = "{.reg .b16 t; " + CONVERT + "cvt.u32.u16 $0, t;}"
    return tl.inline_asm_elementwise(PTX, "=r,f", [b_x], tl.int32, True, 1)


@triton.jit
def from_fp8(b_codes, E5M2: tl.constexpr):
    """Codes (uint8) as FP32 values."""
    if INTERPRET:
        b_code = b_codes.to(tl.int32)
        b_abs = b_code & 0x7F
        if E5M2:
            b_x = (b_abs << 21).to(tl.float32, bitcast=True) * float(2.0**112)
            b_x = tl.where(b_abs >= 0x7C, float("nan"), b_x)
        else:
            b_x = (b_abs << 20).to(tl.float32, bitcast=True) * float(2.0**120)
            b_x = tl.where(b_abs == 0x7F, float("nan"), b_x)
        return tl.where(b_code >= 0x80, -b_x, b_x)
    if E5M2:
        return b_codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    return b_codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def cast(b_x, DTYPE: tl.constexpr):
    """FP32 values in the stored floating-point type; the interpreter would truncate to BF16."""
    if INTERPRET and DTYPE == tl.bfloat16:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_rounded = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        return tl.where(b_x == b_x, b_rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return b_x.to(DTYPE)


@triton.jit
def round_to(b_x, DTYPE: tl.constexpr):
    """FP32 values, rounded as `cast` would store them."""
    if DTYPE == tl.float32:
        return b_x
    if INTERPRET or DTYPE != tl.bfloat16:
        return widen(cast(b_x, DTYPE))
    # two at a time: a single conversion occupies the pipeline of the transcendental functions
    return tl.inline_asm_elementwise(
        "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;}",
        "=f,=f,f,f",
        [b_x],
        tl.float32,
        True,
        2,
    )


@triton.jit
def finite_or_nan(b_x):
    """FP32 values with infinities as NaN: multiplying by zero takes one instruction."""
    return b_x + b_x * 0.0


@triton.jit
def widen(b_x):
    """Any floating-point values as FP32; the interpreter's conversion would corrupt subnormal BF16."""
    if INTERPRET and b_x.dtype == tl.bfloat16:
        return (b_x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return b_x.to(tl.float32)


# FP8 GEMMs sum over multiples of 16 elements
ALIGNMENT = 16
