"""Runs a script of Megatron-LM unchanged on a CPU, as `python -m tests.megatron_ext.scripted SCRIPT ...`,
with `--distributed-backend gloo` among its arguments. The script finds an idle GPU of 16 GiB in each process.
Megatron is the checkout that contains the script."""

import contextlib
import os
import runpy
import sys
from collections import defaultdict
from types import SimpleNamespace

import torch

from megatron_ext import cpu

_DEVICE = SimpleNamespace(name="CPU", major=9, minor=0, total_memory=16 * 2**30, multi_processor_count=1)


def _answering(answer):
    # a function for each name: torch.compile refuses a function that has two
    return lambda *args, **kwargs: answer


# the functions of `torch.cuda` that Megatron-LM's scripts call
_ON_CUDA = {
    "is_available": _answering(True),
    "is_initialized": _answering(True),
    "is_current_stream_capturing": _answering(False),
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    "get_device_name": _answering(_DEVICE.name),
    "get_device_capability": _answering((_DEVICE.major, _DEVICE.minor)),
    "get_device_properties": _answering(_DEVICE),
    "mem_get_info": _answering((_DEVICE.total_memory, _DEVICE.total_memory)),
    "memory_stats": _answering(defaultdict(int)),
    "device_memory_used": _answering(0),
    "stream": _answering(contextlib.nullcontext()),
    "Event": cpu._Nothing,
    "current_stream": _answering(cpu._Nothing()),
}
for _name in ("set_device", "set_stream", "empty_cache", "reset_peak_memory_stats"):
    _ON_CUDA[_name] = _answering(None)
for _kind in ("memory_allocated", "memory_reserved"):
    _ON_CUDA |= {_kind: _answering(0), f"max_{_kind}": _answering(0)}


def run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    cpu.enable()
    for name, function in _ON_CUDA.items():
        setattr(torch.cuda, name, function)
    # data loaders would pin memory for it
    torch.accelerator.is_available = lambda: False
    # megatron-core 0.16 queries the CUDA compiler's version
    with contextlib.suppress(ImportError):
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None
    with cpu.no_cuda():
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1], sys.argv[2:])
