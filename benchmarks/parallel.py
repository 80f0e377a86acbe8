"""Decoder layers over two tensor-parallel ranks, Megatron's BF16 ones and COAT's: time, memory, messages."""

import argparse
import functools
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.environment import device
from benchmarks.common.errors import relative_rms
from benchmarks.common.harness import Table, benchmark, reason
from benchmarks.common.layers import REFERENCE
from benchmarks.common.memory import held_bytes, peak_bytes, release
from benchmarks.common.plot import save
from benchmarks.common.shapes import LAYERS, LayerShape
from benchmarks.common.spawn import Rank, join, run_ranks
from benchmarks.common.timing import Timing, mark, measure, milliseconds, synchronize

RANKS = 2
WARMUP = 3
# passes timed at each visit of a round, after one that is not: the CPU runs ahead of the GPU by then
VISIT = 3


class Case(NamedTuple):
    """One row."""

    tensor_parallel: int
    sequence_parallel: bool
    layer: str


SPLITS = ((1, False), (2, False), (2, True))


def makers() -> dict[str, tuple]:
    """By name: a layer spec, and further fields of Megatron's config."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from megatron_ext import layer_specs

    made = {REFERENCE: (layer_specs.sdpa_layer_spec, {}), "COAT": (layer_specs.coat_layer_spec, {})}
    if HAVE_TE:
        te = get_gpt_layer_with_transformer_engine_spec()
        made["TE BF16"] = te, {}
        made["TE FP8 current"] = te, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    return made


class Message(NamedTuple):
    """What a rank hands to a collective of the tensor-parallel group."""

    kind: str
    """gather, scatter (of sums) or reduce."""
    dtype: torch.dtype
    numel: int

    @property
    def is_amax(self) -> bool:
        return self.kind == "reduce" and self.numel == 1

    def sent(self, ranks: int) -> float:
        """Bytes that this rank sends around a ring."""
        own = self.numel * self.dtype.itemsize * (ranks - 1)
        return own * {"gather": 1, "scatter": 1 / ranks, "reduce": 2 / ranks}[self.kind]

    def again(self, group: dist.ProcessGroup) -> Callable[[], object]:
        """The same message with other contents."""
        tensor = torch.zeros(self.numel, dtype=self.dtype, device=device())
        if self.kind == "reduce":
            return functools.partial(dist.all_reduce, tensor, group=group)
        if self.kind == "gather":
            whole = tensor.new_empty(group.size() * self.numel)
            return functools.partial(dist.all_gather_into_tensor, whole, tensor, group=group)
        part = tensor.new_empty(self.numel // group.size())
        return functools.partial(dist.reduce_scatter_tensor, part, tensor, group=group)


class Messages(TorchDispatchMode):
    """Counts the messages sent inside, by whomever."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[Message] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # arguments: outputs and inputs of the first two, or a list of tensors
        name = func._schema.name.removeprefix("c10d::")
        if name == "_allgather_base_":
            self.counts[Message("gather", args[1].dtype, args[1].numel())] += 1
        elif name == "_reduce_scatter_base_":
            self.counts[Message("scatter", args[1].dtype, args[1].numel())] += 1
        elif name == "allreduce_":
            self.counts.update(Message("reduce", t.dtype, t.numel()) for t in args[0])
        elif func._schema.name.startswith("c10d::"):
            # not counted, its bytes would be missing from the table
            raise NotImplementedError(f"benchmarks parallel: unexpected message {name}")
        return func(*args, **(kwargs or {}))


class Row:
    """A stack of layers under measurement."""

    def __init__(self, case: Case, shape: LayerShape, layers: int):
        from megatron_ext.model import ModelShape, build_gpt

        spec, config = makers()[case.layer]
        self.shape, self.layers = shape, layers
        before = held_bytes()
        model = build_gpt(
            ModelShape(layers, shape.hidden, shape.ffn, shape.heads, shape.groups),
            spec,
            seq_length=shape.sequence,
            vocab_size=128 * case.tensor_parallel,
            sequence_parallel=case.sequence_parallel,
            perform_initialization=False,
            **config,
        )
        # embedding and head are no part of the stack
        self.model, self.angles = model.decoder, model.rotary_pos_emb(shape.sequence)
        weights = torch.Generator(device()).manual_seed(0)
        with torch.no_grad():
            for p in self.model.parameters():
                if p.ndim == 2:
                    p.normal_(0, shape.hidden**-0.5, generator=weights)
        del model
        gc.collect()
        self.weights = held_bytes() - before
        tokens = shape.sequence // (case.tensor_parallel if case.sequence_parallel else 1)
        generator = torch.Generator(device()).manual_seed(1)
        self.x, self.grad = (
            torch.randn(tokens, shape.batch, shape.hidden, generator=generator, device=device()).bfloat16()
            for _ in range(2)
        )
        self.x.requires_grad_()
        for _ in range(WARMUP):
            self.run()
        self.times: list[tuple[float, float]] = []

    def forward(self) -> torch.Tensor:
        return self.model(hidden_states=self.x, attention_mask=None, rotary_pos_emb=self.angles)

    def run(self) -> tuple:
        """One pass; marks of its start, middle and end."""
        self.x.grad = None
        self.model.zero_grad()
        start = mark()
        y = self.forward()
        middle = mark()
        y.backward(self.grad)
        return start, middle, mark()

    def visit(self) -> None:
        """Times a few passes that follow each other as steps do."""
        # Transformer Engine's norm leaves cycles that hold what a pass kept
        gc.collect()
        self.run()
        marks = [self.run() for _ in range(VISIT)]
        synchronize()
        self.times += [(milliseconds(a, b), milliseconds(b, c)) for a, b, c in marks]

    def memory(self) -> dict[str, float]:
        """What a forward keeps, by 10^6 bytes and by h bytes per token of the whole sequence; the peak."""
        from megatron_ext.ledger import saved_bytes

        self.x.grad = None
        self.model.zero_grad()
        kept = saved_bytes(list(self.model.layers), self.forward).total
        held = held_bytes()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.run()
        synchronize()
        per_token = kept / (self.layers * self.shape.tokens * self.shape.hidden)
        return {
            "saved_mb": kept / 1e6,
            "saved_h": per_token,
            "peak_mb": max(0, peak_bytes() - held) / 1e6,
            "weights_mb": self.weights / 1e6,
        }

    def messages(self) -> Counter[Message]:
        """Of one pass."""
        with Messages() as sent:
            self.run()
        return sent.counts


def describe(counts: Counter[Message], group: dist.ProcessGroup) -> dict[str, float]:
    """How much is sent in 10^6 bytes, and how long it takes when nothing else runs."""
    kinds = {
        "gather": lambda m: m.kind == "gather",
        "sum": lambda m: m.kind != "gather" and not m.is_amax,
        "amax": lambda m: m.is_amax,
    }
    found: dict[str, float] = {}
    for name, belongs in kinds.items():
        chosen = {message: count for message, count in counts.items() if belongs(message)}
        if name == "amax":
            found["amax_count"] = sum(chosen.values())
        else:
            found[f"{name}_mb"] = sum(n * m.sent(group.size()) for m, n in chosen.items()) / 1e6
        calls = [call for m, n in chosen.items() for call in n * [m.again(group)]]

        def all_of_them(calls=calls):
            for call in calls:
                call()

        found[f"{name}_ms"] = measure(all_of_them, warmup=2, repeats=10).median if calls else 0.0
    return found


def largest(values: dict[str, float]) -> dict[str, float]:
    """The slower and the fuller of the ranks, by value."""
    tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return dict(zip(values, tensor.tolist(), strict=True))


def run_split(split: tuple[int, bool], shape: LayerShape, layers: int, rounds: int) -> list[dict]:
    """The rows of one way to split, measured in turn."""
    from megatron.core import parallel_state

    from megatron_ext.model import initialize_model_parallel

    initialize_model_parallel(split[0])
    group = parallel_state.get_tensor_model_parallel_group()
    measured: dict[str, Row] = {}
    rows: dict[str, dict] = {}
    expected = None
    for name in makers():
        case = Case(*split, name)
        rows[name] = case._asdict() | {"layers": layers}
        try:
            row = Row(case, shape, layers)
            with torch.no_grad():
                y = row.forward()
            expected = y if name == REFERENCE else expected
            rows[name] |= largest({"y_error": relative_rms(y, expected)} | row.memory())
            rows[name] |= describe(row.messages(), group)
            measured[name] = row
        # whatever a peer stumbles over it does on every rank, and the others go on
        except Exception as error:
            if name == REFERENCE:
                raise
            rows[name]["note"] = reason(error)
        del y
    for i in range(rounds):
        order = list(measured.values())
        for row in order if i % 2 == 0 else reversed(order):
            row.visit()
    for name, row in measured.items():
        forward, backward, both = (
            Timing(times, 0) for times in zip(*((a, b, a + b) for a, b in row.times), strict=True)
        )
        times = {"ms": both.median, "ms_p20": both.low, "ms_p80": both.high}
        rows[name] |= largest(times | {"forward_ms": forward.median, "backward_ms": backward.median})
    parallel_state.destroy_model_parallel()
    return list(rows.values())


def measure_splits(place: Rank, shape: LayerShape, layers: int, rounds: int) -> Iterator[dict]:
    """All rows; the same on every rank."""
    from megatron_ext import cpu

    # what is sent starts before the GEMM that hides it
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    cpu.enable()
    join(place)
    for split in SPLITS:
        yield from run_split(split, shape, layers, rounds)
        release()


def plot(rows: list[dict], path: Path) -> None:
    """Time, memory and messages, a bar for each row."""
    shown = [row for row in rows if "ms" in row]
    labels = [
        f"{row['layer']}\nTP {row['tensor_parallel']}" + (" + SP" if row["sequence_parallel"] else "")
        for row in shown
    ]
    colors = [f"C{sorted({r['layer'] for r in shown}).index(row['layer'])}" for row in shown]
    figure, axes = plt.subplots(1, 3, figsize=(13, 0.8 + 0.4 * len(shown)), layout="constrained", sharey=True)
    places = range(len(shown))
    axes[0].barh(places, [row["ms"] for row in shown], color=colors)
    alone = [[row[f"{name}_ms"] for row in shown] for name in ("gather", "sum", "amax")]
    left = [0.0] * len(shown)
    for name, times, shade in zip(("gathers", "sums", "amax"), alone, ("0.2", "0.5", "0.8"), strict=True):
        axes[0].barh(places, times, 0.3, left=left, color=shade, label=f"{name}, alone")
        left = [a + b for a, b in zip(left, times, strict=True)]
    axes[0].set_xlabel("forward and backward, ms")
    axes[0].legend(fontsize="small")
    axes[1].barh(places, [row["peak_mb"] for row in shown], color="lightgrey", label="peak")
    axes[1].barh(places, [row["saved_mb"] for row in shown], 0.4, color=colors, label="kept for backward")
    axes[1].set_xlabel("MB a rank")
    axes[1].legend(fontsize="small")
    axes[2].barh(places, [row["gather_mb"] for row in shown], color="0.2", label="gathers")
    axes[2].barh(
        places,
        [row["sum_mb"] for row in shown],
        left=[row["gather_mb"] for row in shown],
        color="0.6",
        label="sums",
    )
    axes[2].set_xlabel("sent by a rank, MB")
    axes[2].legend(fontsize="small")
    axes[0].set_yticks(places, labels)
    axes[0].invert_yaxis()
    save(figure, path)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="visits to each row (default %(default)s)")


@benchmark(needs_gpu=False, options=options)
def parallel(arguments, table: Table) -> None:
    """Decoder layers and a final norm over 2 tensor-parallel ranks, with and without sequence parallelism.

    Layers of Llama-2-7B's shape, 4 x 2048 tokens; with tensor_parallel 1 each rank does the whole work. BF16
    is Megatron's own layer with the same attention (scaled_dot_product_attention); rows of Transformer
    Engine, with its own attention, come where it can be imported. Rows of one split are visited in turn.
    Times and memory are those of the slower and the fuller rank. CUDA_DEVICE_MAX_CONNECTIONS is 1. Columns:
    - y_error: relative RMS of the output against BF16's at the same split;
    - saved_mb, saved_h: kept for backward by a rank, in 10^6 bytes, and in h bytes per layer and token of the
      whole sequence; seen is what goes through autograd's `save_for_backward`, Transformer Engine's too;
    - peak_mb: of forward and backward over what is held between them; weights_mb: of this rank;
    - gather_mb, sum_mb: what a rank sends in one forward and backward, counted, by rings: gathers of
      activations and gradients, and sums (all-reduce, or reduce-scatter);
    - amax_count: all-reduces of an amax;
    - gather_ms, sum_ms, amax_ms: all of these messages one after the other while nothing else runs;
    - ms, forward_ms, backward_ms: medians by device events.
    Without a GPU, or with --quick: a tiny shape; without a GPU gloo, no peaks, and times that mean nothing.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < RANKS:
        table.add(note=f"needs {RANKS} GPUs, found {torch.cuda.device_count()}")
        return
    shape = LAYERS["tiny" if arguments.quick or not on_gpu else "llama-2-7b"]
    rows, failure = run_ranks(measure_splits, RANKS, shape, arguments.layers, arguments.rounds)
    for row in rows[0]:
        table.add(**row)
    if failure:
        table.add(note=failure)
    plot(table.rows, table.path.with_suffix(".png"))
