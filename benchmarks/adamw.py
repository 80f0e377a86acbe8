"""The optimizer step: ours, its peers, and a copy of the bytes that ours has to move."""

import argparse
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.memory import release, requested_bytes
from benchmarks.common.timing import copy_bandwidth, measure
from coat_ds import CoatAdamW

FLAT = 2**29
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def llama_sizes(layers: int, hidden: int, ffn: int, vocabulary: int = 32000) -> list[tuple[int, ...]]:
    """Shapes of a Llama's parameters as Hugging Face names them: seven matrices and two norms a layer."""
    square, wide = (hidden, hidden), (ffn, hidden)
    layer = [square] * 4 + [wide, wide, (hidden, ffn), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * layers, (hidden,), (vocabulary, hidden)]


SHAPES = {
    "flat": [(FLAT,)],
    "llama-1b": llama_sizes(22, 2048, 5632),
    "llama-7b": llama_sizes(32, 4096, 11008),
}


def ours(params, **options):
    return CoatAdamW(params, **OPTIONS | options, min_numel=0)


def torch_fused(params):
    return torch.optim.AdamW(params, **OPTIONS, fused=True)


def _peer(module: str, name: str, **more) -> Callable:
    def build(params):
        return getattr(importlib.import_module(module), name)(params, **OPTIONS, **more)

    return build


FP32, BF16 = torch.float32, torch.bfloat16
# two codes, and nine bytes of metadata a group, read and written; the paper's have ten
STATES, EXPANDED_STATES = 2 * (2 + 9 / 128), 2 * (2 + 10 / 128)
EXPANDED = {"exp_avg_format": "fp8_expanded", "exp_avg_sq_format": "fp8_expanded"}


class Case(NamedTuple):
    """One row: how the optimizer is built, on which types, and how many bytes a parameter it must move."""

    build: Callable
    param: torch.dtype
    grad: torch.dtype
    bytes: float
    step: dict[str, torch.Tensor] = {}


def cases() -> dict[str, Case]:
    scale = {"grad_scale": torch.ones(1, device="cuda")}
    return {
        "ours": Case(ours, FP32, FP32, 8 + 4 + STATES),
        # second moments are dithered at this beta2
        "ours, dithered": Case(functools.partial(ours, betas=(0.9, 0.999)), FP32, FP32, 8 + 4 + STATES),
        "ours, expanded": Case(functools.partial(ours, **EXPANDED), FP32, FP32, 8 + 4 + EXPANDED_STATES),
        "ours, expanded, log8 dithered": Case(
            functools.partial(ours, exp_avg_format="fp8_expanded", betas=(0.9, 0.999)),
            FP32,
            FP32,
            8 + 4 + EXPANDED_STATES,
        ),
        "ours, BF16 gradient": Case(ours, FP32, BF16, 8 + 2 + STATES),
        "ours, gradient scale": Case(ours, FP32, FP32, 8 + 4 + STATES, scale),
        "ours, BF16 exact": Case(ours, BF16, BF16, 4 + 4 + 2 + STATES),
        "ours, BF16 stochastic": Case(
            functools.partial(ours, bf16_params="stochastic"), BF16, BF16, 4 + 2 + STATES
        ),
        "torch fused": Case(torch_fused, FP32, FP32, 8 + 4 + 16),
        "torchao fp8": Case(_peer("torchao.optim", "AdamWFp8"), FP32, FP32, 8 + 4 + 4 * (1 + 4 / 256)),
        "torchao 8-bit": Case(_peer("torchao.optim", "AdamW8bit"), FP32, FP32, 8 + 4 + 4 * (1 + 4 / 256)),
        # BF16 weights with 8 bits of correction, groups of 32 with FP16 scales
        "flashoptim": Case(_peer("flashoptim", "FlashAdamW"), BF16, BF16, 6 + 2 + 4 * (1 + 2 / 32)),
        "TE fp8": Case(
            _peer(
                "transformer_engine.pytorch.optimizers",
                "FusedAdam",
                exp_avg_dtype=torch.uint8,
                exp_avg_sq_dtype=torch.uint8,
            ),
            FP32,
            FP32,
            8 + 4 + 4,
        ),
    }


def tensors(shapes: Iterable[tuple[int, ...]], case: Case) -> list[torch.nn.Parameter]:
    """Parameters with gradients, filled with random values: zeros would run faster than real data."""
    params = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=case.param).mul_(0.02))
        p.grad_dtype = case.grad
        p.grad = torch.randn(shape, device="cuda", dtype=case.grad).mul_(1e-3)
        params.append(p)
    return params


def copy_ms(numel: int) -> float:
    """A device copy that moves the bytes that our step reads and writes together, at most 16 GB."""
    size = numel * cases()["ours"].bytes
    return size / copy_bandwidth(min(int(size / 2), 2**33))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--optimizers", nargs="+", help="names of rows; default: all")


@benchmark(options=options)
def adamw(arguments, table: Table) -> None:
    """AdamW step over one flat tensor and over the parameter lists of a 1B and a 7B Llama.

    `to_copy` is the time over that of a device copy of the bytes that the row's own step must move;
    `peak_mb` is what the step adds to the memory in use, in 10^6 bytes.
    """
    chosen = cases()
    if arguments.optimizers is not None:
        if unknown := [name for name in arguments.optimizers if name not in chosen]:
            raise SystemExit(f"--optimizers: expected some of {', '.join(chosen)}; found {unknown[0]!r}")
        chosen = {name: chosen[name] for name in arguments.optimizers}
    for name in arguments.params:
        shapes = SHAPES[name]
        if arguments.quick:
            shapes = [(2**20 + 1,)] if name == "flat" else shapes[:8]
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        copy = copy_ms(numel)
        ours_bytes = cases()["ours"].bytes
        table.add(params=name, optimizer="copy", ms=copy, bytes=ours_bytes, to_copy=1.0)
        for peer, case in chosen.items():
            params = tensors(shapes, case)
            held = requested_bytes()
            try:
                optimizer = case.build(params)
                step = functools.partial(optimizer.step, **case.step)
                step()
                torch.cuda.synchronize()
                state = (requested_bytes() - held) / numel
                timing = measure(step, repeats=20)
            except (ImportError, torch.OutOfMemoryError) as error:
                reason = "absent" if isinstance(error, ImportError) else "out of memory"
                table.add(params=name, optimizer=f"{peer} ({reason})")
                continue
            finally:
                optimizer = step = params = None
                release()
            table.add(
                params=name,
                optimizer=peer,
                ms=timing.median,
                bytes=case.bytes,
                to_copy=timing.median / (copy * case.bytes / ours_bytes),
                ms_p20=timing.low,
                ms_p80=timing.high,
                ps_per_param=1e9 * timing.median / numel,
                state_bytes=state,
                peak_mb=timing.peak / 1e6,
            )
