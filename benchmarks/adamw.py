"""The optimizer step: ours, its peers, and a copy of the bytes that ours has to move."""

import gc
import importlib
from collections.abc import Callable, Iterable

import torch

from benchmarks.harness import Table, benchmark, measure
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


def bytes_per_param(master: int, grad: int, states: float, weight: int = 0) -> float:
    """Bytes a step must move: everything read once, and all but the gradient written once."""
    return 2 * master + grad + 2 * states + weight


def ours(params):
    return CoatAdamW(params, **OPTIONS)


def torch_fused(params):
    return torch.optim.AdamW(params, **OPTIONS, fused=True)


def _peer(module: str, name: str, **more) -> Callable:
    def build(params):
        return getattr(importlib.import_module(module), name)(params, **OPTIONS, **more)

    return build


# name -> (builder, dtype of parameters and gradients)
PEERS: dict[str, tuple[Callable, torch.dtype]] = {
    "torch fused": (torch_fused, torch.float32),
    "torchao fp8": (_peer("torchao.optim", "AdamWFp8"), torch.float32),
    "torchao 8-bit": (_peer("torchao.optim", "AdamW8bit"), torch.float32),
    "flashoptim": (_peer("flashoptim", "FlashAdamW"), torch.bfloat16),
    "TE fp8": (
        _peer(
            "transformer_engine.pytorch.optimizers",
            "FusedAdam",
            exp_avg_dtype=torch.uint8,
            exp_avg_sq_dtype=torch.uint8,
        ),
        torch.float32,
    ),
}


def tensors(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters with gradients, filled with random values: zeros would run faster than real data."""
    params = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype).mul_(0.02))
        p.grad = torch.randn(shape, device="cuda", dtype=dtype).mul_(1e-3)
        params.append(p)
    return params


def copy_ms(numel: int) -> float:
    """A device copy that reads and writes as many bytes together as our step moves."""
    source = torch.empty(int(numel * bytes_per_param(4, 4, 2.078) / 2), dtype=torch.uint8, device="cuda")
    source.random_()
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source)).median


@benchmark
def adamw(arguments, table: Table) -> None:
    """AdamW step over one flat tensor and over the parameter lists of a 1B and a 7B Llama."""
    for name, shapes in SHAPES.items():
        if arguments.quick:
            shapes = [(2**20 + 1,)] if name == "flat" else shapes[:8]
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        copy = copy_ms(numel)
        table.add(params=name, optimizer="copy", ms=copy, to_copy=1.0, ns_per_kparam=1e9 * copy / numel)
        for peer, (build, dtype) in {"ours": (ours, torch.float32), **PEERS}.items():
            params = tensors(shapes, dtype)
            held = torch.cuda.memory_allocated()
            try:
                optimizer = build(params)
                optimizer.step()
            except ImportError:
                table.add(params=name, optimizer=f"{peer} (absent)")
                continue
            torch.cuda.synchronize()
            state = (torch.cuda.memory_allocated() - held) / numel
            timing = measure(optimizer.step)
            table.add(
                params=name,
                optimizer=peer,
                ms=timing.median,
                ms_p20=timing.low,
                ms_p80=timing.high,
                to_copy=timing.median / copy,
                ns_per_kparam=1e9 * timing.median / numel,
                state_bytes=state,
                peak_mb=timing.peak / 1e6,
            )
            del optimizer, params
            gc.collect()
            torch.cuda.empty_cache()
