"""Lets Megatron run where there is no GPU, with gloo in the place of NCCL: for quickstarts and tests.

Megatron asks `torch.cuda` for its device, its random states and its streams without checking that there is a
GPU. `enable()` patches these functions with CPU answers; `disable()` undoes that.

Patched are: `torch.cuda.current_device` and `current_stream` (the CPU's), `torch.cuda.synchronize` (nothing
to wait for), the CUDA random states (the CPU's), Megatron's own reader and writer of those, and
torch.compile's switch (compiling Megatron's small fused functions takes longer than a CPU run). This covers
process groups, building a model, forward, backward and Megatron's data parallel wrapper. Its schedules and
optimizers name `device="cuda"` literally, and context parallelism pins memory: inside `no_cuda()` such
tensors are ordinary ones on the CPU.

Megatron-LM's own scripts refuse to start without a GPU. `python -m megatron_ext.cpu pretrain_gpt.py ...`, or
`torchrun -m megatron_ext.cpu pretrain_gpt.py ...`, runs one unchanged, with `--distributed-backend gloo`
among its arguments. It tells the script that each process has an idle GPU of 16 GiB.
"""

import contextlib
import importlib
import logging
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

# (owner, attribute, the original), in the order of patching; empty while disabled
_replaced: list[tuple[object, str, object]] = []
_announced = False


def _replace(owner: object, name: str, value: object) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def enabled() -> bool:
    """Whether the patches are in place."""
    return bool(_replaced)


def enable() -> bool:
    """Patches what keeps Megatron off a CPU; does nothing where there is a GPU. Returns `enabled()`."""
    global _announced
    if _replaced or torch.cuda.is_available():
        return enabled()

    from megatron.core.tensor_parallel import random
    from torch import _dynamo

    device = torch.device("cpu")
    _replace(torch.cuda, "current_device", lambda: device)
    _replace(torch.cuda, "current_stream", lambda device=None: torch.cpu.current_stream())
    _replace(torch.cuda, "synchronize", lambda device=None: None)
    _replace(torch.cuda, "manual_seed", lambda seed: torch.random.manual_seed(seed))
    _replace(torch.cuda, "get_rng_state", lambda device=None: torch.random.get_rng_state())
    _replace(torch.cuda, "set_rng_state", lambda state, device=None: torch.random.set_rng_state(state))
    _replace(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.random.get_rng_state())
    _replace(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.random.set_rng_state(state))
    _replace(_dynamo.config, "disable", True)

    if not _announced:
        _announced = True
        names = ", ".join(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in _replaced)
        logger.warning("no GPU found: Megatron runs on the CPU. Replaced: %s", names)
    return True


def disable() -> None:
    """Puts everything back as it was before `enable()`."""
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


class _NoCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers know parameters by the names of CUDA's types
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_cuda() -> Iterator[None]:
    """Makes tensors on the CPU that are asked for on a GPU, or pinned; to be used after `enable()`."""
    with _NoCuda() if enabled() else contextlib.nullcontext():
        yield


class _Nothing:
    """A stream or an event of the CPU, where work is done when a call returns."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def _pretend() -> None:
    """Patches what Megatron-LM's scripts ask of a GPU; `disable()` undoes this too."""
    gib = 2**30
    properties = SimpleNamespace(name="CPU", major=9, minor=0, total_memory=16 * gib, multi_processor_count=1)
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "get_device_name": properties.name,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_properties": properties,
        "mem_get_info": (properties.total_memory, properties.total_memory),
        "memory_stats": defaultdict(int),
        **dict.fromkeys(("set_device", "set_stream", "empty_cache", "reset_peak_memory_stats")),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), 0),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved", "device_memory_used"), 0),
        "stream": contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        _replace(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    for name in ("Stream", "Event"):
        _replace(torch.cuda, name, _Nothing)
    _replace(torch.cuda, "current_stream", lambda device=None: _Nothing())
    # data loaders would pin memory for it
    _replace(torch.accelerator, "is_available", lambda: False)
    # asks the CUDA compiler for its version; gone since 0.17
    with contextlib.suppress(ImportError):
        _replace(importlib.import_module("megatron.legacy.fused_kernels"), "load", lambda args: None)


def run_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Runs the script at `path`, one of Megatron-LM's, as `python path *arguments` does, on the CPU if there
    is no GPU. Megatron is the checkout that the script lies in.
    """
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    if enable():
        _pretend()
    with no_cuda():
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    # the imported module, whose state others see, and not this copy of it
    from megatron_ext import cpu

    cpu.run_script(sys.argv[1], sys.argv[2:])
