"""Lets Megatron run where there is no GPU, with gloo in the place of NCCL: for quickstarts and tests.

Megatron asks `torch.cuda` where it is, which random state to fork and when to wait, without asking first
whether there is a GPU. `enable()` gives these questions CPU answers; `disable()` takes them back.

Replaced are: `torch.cuda.current_device` and `current_stream` (the CPU's only ones), `torch.cuda.synchronize`
(nothing to wait for), the CUDA random states (the CPU's), Megatron's own reader and writer of those, and
torch.compile's switch (compiling Megatron's small fused functions takes longer than a CPU run).
This covers process groups, building a model, forward, backward and Megatron's data parallel wrapper. Its
schedules and optimizers name `device="cuda"` literally, and context parallelism pins memory: inside
`no_cuda()` such tensors are ordinary ones of the CPU.
"""

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

# (owner, attribute, the original), in the order of replacement; empty while disabled
_replaced: list[tuple[object, str, object]] = []
_announced = False


def _replace(owner: object, name: str, value: object) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def enabled() -> bool:
    """Whether the replacements are in place."""
    return bool(_replaced)


def enable() -> bool:
    """Replaces what keeps Megatron off a CPU; does nothing where there is a GPU. Returns `enabled()`."""
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
