"""One decoder layer, forward and backward: ours, its peers, and the floor under all of them."""

import argparse
import gc
from collections.abc import Callable

import torch
from torch.nn.attention import sdpa_kernel

from benchmarks.common.attention import attention_backend
from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, reason
from benchmarks.common.layers import DENOMINATOR, REFERENCE, Layer, forget, layer_makers
from benchmarks.common.memory import release
from benchmarks.common.shapes import BY_DEFAULT, LAYERS, TINY, LayerShape
from benchmarks.common.spawn import one_process
from benchmarks.common.timing import Timing
from benchmarks.layer.floor import floor_of, flops
from benchmarks.layer.measure import VISIT, Row

# 14 roundings to E4M3, of 2.6 % each, lie between the weights and what the layer adds to its input, and a
# few more where attention is kept in FP8: 10 %. What is half as far again off computes something else
GATE = 0.15


def run_shape(
    name: str, shape: LayerShape, rounds: int, table: Table, chosen: list[str] | None = None
) -> None:
    """Adds the floor and every row to the table; `chosen`: as `row_makers`."""
    backend = attention_backend(shape)
    parts = floor_of(shape, backend)
    floor = sum(parts.values())
    tflops = 1e-9 * flops(shape) / floor
    table.add(shape=name, layer="floor", attention=backend.name, ms=floor, tflops=tflops, **parts)
    with sdpa_kernel(backend):
        measured = made_rows(name, shape, table, chosen)
        for i in range(rounds):
            order = list(measured.values())
            for made in order if i % 2 == 0 else reversed(order):
                made.visit()
    add_times(name, shape, measured, floor, table)


def row_makers(chosen: list[str] | None) -> dict[str, Callable[[LayerShape], Layer]]:
    """`layer_makers`, without rows that have none of `chosen` in their name. Those that all are compared with
    stay."""
    return {
        row: make
        for row, make in layer_makers().items()
        if row in (REFERENCE, DENOMINATOR) or chosen is None or any(part in row for part in chosen)
    }


def made_rows(name: str, shape: LayerShape, table: Table, chosen: list[str] | None) -> dict[str, Row]:
    """The rows that work, warm, with their errors and their memory; those that do not are in the table."""
    generator = torch.Generator(device()).manual_seed(1)
    sizes = (shape.sequence, shape.batch, shape.hidden)
    x, grad = (torch.randn(sizes, generator=generator, device=device()).bfloat16() for _ in range(2))
    measured: dict[str, Row] = {}
    weights, expected = {}, None
    for row, make in row_makers(chosen).items():
        try:
            made = Row(make, shape, weights, x, grad)
            if row == REFERENCE:
                weights = {k: p.detach().clone() for k, p in made.layer.parameters().items()}
                expected = made.result
            made.compare(expected)
            if not made.errors["y"] < GATE:
                raise ArithmeticError(f"the output is {made.errors['y']:.3g} from the reference's")
            made.memory = made.measure_memory()
            measured[row] = made
            print(f"{name}, {row}: ready after {made.setup_s:.1f} s", flush=True)
        # whatever a peer stumbles over, the others go on
        except Exception as error:
            if row == REFERENCE:
                raise
            table.add(shape=name, layer=row, note=reason(error))
            made = None
            gc.collect()
    return measured


def add_times(name: str, shape: LayerShape, measured: dict[str, Row], floor: float, table: Table) -> None:
    """Adds what the visits found; `floor` in milliseconds."""
    timings = {
        row: [Timing(list(times), 0) for times in zip(*made.times, strict=True)]
        for row, made in measured.items()
    }
    denominator = timings[DENOMINATOR][0].median if DENOMINATOR in timings else float("nan")
    for row, (both, forward, backward) in timings.items():
        made = measured[row]
        table.add(
            shape=name,
            layer=row,
            ms=both.median,
            ms_p20=both.low,
            ms_p80=both.high,
            forward_ms=forward.median,
            backward_ms=backward.median,
            host_ms=Timing(made.cpu, 0).median,
            to_compile=both.median / denominator,
            saved_h=1e6 * made.memory["saved_mb"] / (shape.tokens * shape.hidden),
            **made.memory,
            tflops=1e-9 * flops(shape) / both.median,
            floor_share=floor / both.median,
            y_error=made.errors["y"],
            worst_grad_error=max(e for tensor, e in made.errors.items() if tensor != "y"),
            setup_s=made.setup_s,
        )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", choices=LAYERS, help="(default: " + " ".join(BY_DEFAULT) + ")")
    parser.add_argument("--rounds", type=int, default=4, help=f"visits of each row, of {VISIT} timed passes")
    parser.add_argument("--rows", nargs="+", help="only rows with one of these in their name, and BF16's")


@benchmark(needs_gpu=False, options=options)
def layer(arguments, table: Table) -> None:
    """One decoder layer, forward and backward with all gradients, of ours and of its peers.

    All rows have the same weights and inputs and take attention from the same backend. Visits to the rows
    are interleaved; each lasts until the clock of that row has settled, as in a long run. Columns:
    - ms, forward_ms, backward_ms: medians by device events; host_ms: of the CPU to launch both, or the
      GPU's if the queue of launches is full and the CPU has to wait;
    - to_compile: ms over that of plain torch in BF16 under torch.compile;
    - saved_mb, saved_h: memory allocated after a forward over that before, without the output and copies of
      weights, in 10^6 bytes and in h bytes per token. The input is not counted;
    - weights_mb: copies of weights and buffers held between passes or made by a forward for its backward;
    - peak_mb: peak of both passes over what is held between them; gradients of all weights are in it;
    - tflops: of the layer's own GEMMs, attention's halved by causality;
    - floor_share: the floor over ms. Floor: the twelve FP8 GEMMs (one scale per tensor, fast
      accumulation), attention by the same backend, each measured alone, and `traffic()` at a copy's speed;
    - y_error, worst_grad_error: relative RMS against Megatron's BF16 layer, residuals taken out. A layer
      whose output is further off than rounding explains is not timed.
    Without a GPU, or with --quick: tiny shapes. On a CPU times mean nothing and the input counts as saved.
    """
    names = arguments.shape or (BY_DEFAULT if torch.cuda.is_available() else TINY)
    if arguments.quick:
        names = TINY
    with one_process():
        for name in names:
            run_shape(name, LAYERS[name], arguments.rounds, table, arguments.rows)
            forget()
            release()
