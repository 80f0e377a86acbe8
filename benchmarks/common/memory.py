"""Memory of tensors, on a GPU or on a CPU."""

import gc
from typing import TypeVar

import torch

T = TypeVar("T")


def requested_bytes() -> int:
    """Memory held on the GPU, without what the allocator rounds up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def release() -> None:
    """Drops unreferenced objects, and frees the allocator's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def held_bytes() -> int:
    """What all tensors take: on a GPU as requested from torch's allocator, on a CPU those known to Python."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        # what a second stream has used counts as held until the allocator looks again
        torch.cuda.empty_cache()
        return requested_bytes()
    gc.collect()
    # type(), since some objects answer isinstance with a warning
    tensors = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    storages = (storage for x in tensors for storage in _storages(x))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _storages(x: torch.Tensor):
    # a wrapper has none; its parts are tensors of their own
    if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided and not x.is_meta:
        yield x.untyped_storage()


def peak_bytes() -> int:
    """The most that was requested since `torch.cuda.reset_peak_memory_stats()`; 0 without a GPU."""
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] if torch.cuda.is_available() else 0
