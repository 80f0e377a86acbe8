"""FP8 inputs of the regions that `torch.utils.checkpoint` recomputes."""

import contextlib
from collections.abc import Iterator

import torch.utils.checkpoint

from coat_ds.patches import Patch
from coat_kernels.autograd.checkpointing import (
    compressing_function,
    compressing_generator,
    context_open,
    in_region,
)

# the function that non-reentrant `torch.utils.checkpoint.checkpoint` calls; torch 2.14 renamed it
_NAME = "_checkpoint_without_reentrant_generator"
_NAME += "_impl" if hasattr(torch.utils.checkpoint, f"{_NAME}_impl") else ""
GENERATOR, FUNCTION = (
    Patch(
        "compressed checkpoints",
        f"torch.utils.checkpoint:{name}",
        "inputs of recomputed regions are saved in FP8 inside `compressed_checkpoints`",
        expected=expected,
        used_by="checkpoint",
        remedy="or drop coat.fp8_activation_checkpointing",
    )
    for name, expected in ((_NAME, "a generator"), ("CheckpointFunction", "a class"))
)


@contextlib.contextmanager
def compressed_checkpoints() -> Iterator[None]:
    """A context for a forward pass, in which `torch.utils.checkpoint` (reentrant or not) saves inputs in FP8.

    Backward may run outside of the context. The context applies only to the current thread or task, and an
    exception ends it.

    Raises PatchError for an unknown torch.
    """
    GENERATOR.apply(compressing_generator)
    FUNCTION.apply(compressing_function)
    was_open = context_open.set(True)
    # a generator that an exception interrupted is closed only after this context has ended
    inside = in_region.set(in_region.get())
    try:
        yield
    finally:
        in_region.reset(inside)
        context_open.reset(was_open)
