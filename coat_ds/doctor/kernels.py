"""`coat doctor --kernels`: compares every kernel and GEMM path with its reference on this GPU.

The seed of a case determines what it checks, and its sizes, options and values.
"""

import functools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from coat_ds.doctor.finding import OK, PROBLEM, UNKNOWN, Finding, reason
from coat_ds.doctor.machine import NO_GPU, gpus, without_fp8
from coat_kernels import activation as act
from coat_kernels import adamw, agreement, groups, head_norm, linear, norm, rope, tensorwise
from coat_kernels.adamw import AdamWOptions, storing
from coat_kernels.agreement import exact, rounded
from coat_kernels.codecs import CODECS, SIGNED_CODECS, get_codec
from coat_kernels.codecs.codec import (
    decode_kernel_launch,
    decode_reference,
    encode_kernel_launch,
    encode_reference,
)
from coat_kernels.experts import KernelGate, experts_reference, grouped_experts, kernels, order, reference
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.groups import GROUP_FORMATS
from coat_kernels.linear.kernels import accumulate_matmul_triton, add_triton
from coat_kernels.tensorwise import PredictedScale, Quantized, quantize_tensor_reference
from coat_kernels.tensorwise.operands import fp8_operands

SECONDS = 60.0
# (name of the kernel, its error as a share of its bound)
Errors = Iterator[tuple[str, float]]
HOPPER = 9
ONLY_HOPPER = {"accumulate_kernel": "left out: it runs only on GPUs of compute capability 9.x"}


class Draw:
    """The random choices and tensors of one case. most: the largest size of a tensor's dimension."""

    def __init__(self, seed: int, device: torch.device, most: int):
        self.random, self.device, self.most = random.Random(seed), device, most
        self.generator = torch.Generator(device).manual_seed(seed)
        # most models use BF16
        self.dtype = self.choice(torch.bfloat16, torch.bfloat16, torch.float32)
        self.fmt = self.choice(E4M3, E5M2)
        self.keep = self.choice(*GROUP_FORMATS)

    def choice(self, *of):
        return self.random.choice(of)

    def size(self, least: int = 1, multiple: int = 1, most: int | None = None) -> int:
        """A random size, log-uniform between `least` and `most`, rounded down to a multiple."""
        most = max(most or self.most, least)
        n = math.exp(self.random.uniform(math.log(least), math.log(most + 1)))
        return max(int(n) // multiple, 1) * multiple

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return x.to(dtype or self.dtype)

    def wide(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random values whose magnitudes spread as widely as those of gradients."""
        sizes = self.normal(*shape, dtype=torch.float32).exp()
        return (self.normal(*shape, dtype=torch.float32) * sizes).to(dtype or self.dtype)

    def tables(self, tokens: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = 10 * self.normal(tokens, channels // 2, dtype=torch.float32).repeat(1, 2)
        return angles.cos(), angles.sin()


def _codes(
    name: str, found: Quantized, x: torch.Tensor, fmt, sums: bool = False, again: bool = False
) -> Errors:
    """Errors of the FP8 operands of `x`, which must be bit-exact, and of its column sums.

    again: the kernel recomputes `x`. The compiler may fuse other multiplications and additions, so that the
        largest value, and the scale, may differ by a rounding.
    """
    expected = quantize_tensor_reference(x, tensorwise.maxima_reference(x), fmt, columns=True)
    yield name, (rounded if again else exact)(found.scale, expected.scale)
    for a, e in zip(found[:2], expected[:2], strict=True):
        if a is not None:
            yield name, rounded(a, e) if again else exact(a.float(), e.float())
    if sums:
        yield name, agreement.summed(found.sums, x, again)


def check_groups(draw: Draw) -> Errors:
    x, size = draw.wide(draw.size(), draw.size()), draw.choice(16, 32, 64, 128)
    expected = groups.quantize_groups_reference(x, size, draw.keep)
    found = groups.quantize_groups_triton(x, size, draw.keep)
    yield "quantize_groups_kernel", agreement.grouped(found, expected, draw.dtype)
    values = groups.dequantize_groups_triton(expected, size, draw.dtype)
    reference = groups.dequantize_groups_reference(expected, size).to(draw.dtype)
    yield "dequantize_groups_kernel", exact(values, reference)


def check_tensorwise(draw: Draw) -> Errors:
    """The codes must not depend on the predicted scale."""
    fmt, xs = draw.fmt, [draw.wide(draw.size(), draw.size()) for _ in range(draw.size(most=4))]
    x = xs[0]
    amax, maxima = tensorwise.maxima_reference(x), tensorwise.maxima_triton(x)
    yield "maxima_kernel", exact(maxima.amax(0, keepdim=True), amax)
    yield "largest_kernel", exact(tensorwise.largest_triton(maxima), amax)
    for columns, name in ((False, "quantize_rows_kernel"), (True, "quantize_columns_kernel")):
        predicted = PredictedScale(fmt)
        predicted.on(x.device).fill_(draw.choice(1.0, 2.0**40, torch.nan))
        rows = not columns or draw.choice(False, True)
        found = fp8_operands(x, fmt, rows, columns, sums=columns, predicted=predicted)[0]
        yield from _codes(name, found, x, fmt, sums=columns)
        if not columns:
            transposed = tensorwise.transpose_codes_triton(found.rows).view(torch.uint8)
            wanted = tensorwise.transpose_codes_reference(found.rows).view(torch.uint8)
            yield "transpose_kernel", exact(transposed, wanted)
    together = tensorwise.rows_together(xs, [PredictedScale(fmt) for _ in xs], fmt)
    by_columns = tensorwise.columns_together(xs, [largest for _, largest in together], fmt)
    for x, (rows, _), columns in zip(xs, together, by_columns, strict=True):
        yield from _codes("rows_together_kernel", rows, x, fmt)
        yield from _codes("columns_together_kernel", columns, x, fmt)


def check_activation(draw: Draw) -> Errors:
    rows, f, gated = draw.size(), draw.size(), draw.choice(False, True)
    options = draw.choice(*act.KINDS), gated, draw.choice(16, 64)
    x, grad = draw.wide(rows, f * (1 + gated)), draw.wide(rows, f)
    y, maxima, kept = act.activation_forward_triton(x, *options, draw.keep)
    expected, _, q = act.activation_forward_reference(x, *options, draw.keep)
    yield "activation_forward_kernel", rounded(y, expected)
    yield "activation_forward_kernel", exact(maxima.amax(), y.float().abs().amax())
    yield "activation_forward_kernel", agreement.grouped(kept, q, draw.dtype)
    codes = act.activation_operands(x, options, draw.keep, PredictedScale(E4M3))[0]
    yield from _codes("activation_forward_kernel", codes, y, E4M3, again=True)
    grad_x, maxima = act.activation_backward_triton(grad, q, *options)
    reference, _ = act.activation_backward_reference(grad, q, *options)
    yield "activation_backward_kernel", rounded(grad_x, reference)
    yield "activation_backward_kernel", exact(maxima.amax(), grad_x.float().abs().amax())
    codes = act.activation_backward_operands(grad, q, options, PredictedScale(E5M2), True)
    yield from _codes("activation_backward_kernel", codes, grad_x, E5M2, sums=True, again=True)
    largest = tensorwise.maxima_reference(expected)
    columns = act.activation_columns_triton(q, largest, *options, E4M3).columns
    reference = act.activation_columns_reference(q, largest, *options, E4M3).columns
    yield "activation_columns_kernel", rounded(columns, reference)


def check_norm(draw: Draw) -> Errors:
    rows, h, layer_norm = draw.size(), draw.size(16, most=2 * draw.most), draw.choice(False, True)
    size, zero_centered, eps = draw.choice(16, 64), draw.choice(False, True), 1e-5
    options = layer_norm, zero_centered, size
    residual, branch, grad, other = (draw.normal(rows, h) for _ in range(4))
    x = norm.residual_add_reference(residual, branch)
    weight, bias = draw.normal(h, dtype=torch.float32), draw.normal(h) if layer_norm else None
    y, maxima, kept, rstd = norm.norm_forward_triton(x, weight, bias, eps, *options, draw.keep)
    expected, _, q, reference = norm.norm_forward_reference(x, weight, bias, eps, *options, draw.keep)
    yield "norm_forward_kernel", rounded(y, expected)
    yield "norm_forward_kernel", exact(maxima.amax(), y.float().abs().amax())
    yield "norm_forward_kernel", rounded(rstd, reference)
    if layer_norm:
        # a mean summed in another order changes deviations; a few of them get another code or exponent
        yield "norm_forward_kernel", rounded(kept.exponent, q.exponent)
        alike = (kept.exponent == q.exponent).repeat_interleave(size, 1)[:, :h]
        yield "norm_forward_kernel", rounded(*(agreement.ranks(t)[alike] for t in (kept, q)))
    else:
        yield "norm_forward_kernel", agreement.grouped(kept, q, draw.dtype)
    total, how = torch.empty_like(x), (weight, bias, (eps, *options), draw.keep, PredictedScale(E4M3))
    codes = norm.norm_operands(total, *how, addends=norm.Addends(residual, branch))[0]
    yield "norm_forward_kernel", exact(total, x)
    yield from _codes("norm_forward_kernel", codes, y, E4M3, again=True)
    arguments = grad, draw.choice(None, other), q, reference, weight, *options
    found, wanted = norm.norm_backward_triton(*arguments), norm.norm_backward_reference(*arguments)
    yield "norm_backward_kernel", rounded(found[0], wanted[0])
    yield "norm_backward_kernel", exact(found[1].amax(), found[0].float().abs().amax())
    for a, e in zip(found[2:], wanted[2:], strict=True):
        yield "norm_sums_kernel", rounded(a, e)
    largest = tensorwise.maxima_reference(expected)
    arguments = q, reference, weight, bias, largest, *options[1:], E4M3
    columns = norm.norm_columns_triton(*arguments).columns
    yield "norm_columns_kernel", rounded(columns, norm.norm_columns_reference(*arguments).columns)


def check_head_norm(draw: Draw) -> Errors:
    s, b, heads, d = draw.size(), draw.size(most=3), draw.size(most=8), draw.size(16, 2, most=256)
    turns, options = draw.choice(d, d, 0), (draw.choice(False, True), 16)
    x, grad, weight = draw.normal(s, b, heads, d), draw.normal(b, heads, s, d), draw.normal(d)
    # attention's gradients are not contiguous
    grad, tables = grad.permute(2, 0, 1, 3), draw.tables(s, turns)
    arguments = x, weight, *tables, 1e-6, *options, draw.keep
    y, kept, rstd = head_norm.head_norm_forward_triton(*arguments)
    expected, q, reference = head_norm.head_norm_forward_reference(*arguments)
    yield "head_norm_forward_kernel", rounded(y, expected)
    yield "head_norm_forward_kernel", rounded(rstd, reference)
    yield "head_norm_forward_kernel", agreement.grouped(kept, q, draw.dtype)
    arguments = grad, q, reference, weight, *tables, *options
    found = head_norm.head_norm_backward_triton(*arguments)
    wanted = head_norm.head_norm_backward_reference(*arguments)
    yield "head_norm_backward_kernel", rounded(found[0], wanted[0])
    yield "norm_sums_kernel", rounded(found[1], wanted[1])


def check_rope(draw: Draw) -> Errors:
    s, b, n, m = draw.size(), draw.size(most=3), draw.size(most=4), draw.size(most=4)
    # triton's interpreter does not support the masks of `apart`
    d, apart = draw.size(4, 2, most=256), draw.choice(False, True) and draw.device.type == "cuda"
    mixed, tables = draw.normal(s, b, n * (m + 2) * d), draw.tables(s, draw.choice(d, d, 0))
    expected = rope.rotate_qkv_reference(mixed, *tables, n, d, apart)
    for a, e in zip(rope.rotate_qkv_triton(mixed, *tables, n, d, apart), expected, strict=True):
        yield "rotate_qkv_kernel", rounded(a, e)
    # attention's gradients are not contiguous
    grads = [draw.normal(b, heads, s, d).permute(2, 0, 1, 3) for heads in (n * m, n, n)]
    found, maxima = rope.rotate_qkv_backward_triton(*grads, *tables, apart)
    yield (
        "rotate_qkv_backward_kernel",
        rounded(found, rope.rotate_qkv_backward_reference(*grads, *tables, apart)[0]),
    )
    yield "rotate_qkv_backward_kernel", exact(maxima.amax(), found.float().abs().amax())
    codes = rope.rotate_qkv_backward_operands(*grads, *tables, PredictedScale(E5M2), sums=True, apart=apart)
    flat = found.flatten(0, 1)
    yield from _codes("rotate_qkv_operands_kernel", codes, flat, E5M2, sums=True, again=True)


def check_codecs(draw: Draw) -> Errors:
    codec, size = get_codec(draw.choice(*CODECS)), draw.choice(64, 128)
    x = draw.wide(draw.size() * draw.size(), dtype=torch.float32)
    x[:: draw.choice(3, 7)] = 0
    x = x if codec.signed else x.abs()
    expected = encode_reference(codec, x, size)
    yield "encode_kernel", agreement.stored(codec, encode_kernel_launch(codec, x, size), expected, size)
    values = decode_kernel_launch(codec, expected, size)
    yield "decode_kernel", agreement.decoded(values, decode_reference(codec, expected, size))


def _adamw_options(draw: Draw) -> AdamWOptions:
    # in other formats a second moment may become zero, and a tie in rounding then changes an update
    v = get_codec(draw.choice("log8", "fp8_expanded"))
    firsts = [codec for codec in map(get_codec, SIGNED_CODECS) if codec.stands_beside(v)]
    m = draw.choice(*firsts)
    # codes are rounded stochastically only in formats with fine steps
    return AdamWOptions(
        m, v, 128, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, dither=v.fine,
        maximize=draw.choice(False, True),
    )  # fmt: skip


def check_stochastic(draw: Draw) -> Errors:
    """The stochastically rounded parameters of a step; its FP32 result is taken from a run with masters."""
    options = replace(_adamw_options(draw), seed=draw.random.randrange(2**16))
    n = draw.size(most=draw.most**2)
    weight, grad = draw.normal(n, dtype=torch.bfloat16), draw.wide(n, dtype=torch.float32)
    remainder, found = torch.zeros(n, dtype=torch.int16, device=draw.device), []
    for stochastic, more in ((False, {"remainders": [remainder]}), (True, {})):
        found.append(weight.clone())
        states = [
            [codec.zeros(n, 128, draw.device)] for codec in (options.exp_avg_codec, options.exp_avg_sq_codec)
        ]
        how = replace(options, stochastic=stochastic)
        adamw.adamw_triton([found[-1]], [grad], *states, [1], how, **more)
    master, g = adamw.join_master(found[0], remainder), -grad if options.maximize else grad
    yield "adamw_kernel", exact(found[1], adamw.round_stochastically(master, g, options.seed, 1))


def check_adamw(draw: Draw) -> Errors:
    """Three steps, and the errors that storing the moments causes in the last one."""
    options, size = _adamw_options(draw), 128
    m, v = options.exp_avg_codec, options.exp_avg_sq_codec
    n, extra = draw.size(size, most=draw.most**2), draw.choice("none", "remainder", "weight")
    start, params, beside, states = 0.02 * draw.normal(n, dtype=torch.float32), [], [], []
    for _ in range(2):
        p, more = start.clone(), {}
        if extra == "remainder":
            p, remainder = adamw.split_master(start)
            more = {"remainder": remainder}
        elif extra == "weight":
            more = {"weight": torch.zeros(n, dtype=torch.bfloat16, device=draw.device)}
        params.append(p), beside.append(more)
        states.append([codec.zeros(n, size, draw.device) for codec in (m, v)])
    for step in (1, 2, 3):
        grad = draw.wide(n, dtype=draw.choice(torch.float32, torch.bfloat16))
        before = storing.Moments(*(type(s)(*(t.clone() for t in s)) for s in states[1]))
        adamw.adamw_reference(params[0], grad, *states[0], step, options, **beside[0])
        lists = {f"{name}s": [t] for name, t in beside[1].items()}
        adamw.adamw_triton([params[1]], [grad], *([s] for s in states[1]), [step], options, **lists)
        expected, found = (
            adamw.join_master(p, b["remainder"]) if extra == "remainder" else p
            for p, b in zip(params, beside, strict=True)
        )
        # The first step: approximate root and reciprocal, 2^-21, and the rounding of the parameter, 2^-24 of
        # at most 10 updates. In later steps a code on a tie may be rounded the other way, which changes an
        # update by 2^-3 of a moment's code: seldom in a thousand elements, but an exponent on a tie changes
        # all codes of a group
        bound = 2e-6 if step == 1 else max(5e-3, 2**-3 * (size / n) ** 0.5)
        yield "adamw_kernel", agreement.rel_rms(found - start, expected - start) / bound
        if extra == "weight":
            yield "adamw_kernel", exact(beside[1]["weight"], found.bfloat16())
    # the reference makes 64 copies of each group
    whole = min(n // size, 256)
    after = storing.Moments(*states[1])
    rows = [moments.groups(0, whole, size) for moments in (before, after)]
    steps = torch.full((whole,), 3.0, dtype=torch.float64, device=draw.device)
    arguments = *rows, grad[: whole * size].float().view(whole, size), steps, options
    found, wanted = storing.storing_sums_triton(*arguments), storing.storing_sums_reference(*arguments)
    for column, (rtol, atol) in enumerate(agreement.STORING):
        bound = rtol * wanted[:, column].abs().sum() + atol * whole
        error = (found[:, column].sum() - wanted[:, column].sum()).abs()
        yield (
            "storing_kernel",
            (error / bound).item() if bound else exact(found[:, column], wanted[:, column]),
        )


def check_products(draw: Draw) -> Errors:
    """FP8 GEMMs of cuBLASLt, and of the Hopper kernel that adds to its output."""
    fmt, dtype, fast = draw.fmt, draw.choice(torch.bfloat16, torch.float32), draw.choice(False, True)
    m, n, t = (draw.size(16, 16) for _ in range(3))
    a, b = (fp8_operands(draw.normal(rows, t), f)[0] for rows, f in ((m, fmt), (n, E4M3)))
    bias = draw.choice(None, draw.normal(n, dtype=dtype))
    exactly = (a.rows.double() @ b.rows.double().T) * a.scale.double() * b.scale.double()
    operands = a.rows, b.rows, a.scale, b.scale
    y = linear.scaled_matmul(*operands, bias, dtype, fast)
    expected = exactly if bias is None else exactly + bias.double()
    yield "scaled_matmul", agreement.product(y, expected, t, fast)
    out = draw.normal(m, n, dtype=torch.float32)
    added = out.clone()
    linear.accumulate_matmul(*operands, added, torch.bfloat16, fast)
    # the result is rounded to BF16 before it is added, except where the Hopper kernel runs
    yield "accumulate_matmul", agreement.product((added - out).bfloat16(), exactly, t, fast)
    if draw.device.type == "cpu" or torch.cuda.get_device_capability(draw.device)[0] == HOPPER:
        added = torch.zeros_like(out)
        accumulate_matmul_triton(*operands, added)
        yield "accumulate_kernel", agreement.product(added, exactly, t, True)
    x = draw.normal(m, n)
    added, wanted = out.clone(), out + x
    add_triton(added, x)
    yield "add_kernel", exact(added, wanted)


def check_experts_kernels(draw: Draw) -> Errors:
    """The kernels around the grouped GEMMs; some experts have no row."""
    count, k = draw.size(most=16), draw.size(most=8)
    whole = functools.partial(torch.randint, 0, generator=draw.generator, device=draw.device)
    ends = whole(draw.size(most=draw.most // 4), (count,)).cumsum(0).int()
    n, h = int(ends[-1]) + 1, draw.size(16, 16)
    ends[-1] = n
    source, _ = order.padded(ends, n)
    x = draw.wide(n, h)
    found, expected = kernels.quantize_each_row_triton(x), reference.quantize_each_row_reference(x)
    for a, e in zip(found, expected, strict=True):
        yield "quantize_each_row_kernel", exact(a.float(), e.float())
    gathered = reference.gather_columns_reference(expected[0], source)
    yield (
        "gather_columns_kernel",
        exact(kernels.gather_columns_triton(expected[0], source).float(), gathered.float()),
    )
    back = whole(n, (draw.size(), k))
    sums = reference.sum_to_tokens_reference(x, back)
    yield "sum_to_tokens_kernel", rounded(kernels.sum_to_tokens_triton(x, back), sums)
    size, gated = draw.choice(16, 32, 64, 128), draw.choice(False, True)
    options, f = (draw.choice(*act.KINDS), gated, size), draw.size(size, size, most=max(draw.most // 4, size))
    q = groups.quantize_groups_reference(draw.normal(n, (1 + gated) * f), size, draw.keep)
    weights, largest = (
        draw.normal(n, dtype=torch.float32).sigmoid(),
        draw.normal(1, dtype=torch.float32).exp(),
    )
    operands = draw.wide(n, f, dtype=torch.bfloat16), q, weights, source
    expected = reference.gate_output_reference(*operands, largest, *options)
    for a, e in zip(kernels.gate_output_triton(*operands, largest, *options), expected, strict=True):
        yield "gate_output_kernel", rounded(a, e)
    maxima = expected[3], expected[3].amax(0, keepdim=True)
    expected = reference.gate_grad_reference(*operands, *maxima, *options)
    for a, e in zip(kernels.gate_grad_triton(*operands, *maxima, *options), expected, strict=True):
        yield "gate_grad_kernel", rounded(a, e)


def check_experts(draw: Draw) -> Errors:
    """Grouped GEMMs; some experts have no token."""
    # small sizes, since the reference computes in FP64
    t, (h, f) = draw.size(64), (draw.size(64, 16, most=draw.most // 4) for _ in range(2))
    count, k = draw.size(2, most=16), 2
    chosen = torch.rand(t, count, generator=draw.generator, device=draw.device).topk(k).indices
    dtype, tensors = torch.bfloat16, {}
    tensors["x"] = draw.normal(t, h, dtype=dtype)
    tensors["weights"] = draw.normal(t, k, dtype=torch.float32).sigmoid()
    tensors["gate_up"] = draw.normal(count, 2 * f, h, dtype=dtype) / h**0.5
    tensors["down"] = draw.normal(count, h, f, dtype=dtype) / f**0.5
    grad, found = draw.normal(t, h, dtype=dtype), []
    for function, gate, kind in (
        (grouped_experts, KernelGate("silu", saved_format=draw.keep), None),
        (experts_reference, _silu, torch.float64),
    ):
        given = {name: x.detach().to(kind or x.dtype).requires_grad_() for name, x in tensors.items()}
        y = function(chosen=chosen, gate=gate, **given)
        found.append([y, *torch.autograd.grad(y, list(given.values()), grad.to(y.dtype))])
    bounds = agreement.EXPERTS_FORWARD, *[agreement.EXPERTS_BACKWARD[draw.keep]] * 4
    for a, e, bound in zip(*found, bounds, strict=True):
        # the root mean squares of n errors and of n values each vary by 1 / sqrt(2 n), relatively; the bound
        # allows twice the variation of their ratio
        yield "grouped_experts", agreement.rel_rms(a, e) / bound / (1 + 2 / a.numel() ** 0.5)


def _silu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=1)
    return F.silu(gate) * up


CHECKS: tuple[Callable[[Draw], Errors], ...] = (
    check_groups,
    check_tensorwise,
    check_activation,
    check_norm,
    check_head_norm,
    check_rope,
    check_codecs,
    check_adamw,
    check_stochastic,
    check_products,
    check_experts_kernels,
    check_experts,
)


@dataclass
class Result:
    """The result for one kernel or path: the number of compared results, the worst error as a share of its
    bound, and the seed and the exception of the worst case."""

    compared: int = 0
    worst: float = 0.0
    seed: int = 0
    raised: str = ""


def measure(seed: int, seconds: float, device: torch.device, most: int = 4096) -> dict[str, Result]:
    """Runs the checks in turn, from case `seed` on: each at least once, and then until `seconds` are over."""
    results: dict[str, Result] = defaultdict(Result)

    def note(name: str, error: float, raised: str = "") -> None:
        result = results[name]
        result.compared += 1
        # NaN counts as an infinite error
        error = error if error == error else torch.inf
        if error > result.worst:
            result.worst, result.seed, result.raised = error, seed, raised

    end, first = time.monotonic() + seconds, seed
    while time.monotonic() < end or seed < first + len(CHECKS):
        make = CHECKS[seed % len(CHECKS)]
        try:
            for name, error in make(Draw(seed, device, most)):
                note(name, error)
        # Triton raises errors of many types, from the compiler, ptxas and the driver
        except Exception as error:
            note(make.__name__, torch.inf, f"; {type(error).__name__}: {reason(error)}")
        seed += 1
    return results


def check(seed: int, seconds: float = SECONDS) -> list[Finding]:
    """A finding for each kernel and path; an error above its bound is a problem."""
    if not torch.cuda.is_available():
        return [Finding("kernels", UNKNOWN, NO_GPU)]
    if without_fp8(*gpus()[0]):
        return [Finding("kernels", UNKNOWN, "cannot be checked: the GPU has no FP8")]
    device = torch.device("cuda", torch.cuda.current_device())
    return findings(seed, measure(seed, seconds, device))


def findings(seed: int, results: dict[str, Result]) -> list[Finding]:
    found = [Finding("seed", OK, f"{seed}; errors are shares of their bounds", {"seed": seed})]
    for name, r in sorted(results.items()):
        state, text = OK, f"{r.worst:.3f} at most, of {r.compared} results"
        if r.worst > 1:
            state, text = PROBLEM, f"{text}{r.raised}. To repeat it: coat doctor --kernels {r.seed}"
        # JSON has no infinity
        error = r.worst if math.isfinite(r.worst) else None
        details = {"error": error, "results": r.compared, "seed": r.seed}
        found.append(Finding(name, state, text, details))
    return found + [Finding(name, UNKNOWN, why) for name, why in ONLY_HOPPER.items() if name not in results]
