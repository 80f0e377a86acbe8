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
"""

import contextlib
import logging
from collections.abc import Iterator
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
    for patch in reversed(ON_CPU):
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
