"""SwiGLU (Shazeer, arXiv 2002.05202, equation 6) that keeps gate and up in FP8, 1 x G groups.

y = silu(gate) * up, silu(x) = x / (1 + exp(-x)). Neither silu(gate) nor the product is kept: backward
makes them again, and the output carries its origin, so that the projection behind it keeps nothing.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import E4M3, cast, require_fp8
from coat_kernels.groups import (
    Grouped,
    dequantize_groups_reference,
    empty_grouped,
    load_groups,
    quantize_groups_reference,
    store_groups,
)
from coat_kernels.origin import Origin, with_origin

# rows and columns of a program's tile
ROWS, COLUMNS = 4, 256


def swiglu_forward_reference(gate_up: torch.Tensor, group_size: int):
    """gate_up [rows, 2 f] -> (y [rows, f], kept gate, kept up, maxima of parts of y)."""
    gate, up = gate_up.chunk(2, dim=1)
    y = (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)
    maxima = torch.where(y.isfinite(), y.float().abs(), 0).amax(1)
    return y, quantize_groups_reference(gate, group_size), quantize_groups_reference(up, group_size), maxima


def swiglu_rebuild_reference(gate: Grouped, up: Grouped, group_size: int, dtype) -> torch.Tensor:
    """y again, from what is kept."""
    gate, up = (dequantize_groups_reference(q, group_size) for q in (gate, up))
    return (torch.nn.functional.silu(gate) * up).to(dtype)


def swiglu_backward_reference(grad_y, gate: Grouped, up: Grouped, group_size: int) -> torch.Tensor:
    """grad of gate_up [rows, 2 f] in grad_y's dtype."""
    gate, up = (dequantize_groups_reference(q, group_size) for q in (gate, up))
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    grad = grad_y.float()
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((grad_gate, grad * silu), dim=1).to(grad_y.dtype)


@triton.jit
def swiglu_forward_kernel(p_gate_up, p_y, p_gate, p_gate_exponent, p_up, p_up_exponent, p_maxima, rows, f,
                          ROWS: tl.constexpr, COLUMNS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_x = (o_row[:, None] < rows) & (o_f[None, :] < f)
    p_x = p_gate_up + o_row[:, None] * 2 * f + o_f[None, :]
    b_gate = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + f, mask=m_x, other=0.0).to(tl.float32)
    b_y = cast(b_gate * tl.sigmoid(b_gate) * b_up, p_y.dtype.element_ty)
    tl.store(p_y + o_row[:, None] * f + o_f[None, :], b_y, mask=m_x)
    b_abs = tl.abs(b_y.to(tl.float32))
    b_max = tl.max(tl.max(tl.where(b_abs < float("inf"), b_abs, 0.0), axis=1), axis=0)
    tl.store(p_maxima + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), b_max)
    store_groups(b_gate, p_gate, p_gate_exponent, o_row, o_f, m_x, f, False, G)
    store_groups(b_up, p_up, p_up_exponent, o_row, o_f, m_x, f, False, G)


@triton.jit
def swiglu_rebuild_kernel(p_gate, p_gate_exponent, p_up, p_up_exponent, p_y, rows, f,
                          ROWS: tl.constexpr, COLUMNS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_x = (o_row[:, None] < rows) & (o_f[None, :] < f)
    b_gate = load_groups(p_gate, p_gate_exponent, o_row, o_f, m_x, f, False, G)
    b_up = load_groups(p_up, p_up_exponent, o_row, o_f, m_x, f, False, G)
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_y + o_row[:, None] * f + o_f[None, :], cast(b_y, p_y.dtype.element_ty), mask=m_x)


@triton.jit
def swiglu_backward_kernel(p_grad_y, p_gate, p_gate_exponent, p_up, p_up_exponent, p_grad, rows, f,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_x = (o_row[:, None] < rows) & (o_f[None, :] < f)
    b_gate = load_groups(p_gate, p_gate_exponent, o_row, o_f, m_x, f, False, G)
    b_up = load_groups(p_up, p_up_exponent, o_row, o_f, m_x, f, False, G)
    b_grad_y = tl.load(p_grad_y + o_row[:, None] * f + o_f[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    b_grad_gate = b_grad_y * b_up * (b_sigmoid + b_silu * (1.0 - b_sigmoid))
    p_out = p_grad + o_row[:, None] * 2 * f + o_f[None, :]
    tl.store(p_out, cast(b_grad_gate, p_grad.dtype.element_ty), mask=m_x)
    tl.store(p_out + f, cast(b_grad_y * b_silu, p_grad.dtype.element_ty), mask=m_x)


def _grid(rows: int, f: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS), triton.cdiv(f, COLUMNS)


def _pointers(*kept: Grouped) -> tuple[torch.Tensor, ...]:
    return tuple(t for q in kept for t in (q.codes.view(torch.uint8), q.exponent))


def swiglu_forward_triton(gate_up: torch.Tensor, group_size: int):
    """`swiglu_forward_reference` in one pass; one maximum for each tile."""
    rows, f = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, f, dtype=gate_up.dtype, device=gate_up.device)
    gate, up = (empty_grouped(rows, f, group_size, E4M3, gate_up.device) for _ in range(2))
    grid = _grid(rows, f)
    maxima = torch.empty(grid[0] * grid[1], dtype=torch.float32, device=gate_up.device)
    with torch.cuda.device_of(gate_up):
        swiglu_forward_kernel[grid](
            gate_up, y, *_pointers(gate, up), maxima, rows, f, ROWS=ROWS, COLUMNS=COLUMNS, G=group_size
        )
    return y, gate, up, maxima


def swiglu_rebuild_triton(gate: Grouped, up: Grouped, group_size: int, dtype) -> torch.Tensor:
    """`swiglu_rebuild_reference` as a kernel."""
    rows, f = gate.codes.shape
    y = torch.empty(rows, f, dtype=dtype, device=gate.codes.device)
    with torch.cuda.device_of(y):
        swiglu_rebuild_kernel[_grid(rows, f)](
            *_pointers(gate, up), y, rows, f, ROWS=ROWS, COLUMNS=COLUMNS, G=group_size
        )
    return y


def swiglu_backward_triton(grad_y, gate: Grouped, up: Grouped, group_size: int) -> torch.Tensor:
    """`swiglu_backward_reference` as a kernel."""
    rows, f = gate.codes.shape
    grad = torch.empty(rows, 2 * f, dtype=grad_y.dtype, device=grad_y.device)
    with torch.cuda.device_of(grad):
        swiglu_backward_kernel[_grid(rows, f)](
            grad_y, *_pointers(gate, up), grad, rows, f, ROWS=ROWS, COLUMNS=COLUMNS, G=group_size
        )
    return grad


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, group_size):
        rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        forward = swiglu_forward_triton if gate_up.is_cuda else swiglu_forward_reference
        y, gate, up, maxima = forward(rows, group_size)
        ctx.group_size = group_size
        ctx.save_for_backward(*gate, *up)
        ctx.mark_non_differentiable(*gate, *up, maxima)
        return y.view(*gate_up.shape[:-1], -1), *gate, *up, maxima

    @staticmethod
    def backward(ctx, grad_y, *_):
        gate, gate_exponent, up, up_exponent = ctx.saved_tensors
        grads = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()
        backward = swiglu_backward_triton if grad_y.is_cuda else swiglu_backward_reference
        grad = backward(grads, Grouped(gate, gate_exponent), Grouped(up, up_exponent), ctx.group_size)
        return grad.view(*grad_y.shape[:-1], -1), None


def swiglu(gate_up: torch.Tensor, *, group_size: int = 16) -> torch.Tensor:
    """silu(gate) * up of `gate_up` [..., 2 f], gate before up; BF16 or FP32.

    Returns [..., f] in the same dtype, carrying its origin. Kept for backward: gate and up as E4M3 in
    groups of `group_size`. Raises ValueError if the last dimension is odd.
    """
    require_fp8(gate_up.device)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: expected gate and up side by side, found {gate_up.shape[-1]} columns")
    y, gate, gate_exponent, up, up_exponent, maxima = _SwiGLU.apply(gate_up, group_size)
    rebuild_rows = swiglu_rebuild_triton if gate_up.is_cuda else swiglu_rebuild_reference
    dtype = gate_up.dtype

    def rebuild(gate, gate_exponent, up, up_exponent):
        return rebuild_rows(Grouped(gate, gate_exponent), Grouped(up, up_exponent), group_size, dtype)

    return with_origin(y, Origin((gate, gate_exponent, up, up_exponent), rebuild, maxima))
