"""The time of a layer's GEMMs with gradients in each format, and of quantizing the gradients."""

import functools
from collections.abc import Callable

import torch

from benchmarks.common.environment import device
from benchmarks.common.harness import Table, row_or_note
from benchmarks.common.shapes import LAYERS
from benchmarks.common.timing import measure
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.linear import scaled_matmul
from coat_kernels.tensorwise import quantize_tensor, tensor_amax
from coat_kernels.tensorwise.scale import tensor_scale_reference

FORMATS = {"E5M2": E5M2, "E4M3": E4M3}
ROW_SCALES = "E4M3, row scales"
WAYS = ("BF16", *FORMATS, ROW_SCALES)


def random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=device(), dtype=torch.bfloat16)


def gemm(way: str, rows: int, columns: int, summed: int) -> Callable[[], object]:
    """A product [rows, columns] whose first operand is the gradient."""
    a, b = random(rows, summed), random(columns, summed)
    if way == "BF16":
        return lambda: a @ b.T
    b = b.to(E4M3.dtype)
    if way in FORMATS:
        a, scale = a.to(FORMATS[way].dtype), torch.ones(1, device=device())
        return lambda: scaled_matmul(a, b, scale, scale, None, torch.bfloat16, False)
    a = a.to(E4M3.dtype)
    scales = torch.ones(rows, 1, device=device()), torch.ones(1, columns, device=device())
    # torch takes row scales with fast accumulation alone
    return lambda: torch._scaled_mm(a, b.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def quantizer(way: str, grad: torch.Tensor) -> Callable[[], object]:
    """Makes the codes for dgrad and, transposed, for wgrad; row scales by torch's operations."""
    if way in FORMATS:
        return lambda: quantize_tensor(grad, tensor_amax(grad), FORMATS[way], rows=True, columns=True)

    def call() -> None:
        for dim in (1, 0):
            scale = tensor_scale_reference(grad.abs().amax(dim, keepdim=True).float(), E4M3)
            codes = (grad * (1 / scale)).to(E4M3.dtype)
        codes.T.contiguous()

    return call


def times(way: str, tokens: int, outputs: int, inputs: int) -> dict[str, float]:
    """Milliseconds of the three GEMMs of a linear layer, and of quantizing the gradient."""
    m, n, k = tokens, outputs, inputs
    calls = {"forward": gemm(way, m, n, k), "dgrad": gemm(way, m, k, n), "wgrad": gemm(way, n, k, m)}
    if way != "BF16":
        calls["quantize"] = quantizer(way, random(m, n))
    return {f"{name}_ms": measure(call, warmup=10).median for name, call in calls.items()}


def add_times(quick: bool, table: Table) -> None:
    """A row for each linear layer of a decoder layer and each way."""
    shape = LAYERS["tiny" if quick else "llama-2-7b"]
    h = shape.hidden
    linears = {"qkv": (shape.qkv, h), "o": (h, h), "gate_up": (shape.fc1, h), "down": (h, shape.ffn)}
    for name, sizes in linears.items():
        for way in WAYS:
            row = row_or_note(functools.partial(times, way, shape.tokens, *sizes))
            table.add(what="time", linear=name, way=way, **row)
