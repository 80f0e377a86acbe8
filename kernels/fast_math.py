"""One-instruction log2, exp2, square root and reciprocal of FP32 values.

Their relative errors, about 2^-22, are far below half a step of any 8-bit format. Unlike Triton's own log2
and division, they neither branch nor refine. Subnormal inputs and results count as zero. The interpreter
cannot run PTX and uses the exact functions.
"""

import triton
import triton.language as tl

from coat_kernels.fp8 import INTERPRET


@triton.jit
def fast_log2(x):
    if INTERPRET:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def fast_exp2(x):
    if INTERPRET:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def fast_reciprocal(x):
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def fast_sqrt(x):
    if INTERPRET:
        return tl.sqrt(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def saturate(x):
    """Clamps to [0, 1]; fused into a preceding addition, it costs nothing."""
    if INTERPRET:
        return tl.minimum(tl.maximum(x, 0.0), 1.0)
    return tl.inline_asm_elementwise("cvt.sat.f32.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def with_sign_of(b_abs, b_x):
    """The magnitudes `b_abs`, whose sign bits are 0, with the signs of `b_x`: one bit operation."""
    b_sign = b_x.to(tl.int32, bitcast=True) & -2147483648
    return (b_abs.to(tl.int32, bitcast=True) | b_sign).to(tl.float32, bitcast=True)
