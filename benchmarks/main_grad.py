"""FP8 weight gradients that are summed in FP32: by a pass behind the GEMM, or by the GEMM itself."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.common.environment import device
from benchmarks.common.errors import relative_rms
from benchmarks.common.harness import Table, benchmark
from benchmarks.common.timing import Timing, measure
from coat_kernels.fp8 import E4M3, E5M2, Fp8Format
from coat_kernels.linear import matmul
from coat_kernels.tensorwise import largest_magnitude, quantize_tensor

TOKENS = 8192
# of Llama-2-7B: columns and rows
WEIGHTS = {"qkv": (12288, 4096), "proj": (4096, 4096), "fc1": (22016, 4096), "fc2": (4096, 11008)}
TINY = {"tiny": (48, 80)}
# the ways take turns, so that each is timed on a GPU as hot as for the others
ROUNDS, WARMUP, REPEATS = 5, 10, 30
REFERENCE = "product, torch's add_"


def ways(operands: tuple[torch.Tensor, ...], main: torch.Tensor, fast: bool) -> dict[str, Callable]:
    """What is timed. All but the first add to `main` [n, k]; the first returns what it would add."""
    product = partial(matmul.scaled_matmul, *operands, None, torch.bfloat16, fast)
    return {
        "product": product,
        REFERENCE: lambda: main.add_(product()),
        "product, our add": lambda: matmul.add_into(main, product()),
        "ours": lambda: matmul.accumulate_matmul(*operands, main, torch.bfloat16, fast),
    }


def quantized(rows: int, columns: int, fmt: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a Gaussian tensor, and its scale."""
    x = torch.randn(rows, columns, device=device())
    q = quantize_tensor(x, largest_magnitude(x), fmt)
    return q.rows, q.scale


def error(way: Callable, main: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS error of what `way` adds to zero, or returns."""
    main.zero_()
    found = way()
    return relative_rms(main if found is None or found is main else found, expected)


@benchmark(needs_gpu=False)
def main_grad(arguments, table: Table) -> None:
    """Weight gradients from FP8 operands into FP32 `main_grad`: the weights of Llama-2-7B, 8192 tokens.

    `ours` is what a layer does; with fast sums, on Hopper, the GEMM adds itself. `to_add` is the time over
    that of the GEMM to BF16 and torch's `add_`; `error` the relative RMS of what is added, against sums in
    FP32; `peak_mb` what a call adds to the memory in use, in 10^6 bytes. Without a GPU, or with --quick: a
    tiny weight, and times that mean nothing.
    """
    torch.manual_seed(0)
    quick = arguments.quick or device().type == "cpu"
    rounds, warmup, repeats = (1, 1, 3) if quick else (ROUNDS, WARMUP, REPEATS)
    for weight, (n, k) in (TINY if quick else WEIGHTS).items():
        tokens = 64 if quick else TOKENS
        (a, scale_a), (b, scale_b) = quantized(n, tokens, E5M2), quantized(k, tokens, E4M3)
        operands = a, b, scale_a, scale_b
        main = torch.zeros(n, k, device=device())
        expected = matmul.scaled_matmul_reference(*operands, torch.float32)
        for fast in (True, False):
            timed = ways(operands, main, fast)
            errors = {name: error(way, main, expected) for name, way in timed.items()}
            visits: dict[str, list[Timing]] = {name: [] for name in timed}
            for _ in range(rounds):
                for name, way in timed.items():
                    visits[name].append(measure(way, warmup, repeats))
            timings = {
                name: sorted(found, key=lambda timing: timing.median)[rounds // 2]
                for name, found in visits.items()
            }
            for name, timing in timings.items():
                table.add(
                    weight=weight,
                    n=n,
                    k=k,
                    tokens=tokens,
                    sums="fast" if fast else "full",
                    way=name,
                    ms=timing.median,
                    ms_p20=timing.low,
                    ms_p80=timing.high,
                    to_add=timing.median / timings[REFERENCE].median,
                    tflops=2 * n * k * tokens / timing.median / 1e9,
                    peak_mb=timing.peak / 1e6,
                    error=errors[name],
                )
