"""One decoder layer, forward and backward: ours, its peers, and the floor under all of them."""

import argparse
import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.adamw import requested_bytes
from benchmarks.decoder_layers import (
    Layer,
    LayerShape,
    Result,
    device,
    forget,
    megatron_layer,
    random_weights,
    result_of,
    torch_layer,
    transformer_engine_layer,
)
from benchmarks.harness import Table, Timing, benchmark, mark, measure, milliseconds, reason, synchronize
from benchmarks.training import one_process
from coat_ds.plan import layer_flops
from coat_ds.plan.systems import FASTEST

SHAPES = {
    "llama-2-7b": LayerShape(4096, 11008, 32, 32, batch=4, sequence=2048),
    "llama-3-8b": LayerShape(4096, 14336, 32, 8, batch=1, sequence=8192),
    "gpt": LayerShape(4096, 16384, 32, 32, batch=4, sequence=2048, llama=False),
    "tiny": LayerShape(128, 352, 4, 2, batch=2, sequence=48),
    "tiny-gpt": LayerShape(128, 512, 4, 4, batch=2, sequence=48, llama=False),
}
TINY = ("tiny", "tiny-gpt")
# the first to be had on this device serves all rows
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
WARMUP = 3
# passes timed at each visit of a round, after some that are not: a GPU at its power limit takes a moment to
# find the clock that it can hold for this row, which is the one of a long run
SETTLE, VISIT = (15, 30) if torch.cuda.is_available() else (1, 3)
# 14 roundings to E4M3, of 2.6 % each, lie between the weights and what the layer adds to its input, and a
# few more where attention is kept in FP8: 10 %. What is half as far again off computes something else
GATE = 0.15
REFERENCE, DENOMINATOR = "BF16", "BF16 torch.compile"
FP8_GROUPED = 1 + 1 / 16


def rows() -> dict[str, Callable[[LayerShape], Layer]]:
    """How each row's layer is made; the reference comes first."""
    ours = functools.partial(megatron_layer, spec="coat_layer_spec")
    te = transformer_engine_layer
    made = {
        REFERENCE: megatron_layer,
        DENOMINATOR: functools.partial(torch_layer, compiled=True),
        "torchao tensorwise": functools.partial(torch_layer, compiled=True, float8=True),
        "TE BF16": te,
    }
    for name, recipe in {
        "delayed": "DelayedScaling",
        "current": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
    }.items():
        made[f"TE {name}"] = functools.partial(te, recipe=recipe)
        made[f"TE {name}, cached"] = functools.partial(te, recipe=recipe, cached=True)
    made["ours"] = ours
    made["ours, saved E4M3"] = functools.partial(ours, saved_format="e4m3")
    made["ours, 8-bit attention"] = functools.partial(ours, attention_format="sqrt8")
    made["ours, recomputed attention"] = functools.partial(ours, attention_format="recompute")
    for cache in ("none", "fp8"):
        made[f"ours, cache {cache}"] = functools.partial(ours, weight_cache=cache)
    made["ours, fastest"] = functools.partial(ours, **FASTEST)
    return made


def attention_backend(shape: LayerShape) -> SDPBackend:
    """The first backend that runs this shape's attention, forward and backward, on this device."""
    for backend in BACKENDS:
        try:
            attention_ms(shape, backend, repeats=1)
        except RuntimeError as error:
            print(f"no {backend.name}: {reason(error)}", flush=True)
        else:
            return backend
    raise RuntimeError("scaled_dot_product_attention has no backend for this device")


def attention_ms(shape: LayerShape, backend: SDPBackend, repeats: int = 10) -> float:
    """Attention alone, forward and backward, on q, k and v in storages of their own."""

    def tensor(heads):
        sizes = (shape.batch, shape.sequence, heads, shape.head_dim)
        return torch.randn(sizes, device=device(), dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    q, k, v = (tensor(heads) for heads in (shape.heads, shape.groups, shape.groups))
    grad = tensor(shape.heads).detach()

    def both():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.groups != shape.heads)
        torch.autograd.grad(y, (q, k, v), grad)

    with sdpa_kernel(backend):
        return measure(both, warmup=2, repeats=repeats).median


def gemm_ms(shape: LayerShape) -> float:
    """The twelve FP8 products of the four linear layers, one scale per tensor, fast accumulation."""
    fp8 = functools.partial(torch.Tensor.to, dtype=torch.float8_e4m3fn)
    one = torch.ones((), device=device())
    linears = ((shape.hidden, shape.qkv), (shape.hidden, shape.hidden))
    linears += ((shape.hidden, shape.fc1), (shape.ffn, shape.hidden))
    total = 0.0
    for k, n in linears:
        # y = x W^T, dx = dy W, dW = dy^T x, as rows times rows
        for sizes in ((shape.tokens, n, k), (shape.tokens, k, n), (n, k, shape.tokens)):
            a, b = (
                fp8(torch.randn(rows, sizes[2], device=device(), dtype=torch.bfloat16)) for rows in sizes[:2]
            )
            multiply = functools.partial(
                torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            total += measure(multiply, warmup=2, repeats=10).median
    return total


def copy_bandwidth(size: int) -> float:
    """Bytes read and written by a copy in a millisecond."""
    source = torch.empty(size, dtype=torch.uint8, device=device()).random_()
    target = torch.empty_like(source)
    return 2 * size / measure(lambda: target.copy_(source), repeats=10).median


def traffic(shape: LayerShape) -> float:
    """Bytes that must be moved outside of products and attention, with weights quantized already.

    Per token, with BF16 activations (2 bytes), FP8 operands (1) and FP8 kept in groups of 16 (17/16). A
    scale is known before its tensor is written, rotary positions are part of attention, biases of products.
    """
    h, f, fc1, kept = shape.hidden, shape.ffn, shape.fc1, FP8_GROUPED
    forward = (
        # norm: input; operand and what is kept
        2 * h + (1 + kept) * h
        # attention's output to an operand
        + 2 * h + h
        # residual and norm: both terms; sum, operand and what is kept
        + 4 * h + (2 + 1 + kept) * h
        # activation: input; operand and what is kept
        + 2 * fc1 + f + kept * fc1
        # residual
        + 4 * h + 2 * h
    )  # fmt: skip
    backward = (
        # the gradient to operands of two products
        2 * h + 2 * h
        # activation: gradient and what was kept; operands of two products, rebuilt operand of the third
        + 2 * f + kept * fc1 + 2 * fc1 + f
        # norm: gradient, what was kept, the residual's gradient; sum as BF16 and operands, rebuilt operand
        + (2 + kept + 2) * h + (2 + 2) * h + h
        # attention's output to an operand
        + 2 * h + h
        # gradient of q, k, v to operands
        + 2 * shape.qkv + 2 * shape.qkv
        # norm
        + (2 + kept + 2) * h + 2 * h + h
    )  # fmt: skip
    return shape.tokens * (forward + backward)


def flops(shape: LayerShape) -> float:
    """Of the layer's own products, forward and backward, attention's over the half that causality leaves."""
    return layer_flops(shape.sizes(), shape.batch, shape.sequence)


def saved_by_python(y: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors that `torch.autograd.Function`s behind `y` keep for backward."""
    seen, ahead = set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from (t for t in getattr(node, "saved_tensors", None) or () if t is not None)
        ahead.extend(following for following, _ in node.next_functions)


def storages(t: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor; of a wrapper, as TransformerEngine's quantized tensors are, of its parts."""
    try:
        t.untyped_storage().data_ptr()
    except RuntimeError:
        for part in vars(t).values():
            if isinstance(part, torch.Tensor):
                yield from storages(part)
    else:
        yield t.untyped_storage()


def weight_copies(layer: Layer, x: torch.Tensor) -> int:
    """Bytes of copies of weights that one forward makes and keeps for its backward."""
    shapes = {tuple(sorted(p.shape)) for p in layer.parameters().values() if p.ndim == 2}
    # what is made anew in each forward differs between two of them that are alive together
    first, second = layer.forward(x), layer.forward(x)
    shared = {storage.data_ptr() for t in saved_by_python(first) for storage in storages(t)}
    own = {
        storage.data_ptr(): storage.nbytes()
        for t in saved_by_python(second)
        if tuple(sorted(t.shape)) in shapes
        for storage in storages(t)
    }
    return sum(size for pointer, size in own.items() if pointer not in shared)


class Row:
    """A layer under measurement, on its own leaf."""

    def __init__(
        self,
        make: Callable[[LayerShape], Layer],
        shape: LayerShape,
        weights,
        x: torch.Tensor,
        grad: torch.Tensor,
    ):
        """`weights`, Megatron's, are loaded; without any, the layer is the reference and gets random ones."""
        started = time.perf_counter()
        self.layer = make(shape)
        self.layer.load(weights or random_weights(self.layer.parameters()))
        self.leaf = self.layer.transpose(x).clone().requires_grad_()
        self.grad = self.layer.transpose(grad)
        held = self._allocated()
        for _ in range(WARMUP):
            self.run()
        self.result = result_of(self.layer, x, grad)
        self.clear()
        synchronize()
        self.setup_s = time.perf_counter() - started
        # the result is kept, and nothing else that was there before
        own = (self.result.y, self.result.dx, *self.result.parameters.values())
        self.held = self._allocated() - held - sum(t.nbytes for t in own)
        self.times: list[tuple[float, float, float]] = []
        self.host: list[float] = []

    @staticmethod
    def _allocated() -> int:
        return requested_bytes() if torch.cuda.is_available() else 0

    def clear(self) -> None:
        self.leaf.grad = None
        self.layer.module.zero_grad()

    def run(self) -> tuple:
        """One pass; marks of its start, middle and end."""
        self.clear()
        start = mark()
        y = self.layer.forward(self.leaf)
        middle = mark()
        y.backward(self.grad)
        return start, middle, mark()

    def visit(self) -> None:
        """Times passes that follow each other as layers do."""
        for _ in range(SETTLE):
            self.run()
        marks = []
        for _ in range(VISIT):
            started = time.perf_counter()
            marks.append(self.run())
            self.host.append(1e3 * (time.perf_counter() - started))
        synchronize()
        self.times += [(milliseconds(a, c), milliseconds(a, b), milliseconds(b, c)) for a, b, c in marks]
        self.clear()

    def memory(self) -> dict[str, float]:
        """Bytes kept by a forward, of weights' copies, and the peak of both passes, in 10^6."""
        if not torch.cuda.is_available():
            from megatron_ext.ledger import saved_bytes

            kept = saved_bytes([self.layer.module], lambda: self.layer.forward(self.leaf))
            return {"saved_mb": kept.total / 1e6, "weights_mb": 0.0, "peak_mb": 0.0}
        synchronize()
        before = requested_bytes()
        torch.cuda.reset_peak_memory_stats()
        y = self.layer.forward(self.leaf)
        saved = requested_bytes() - before - y.nbytes
        y.backward(self.grad)
        synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        del y
        self.clear()
        copies = weight_copies(self.layer, self.leaf)
        return {
            "saved_mb": (saved - copies) / 1e6,
            "weights_mb": (self.held + copies) / 1e6,
            "peak_mb": peak / 1e6,
        }


def run_shape(
    name: str, shape: LayerShape, rounds: int, table: Table, chosen: list[str] | None = None
) -> None:
    """Adds the floor and every row to the table; `chosen`: only rows with one of these in their name."""
    made_by = {
        row: make
        for row, make in rows().items()
        if row == REFERENCE or chosen is None or any(part in row for part in chosen)
    }
    backend = attention_backend(shape)
    parts = {
        "gemm_ms": gemm_ms(shape),
        "attention_ms": attention_ms(shape, backend),
        "traffic_ms": traffic(shape) / copy_bandwidth(2**30 if torch.cuda.is_available() else 2**20),
    }
    floor = sum(parts.values())
    work = flops(shape) / 1e9
    table.add(shape=name, layer="floor", attention=backend.name, ms=floor, tflops=work / floor, **parts)

    generator = torch.Generator(device()).manual_seed(1)
    x, grad = (
        torch.randn(
            shape.sequence, shape.batch, shape.hidden, generator=generator, device=device()
        ).bfloat16()
        for _ in range(2)
    )
    measured: dict[str, Row] = {}
    weights, errors, memory = {}, {}, {}
    expected: Result | None = None
    with sdpa_kernel(backend):
        for row, make in made_by.items():
            try:
                made = Row(make, shape, weights, x, grad)
                if row == REFERENCE:
                    weights = {k: p.detach().clone() for k, p in made.layer.parameters().items()}
                    expected = made.result
                errors[row] = made.result.errors(expected, made.layer)
                # not the result itself, which is as large as the weights
                made.result = None
                if not errors[row]["y"] < GATE:
                    raise ArithmeticError(f"the output is {errors[row]['y']:.3g} from the reference's")
                memory[row] = made.memory()
                measured[row] = made
                print(f"{name}, {row}: ready after {made.setup_s:.1f} s", flush=True)
            # whatever a peer stumbles over, the others go on
            except Exception as error:
                if row == REFERENCE:
                    raise
                table.add(shape=name, layer=row, note=reason(error))
                made = None
                gc.collect()
        expected = None
        for i in range(rounds):
            order = list(measured.values())
            for made in order if i % 2 == 0 else reversed(order):
                made.visit()

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
            host_ms=Timing(made.host, 0).median,
            to_compile=both.median / denominator,
            saved_h=1e6 * memory[row]["saved_mb"] / (shape.tokens * shape.hidden),
            **memory[row],
            tflops=work / both.median,
            floor_share=floor / both.median,
            y_error=errors[row]["y"],
            worst_grad_error=max(e for tensor, e in errors[row].items() if tensor != "y"),
            setup_s=made.setup_s,
        )


def plot(rows: list[dict], path: Path) -> None:
    """Time against saved bytes, a panel for each shape and a point for each layer."""
    timed = [row for row in rows if "saved_h" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in timed))
    names = list(dict.fromkeys(row["layer"] for row in timed))
    markers = {"BF16": "s", "torchao": "^", "TE": "D", "ours": "o"}
    points = {}
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(4 * len(shapes) + 2.5, 4), layout="constrained", squeeze=False
    )
    for row in timed:
        name, axes = row["layer"], panels[0][shapes.index(row["shape"])]
        marker = next(m for maker, m in markers.items() if name.startswith(maker))
        color = plt.cm.tab20(names.index(name))
        points[name] = axes.scatter(row["saved_h"], row["ms"], marker=marker, color=color)
    for shape, axes in zip(shapes, panels[0], strict=True):
        axes.set(title=shape, xlabel="saved for backward, h bytes per token", xlim=(0, None), ylim=(0, None))
    panels[0][0].set_ylabel("forward and backward, ms")
    figure.legend(points.values(), points, loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="all but the tiny ones by default")
    parser.add_argument("--rounds", type=int, default=4, help=f"visits of each row, of {VISIT} timed passes")
    parser.add_argument(
        "--rows", nargs="+", help="only rows with one of these in their name, and the reference"
    )


@benchmark(needs_gpu=False, options=options)
def layer(arguments, table: Table) -> None:
    """One decoder layer, forward and backward with all gradients, of ours and of its peers.

    All rows have the same weights and inputs and take attention from the same backend. Visits to the rows
    are interleaved; each lasts until the clock of that row has settled, as in a long run. Columns:
    - ms, forward_ms, backward_ms: medians by device events; host_ms: what the host needs to launch both;
    - to_compile: ms over that of plain torch in BF16 under torch.compile;
    - saved_mb, saved_h: memory allocated after a forward over that before, without the output and copies of
      weights, in 10^6 bytes and in h bytes per token. The input is not counted, whoever keeps it;
    - weights_mb: copies of weights and buffers held between passes or made by a forward for its backward;
    - peak_mb: peak of both passes over what is held between them; gradients of all weights are in it;
    - tflops: of the layer's own products, attention's halved by causality;
    - floor_share: the floor over ms. Floor: the twelve FP8 products (one scale per tensor, fast
      accumulation), attention by the same backend, each measured alone, and `traffic()` at a copy's speed;
    - y_error, worst_grad_error: relative RMS against Megatron's BF16 layer, residuals taken out. A layer
      whose output is further off than rounding explains is not timed.
    Without a GPU, or with --quick: tiny shapes. On a CPU times mean nothing and the input counts as saved.
    """
    small = arguments.quick or not torch.cuda.is_available()
    names = arguments.shape or [name for name in SHAPES if (name in TINY) == small]
    with one_process():
        for name in names:
            run_shape(name, SHAPES[name], arguments.rounds, table, arguments.rows)
            gc.collect()
            forget()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    table.path.parent.mkdir(parents=True, exist_ok=True)
    plot(table.rows, table.path.with_suffix(".png"))
