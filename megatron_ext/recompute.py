"""FP8 inputs for what Megatron recomputes: `--recompute-granularity full`, uniform or block, and the modules
core_attn, mlp, moe and shared_experts of selective recompute.

Megatron's `tensor_parallel.checkpoint` looks up the class that saves the inputs, `CheckpointFunction`, in its
module. `install()` patches that name with a subclass that packs activations (`coat_kernels.saved`) while they
are saved: half of BF16's bytes. The forward pass does not change, nor do the random states, which Megatron
saves and replays itself. Backward recomputes from inputs rounded to E4M3. With
`--distribute-saved-activations` each tensor-parallel rank saves the codes of its share.
"""

import inspect
import logging

import torch
from megatron import core
from megatron.core.tensor_parallel import random

from coat_kernels.saved import GROUP_SIZES, packing_function

logger = logging.getLogger(__name__)

_NAME = "CheckpointFunction"
_PARAMETERS = ["ctx", "run_function", "distribute_saved_activations", "args"]

_original: type[torch.autograd.Function] | None = None


def installed() -> bool:
    """Whether Megatron saves inputs in FP8."""
    return _original is not None


def install(group_size: int = 128) -> None:
    """From now on Megatron's recompute saves inputs in FP8 groups of `group_size`: 16, 32, 64 or 128. Does
    nothing a second time.

    Raises ValueError for another group size, RuntimeError if this Megatron is not as expected.
    """
    global _original
    if group_size not in GROUP_SIZES:
        listed = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"recompute.install: group_size must be one of {listed}; found {group_size!r}")
    if _original is not None:
        return
    cls = getattr(random, _NAME, None)
    found = list(inspect.signature(cls.forward).parameters) if isinstance(cls, type) else None
    if found != _PARAMETERS or _NAME not in random.checkpoint.__code__.co_names:
        raise RuntimeError(
            f"{random.__name__}.{_NAME}: expected a class that checkpoint() looks up, with forward"
            f"({', '.join(_PARAMETERS)}); found {found} in megatron-core {core.__version__}. Drop "
            "coat.checkpointing.compress, or use 0.16.1 to 0.19."
        )
    _original = cls
    setattr(random, _NAME, packing_function(cls, group_size))
    logger.info("COAT checkpoints: replaced %s.%s", random.__name__, _NAME)


def uninstall() -> None:
    """Undoes `install`."""
    global _original
    if _original is not None:
        setattr(random, _NAME, _original)
        _original = None
