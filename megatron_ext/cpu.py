"""Runs Megatron without a GPU, with gloo in place of NCCL: for quickstarts and tests.

Megatron calls `torch.cuda` for its device, its random states and its streams without a check for a GPU.
`enable()` patches these functions with their counterparts of the CPU; `disable()` undoes that.

The patches replace: `torch.cuda.current_device` and `current_stream` (the CPU's), `torch.cuda.Stream` and
`synchronize` (no-ops), the CUDA random states (the CPU's) and Megatron's own functions that read and write
them, the function that fetches the sizes of messages between experts, and torch.compile's switch (compiling
Megatron's small fused functions takes longer than a CPU run). This covers process groups, building a model,
forward, backward, the allgather and alltoall dispatchers and Megatron's data parallel wrapper. Megatron's
schedules and optimizers name `device="cuda"` literally, and context parallelism pins memory: inside
`no_cuda()` such tensors are ordinary CPU tensors.

Megatron-LM's own scripts refuse to start without a GPU. `python -m megatron_ext.cpu pretrain_gpt.py ...`, or
`torchrun -m megatron_ext.cpu pretrain_gpt.py ...`, runs a script unchanged, with `--distributed-backend gloo`
among its arguments. The script then finds an idle GPU of 16 GiB in each process.
"""

import contextlib
import functools
import logging
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from coat_ds.log import log_rank_0
from coat_ds.patches import Patch

_RANDOM = "megatron.core.tensor_parallel.random"


class _Nothing:
    """A CPU stream or event: all work is done when a call returns, so its methods do nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: _Nothing()


def _sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Sizes in the form in which a GPU returns them: Megatron does not convert a tensor that is on the
    CPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _on_cpu(target: str, replacement: Any, parameters: tuple | None = None, **options) -> tuple[Patch, Any]:
    options = {"why": "Megatron calls it without a check for a GPU", "parameters": parameters} | options
    return Patch("Megatron on a CPU", target, **options), replacement


# the replacement of each patched function
ON_CPU: dict[Patch, Any] = dict(
    (
        _on_cpu("torch.cuda:current_device", lambda: torch.device("cpu"), ()),
        _on_cpu("torch.cuda:current_stream", lambda device=None: torch.cpu.current_stream(), ("device",)),
        _on_cpu("torch.cuda:synchronize", lambda device=None: None, ("device",)),
        _on_cpu("torch.cuda:Stream", _Nothing),
        _on_cpu("torch.cuda:manual_seed", lambda seed: torch.random.manual_seed(seed), ("seed",)),
        _on_cpu("torch.cuda:get_rng_state", lambda device=None: torch.random.get_rng_state(), ("device",)),
        _on_cpu(
            "torch.cuda:set_rng_state",
            lambda new_state, device=None: torch.random.set_rng_state(new_state),
            ("new_state", "device"),
        ),
        _on_cpu(
            f"{_RANDOM}:_get_cuda_rng_state",
            lambda *args, **kwargs: torch.random.get_rng_state(),
            ("device", "..."),
        ),
        _on_cpu(
            f"{_RANDOM}:_set_cuda_rng_state",
            lambda new_state, *args, **kwargs: torch.random.set_rng_state(new_state),
            ("new_state", "device", "..."),
        ),
        _on_cpu(
            "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            _sizes,
            ("tensor", "as_numpy", "record_stream"),
            why="it leaves sizes on the CPU as tensors, which no message accepts",
            used_by="MoEAlltoAllTokenDispatcher",
        ),
        _on_cpu(
            "torch._dynamo.config:disable",
            True,
            why="compiling Megatron's small functions takes longer than a CPU run",
            expected="a switch",
        ),
    )
)


def enabled() -> bool:
    """Whether the patches are in place."""
    return next(iter(ON_CPU)).is_applied()


_announced = False


def enable() -> bool:
    """Patches what stops Megatron on a CPU; does nothing if there is a GPU. Returns `enabled()`."""
    global _announced
    if enabled() or torch.cuda.is_available():
        return enabled()
    for patch, replacement in ON_CPU.items():
        patch.apply(lambda _, replacement=replacement: replacement)
    if not _announced:
        _announced = True
        names = ", ".join(patch.symbol for patch in ON_CPU)
        log_rank_0(f"no GPU found: Megatron runs on the CPU. Replaced: {names}", logging.WARNING)
    return True


def disable() -> None:
    """Undoes `enable()`."""
    for patch in (*reversed(IN_SCRIPTS), *reversed(ON_CPU)):
        patch.remove()


class _NoCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        if not kwargs:
            # Megatron's optimizers compare parameter types with the names of CUDA's types
            named = func is torch.Tensor.type and len(args) == 1
            return func(*args).replace("torch.", "torch.cuda.") if named else func(*args)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_cuda() -> Iterator[None]:
    """Creates CPU tensors where code requests GPU or pinned tensors; use it after `enable()`."""
    with _NoCuda() if enabled() else contextlib.nullcontext():
        yield


def _answering(answer: Any) -> Callable:
    return lambda *args, **kwargs: answer


_GIB = 2**30
_DEVICE = SimpleNamespace(name="CPU", major=9, minor=0, total_memory=16 * _GIB, multi_processor_count=1)
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
    # a function for each name: torch.compile refuses a function that has two
    **{
        name: _answering(None)
        for name in ("set_device", "set_stream", "empty_cache", "reset_peak_memory_stats")
    },
    **{
        name: _answering(0)
        for name in (
            *("memory_allocated", "max_memory_allocated", "device_memory_used"),
            *("memory_reserved", "max_memory_reserved"),
        )
    },
    "stream": _answering(contextlib.nullcontext()),
    "Event": _Nothing,
    "current_stream": _answering(_Nothing()),
}
_script = functools.partial(Patch, "Megatron-LM's scripts on a CPU")
IN_SCRIPTS: dict[Patch, Any] = {
    **{
        _script(f"torch.cuda:{name}", "Megatron-LM's scripts refuse to start without a GPU"): function
        for name, function in _ON_CUDA.items()
    },
    _script(
        "torch.accelerator:is_available", "data loaders would pin memory for it", parameters=()
    ): lambda: False,
    _script(
        "megatron.legacy.fused_kernels:load",
        "queries the CUDA compiler's version; gone since 0.17",
        parameters=("args",),
        optional=True,
    ): lambda args: None,
}


def _pretend() -> None:
    """Patches the GPU queries of Megatron-LM's scripts; `disable()` undoes these patches too."""
    for patch, replacement in IN_SCRIPTS.items():
        with contextlib.suppress(*((ImportError,) if patch.optional else ())):
            patch.apply(lambda _, replacement=replacement: replacement)


def run_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Runs the script at `path`, one of Megatron-LM's, as `python path *arguments` does, on the CPU if there
    is no GPU. Megatron is the checkout that contains the script.
    """
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    if enable():
        _pretend()
    with no_cuda():
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    # the imported module, whose state is shared, and not this copy of it
    from megatron_ext import cpu

    cpu.run_script(sys.argv[1], sys.argv[2:])
