"""CPU time of a decoder layer and its launches, at a size where the GPU has next to nothing to do."""

import argparse
import cProfile
import functools
import pstats
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, row_or_note
from benchmarks.common.layers import Layer, forget, layer_makers, megatron_layer, random_weights
from benchmarks.common.shapes import LayerShape
from benchmarks.common.spawn import one_process
from benchmarks.common.timing import gpu_spans, synchronize
from coat_kernels import tensorwise
from coat_kernels.device import uses_kernels

SHAPES = {
    "llama": LayerShape(256, 704, 4, 4, batch=1, sequence=256),
    "gpt": LayerShape(256, 1024, 4, 4, batch=1, sequence=256, llama=False),
}
WARMUP, REPEATS = (5, 30) if torch.cuda.is_available() else (1, 3)
# of one operation, launched one behind another
LAUNCHES = 300


def operations() -> dict[str, Callable[[], object]]:
    """What layers are made of, one launch each, or none."""
    fp32 = torch.zeros(1024, device=device())
    codes = torch.zeros(256, 256, device=device()).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device())

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    found = {
        "torch.empty": lambda: torch.empty(1024, device=fp32.device),
        "an autograd.Function": functools.partial(Nothing.apply, fp32.clone().requires_grad_()),
        "an addition": lambda: fp32.add_(1.0),
    }
    if uses_kernels(fp32):
        found["a Triton kernel"] = functools.partial(tensorwise.largest_triton, fp32)
        multiply = functools.partial(torch._scaled_mm, codes, codes.t(), one, one, out_dtype=torch.bfloat16)
        found["an FP8 product"] = multiply
    return found


def launch_us(operation: Callable[[], object]) -> float:
    """CPU microseconds of one call; the lowest of some, since whatever disturbs only adds."""
    found = []
    for _ in range(WARMUP):
        synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            operation()
        found.append((time.perf_counter() - start) / LAUNCHES * 1e6)
    return min(found)


def graphed(shape: LayerShape) -> Layer:
    """Megatron's BF16 layer replayed as the CUDA graphs that torch records."""
    plain = megatron_layer(shape)
    x = torch.zeros(shape.sequence, shape.batch, shape.hidden, dtype=torch.bfloat16, device=device())

    class Positioned(torch.nn.Module):
        """The layer, called with hidden states alone."""

        def __init__(self):
            super().__init__()
            self.layer = plain.module

        def forward(self, x):
            return plain.forward(x)

    module = torch.cuda.make_graphed_callables(Positioned(), (x.requires_grad_(),))
    return plain._replace(forward=module)


def made() -> dict[str, Callable[[LayerShape], Layer]]:
    """The rows of `python -m benchmarks layer`, and with and without graphs."""
    ours = functools.partial(megatron_layer, spec="coat_layer_spec")
    found = {name: make for name, make in layer_makers().items() if "compile" not in name}
    if torch.cuda.is_available():
        found["BF16, graphs"] = graphed
    found["ours, graphs"] = found.pop("ours")
    found["ours, no graphs"] = functools.partial(ours, cuda_graphs=False)
    return found


def cpu_ms(layer: Layer, x: torch.Tensor, grad: torch.Tensor) -> tuple[float, float, float]:
    """Milliseconds until forward and backward are launched, and until both are computed; medians."""
    found = []
    for _ in range(WARMUP + REPEATS):
        leaf = layer.transpose(x).clone().requires_grad_()
        synchronize()
        start = time.perf_counter()
        y = layer.forward(leaf)
        middle = time.perf_counter()
        y.backward(grad)
        end = time.perf_counter()
        synchronize()
        found.append((middle - start, end - middle, time.perf_counter() - start))
        layer.module.zero_grad()
    return tuple(1e3 * statistics.median(times) for times in zip(*found[WARMUP:], strict=True))


def kernels(layer: Layer, x: torch.Tensor, grad: torch.Tensor) -> int:
    """Kernels, copies and fills on the GPU in one pass."""
    leaf = layer.transpose(x).clone().requires_grad_()
    found = gpu_spans(lambda: layer.forward(leaf).backward(grad))
    layer.module.zero_grad()
    return len(found)


def show_profile(layer: Layer, x: torch.Tensor, grad: torch.Tensor) -> None:
    """Prints where Python spends its time; backward runs in a thread of its own on a GPU."""
    forward, backward = cProfile.Profile(), cProfile.Profile()
    for _ in range(REPEATS):
        leaf = layer.transpose(x).clone().requires_grad_()
        forward.enable()
        y = layer.forward(leaf)
        forward.disable()
        # the first and the last that its thread does
        y.register_hook(lambda _: backward.enable())
        leaf.register_hook(lambda _: backward.disable())
        y.backward(grad)
        synchronize()
        layer.module.zero_grad()
    for name, profile in {"forward": forward, "backward": backward}.items():
        print(f"{name}, {REPEATS} passes", flush=True)
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(30)


def layer_row(make: Callable[[LayerShape], Layer], shape: LayerShape, profiled: bool) -> dict[str, float]:
    """Measures of one layer; `profiled`: where Python spends its time is printed too."""
    generator = torch.Generator(device()).manual_seed(0)
    sizes = (shape.sequence, shape.batch, shape.hidden)
    x, grad = (torch.randn(sizes, generator=generator, device=device()).bfloat16() for _ in range(2))
    layer = make(shape)
    layer.load(random_weights(layer.parameters()))
    own = layer.transpose(grad)
    forward, backward, both = cpu_ms(layer, x, own)
    row: dict[str, float] = {"forward_ms": forward, "backward_ms": backward, "both_ms": both}
    if torch.cuda.is_available():
        row["kernels"] = kernels(layer, x, own)
    if profiled:
        show_profile(layer, x, own)
    return row


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows",
        nargs="+",
        default=["BF16", "TE delayed", "ours, graphs", "ours, no graphs"],
        help="rows with one of these in their name (default: %(default)s)",
    )
    parser.add_argument("--profile", help="print where the time of this row goes")


@benchmark(needs_gpu=False, options=options)
def host(arguments, table: Table) -> None:
    """CPU time of one decoder layer of h 256 and 256 tokens, and of what layers are made of.

    A layer whose GPU time is below these waits for the CPU: small models, and large ones over many
    tensor-parallel ranks. The layers are those of `python -m benchmarks layer`. Columns:
    - us: of one launch, or one call that launches nothing;
    - forward_ms, backward_ms: until all is launched; both_ms: until it is computed too; medians;
    - kernels: on the GPU in one pass, with copies and fills.
    Without a GPU there are no kernels, and times include the arithmetic.
    """
    for name, operation in operations().items():
        table.add(what=name, us=launch_us(operation))
    with one_process():
        for shape_name, shape in SHAPES.items():
            for name, make in made().items():
                if any(part in name for part in arguments.rows):
                    row = row_or_note(functools.partial(layer_row, make, shape, name == arguments.profile))
                    table.add(what=name, shape=shape_name, **row)
                    forget()
