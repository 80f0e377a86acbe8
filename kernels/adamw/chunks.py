"""Cuts tensors into chunks and lists the chunks in a table on the device, which the kernel reads."""

import functools
from collections.abc import Sequence

import numpy as np
import torch

from coat_kernels.adamw.kernel import COLUMNS, POINTERS, ROWS
from coat_kernels.adamw.options import AdamWOptions
from coat_kernels.codecs.codec import GROUP_SIZE

# Tiles per chunk, powers of two; each size has its own launch. The larger the chunk, the longer its row of
# the table stays in the caches of the multiprocessors.
CHUNKS = (2**14, 2**11, 2**8, 2**5)

# which pointers are of scales and exponents
PER_GROUP = np.isin(np.arange(POINTERS), (3, 4, 6, 7))


def chunk_table(
    pointers: np.ndarray,
    group_bytes: np.ndarray,
    first: np.ndarray,
    numels: np.ndarray,
    tiles: int,
) -> np.ndarray:
    """Cuts `numels` elements of each tensor, starting at element `first`, into chunks of `tiles` tiles.

    Returns int64 [chunks, COLUMNS]. A row holds `pointers` of the tensor (parameter, gradient, both storages
    and the remainder, [tensors, POINTERS]), advanced to the chunk's start by `group_bytes` [POINTERS]
    bytes per group; the number of elements from there to the tensor's end; the tensor's index; and a zero,
    with which every row begins at a multiple of 16 bytes.
    """
    chunk = tiles * ROWS * GROUP_SIZE
    chunks = -(-numels // chunk)
    tensor = np.repeat(np.arange(len(chunks)), chunks)
    within = (np.arange(len(tensor)) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * chunk
    start = first[tensor] + within
    table = np.zeros((len(tensor), COLUMNS.value), dtype=np.int64)
    table[:, :POINTERS] = pointers[tensor] + (start // GROUP_SIZE)[:, None] * group_bytes
    table[:, POINTERS : POINTERS + 2] = np.stack((numels[tensor] - within, tensor), axis=1)
    return table


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    on_cpu = torch.from_numpy(array)
    return on_cpu.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_cpu


@functools.lru_cache(maxsize=8)
def launches(
    pointers: bytes,
    element_bytes: tuple[int, ...],
    numels: tuple[int, ...],
    device: torch.device,
) -> tuple[list[tuple[torch.Tensor, int]], torch.cuda.Event | None]:
    """Returns the tables on the device, largest chunks first, each with its tiles per chunk, and the event of
    their upload.

    Cached for tensors that keep their addresses: later steps upload nothing, and CUDA graphs can hold the
    tables.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "CoatAdamW: a step captured in a CUDA graph must have run before on the same tensors. Warm up "
            "with gradients that stay in place: zero_grad(set_to_none=False)."
        )
    table = np.frombuffer(pointers, dtype=np.int64).reshape(-1, POINTERS)
    # scales and exponents have one entry per group, the other tensors one per element
    group_bytes = np.where(PER_GROUP, 1, GROUP_SIZE) * np.array(element_bytes, dtype=np.int64)
    remaining = np.array(numels, dtype=np.int64)
    done = np.zeros_like(remaining)
    tile = ROWS * GROUP_SIZE
    cut = []
    for tiles in (*CHUNKS, 1):
        # the smallest chunks cover all remaining full tiles; single tiles then cover the ends of the tensors
        unit = {CHUNKS[-1]: tile, 1: 1}.get(tiles, tiles * tile)
        part = remaining // unit * unit
        if part.any():
            cut.append((chunk_table(table, group_bytes, done, part, tiles), tiles))
            done, remaining = done + part, remaining - part
    if not cut:
        return [], None
    # one upload: launching a chunk of states in host memory takes the CPU longer than the copies take
    rows = _upload(np.concatenate([chunks for chunks, _ in cut]), device).split([len(c) for c, _ in cut])
    out = [(uploaded, tiles) for uploaded, (_, tiles) in zip(rows, cut, strict=True)]
    return out, torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def arrived(
    tables: list[tuple[torch.Tensor, int]], uploaded: torch.cuda.Event | None, device: torch.device
) -> list[tuple[torch.Tensor, int]]:
    """The tables of `launches`. The current stream waits for their upload before it reads them."""
    if uploaded is not None and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        # another stream may have uploaded them, and must not free them too early
        stream.wait_event(uploaded)
        for table, _ in tables:
            table.record_stream(stream)
    return tables


def corrections_of(
    steps: Sequence[float] | torch.Tensor, options: AdamWOptions, device: torch.device
) -> torch.Tensor:
    """FP32 [tensors, CORRECTIONS]: for each tensor 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t) and t."""
    if isinstance(steps, torch.Tensor):
        t, beta1, beta2 = steps.double(), options.beta1, options.beta2
        return torch.stack((1 / (1 - beta1**t), (1 - beta2**t).rsqrt(), t), dim=1).float()
    rows = [(*(1 / c for c in options.bias_corrections(t)), t) for t in steps]
    return _upload(np.array(rows, dtype=np.float32), device)
