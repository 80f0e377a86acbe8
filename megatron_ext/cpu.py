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

from coat_ds.log import say
from coat_ds.patches import Patch

_WHAT = "Megatron on a CPU"
_WHY = "Megatron calls it without a check for a GPU"
_RANDOM = "megatron.core.tensor_parallel.random"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


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


def _answers() -> dict[Patch, Any]:
    """The replacement of each patched function on a CPU."""
    device = torch.device("cpu")
    get, set_ = torch.random.get_rng_state, torch.random.set_rng_state
    return dict(
        zip(
            ON_CPU,
            (
                lambda: device,
                lambda device=None: torch.cpu.current_stream(),
                lambda device=None: None,
                _Nothing,
                lambda seed: torch.random.manual_seed(seed),
                lambda device=None: get(),
                lambda state, device=None: set_(state),
                lambda *args, **kwargs: get(),
                lambda state, *args, **kwargs: set_(state),
                _sizes,
                True,
            ),
            strict=True,
        )
    )


ON_CPU = (
    *(
        Patch(_WHAT, "torch", f"torch.cuda:{name}", _WHY, parameters=parameters)
        for name, parameters in (
            ("current_device", ()),
            ("current_stream", ("device",)),
            ("synchronize", ("device",)),
            ("Stream", None),
            ("manual_seed", ("seed",)),
            ("get_rng_state", ("device",)),
            ("set_rng_state", ("new_state", "device")),
        )
    ),
    *(
        Patch(_WHAT, "megatron-core", f"{_RANDOM}:{name}", _WHY, parameters=(*parameters, "..."))
        for name, parameters in (
            ("_get_cuda_rng_state", ("device",)),
            ("_set_cuda_rng_state", ("new_state", "device")),
        )
    ),
    Patch(
        _WHAT,
        "megatron-core",
        f"{_DISPATCHER}:maybe_move_tensor_to_cpu",
        "it leaves sizes on the CPU as tensors, which no message accepts",
        parameters=("tensor", "as_numpy", "record_stream"),
        used_by="MoEAlltoAllTokenDispatcher",
    ),
    Patch(
        _WHAT,
        "torch",
        "torch._dynamo.config:disable",
        "compiling Megatron's small functions takes longer than a CPU run",
        expected="a switch",
    ),
)


def enabled() -> bool:
    """Whether the patches are in place."""
    return ON_CPU[0].is_applied()


_announced = False


def enable() -> bool:
    """Patches what stops Megatron on a CPU; does nothing if there is a GPU. Returns `enabled()`."""
    global _announced
    if enabled() or torch.cuda.is_available():
        return enabled()
    for patch, answer in _answers().items():
        patch.apply(lambda _, answer=answer: answer)
    if not _announced:
        _announced = True
        names = ", ".join(patch.symbol for patch in ON_CPU)
        say(f"no GPU found: Megatron runs on the CPU. Replaced: {names}", logging.WARNING)
    return True


def disable() -> None:
    """Undoes `enable()`."""
    for patch in (*reversed(IN_SCRIPTS), *reversed(ON_CPU)):
        patch.remove()


class _NoCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers compare parameter types with the names of CUDA's types
            return func(*args).replace("torch.", "torch.cuda.")
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


_SCRIPTS = "Megatron-LM's scripts on a CPU"


def _pretended() -> dict[str, Any]:
    """The return values of `torch.cuda`'s functions for Megatron-LM's scripts, by name of the function."""
    gib = 2**30
    properties = SimpleNamespace(name="CPU", major=9, minor=0, total_memory=16 * gib, multi_processor_count=1)
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
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
    functions = {name: _answering(answer) for name, answer in answers.items()}
    return functions | {"Event": _Nothing, "current_stream": lambda device=None: _Nothing()}


def _answering(answer: Any) -> Callable:
    return lambda *args, **kwargs: answer


IN_SCRIPTS = (
    *(
        Patch(_SCRIPTS, "torch", f"torch.cuda:{name}", "Megatron-LM's scripts refuse to start without a GPU")
        for name in _pretended()
    ),
    Patch(
        _SCRIPTS,
        "torch",
        "torch.accelerator:is_available",
        "data loaders would pin memory for it",
        parameters=(),
    ),
    Patch(
        _SCRIPTS,
        "megatron-core",
        "megatron.legacy.fused_kernels:load",
        "queries the CUDA compiler's version; gone since 0.17",
        parameters=("args",),
        optional=True,
    ),
)


def _pretend() -> None:
    """Patches the GPU queries of Megatron-LM's scripts; `disable()` undoes these patches too."""
    *on_cuda, accelerator, fused_kernels = IN_SCRIPTS
    for patch, answer in zip(on_cuda, _pretended().values(), strict=True):
        patch.apply(lambda _, answer=answer: answer)
    accelerator.apply(lambda _: lambda: False)
    with contextlib.suppress(ImportError):
        fused_kernels.apply(lambda _: lambda args: None)


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
