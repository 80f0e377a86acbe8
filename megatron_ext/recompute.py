"""FP8 inputs of what Megatron recomputes: `--recompute-granularity full`, uniform or block, and the modules
core_attn, mlp, moe and shared_experts of selective recompute.

Megatron's `tensor_parallel.checkpoint` looks up the class that keeps the inputs, `CheckpointFunction`, in its
module. `install()` puts a subclass of it there, around whose saving `coat_kernels.saved` packs activations:
half of BF16's bytes. The forward pass stays what it is, and so do the random states, which Megatron keeps and
replays itself; backward computes from inputs rounded to E4M3. With `--distribute-saved-activations` each
tensor-parallel rank keeps the codes of its share.
"""

import functools

from coat_ds.patches import Patch
from coat_kernels.saved import GROUP_SIZES, packing_function

CHECKPOINT = Patch(
    "Megatron's recompute",
    "megatron-core",
    "megatron.core.tensor_parallel.random:CheckpointFunction",
    "inputs of recomputed regions are kept in FP8",
    parameters=("ctx", "run_function", "distribute_saved_activations", "args"),
    method="forward",
    expected="a class that checkpoint() looks up, with forward",
    used_by="checkpoint",
    way_out="or drop coat.checkpointing.compress",
)


def installed() -> bool:
    """Whether Megatron keeps inputs in FP8."""
    return CHECKPOINT.is_applied()


def install(group_size: int = 128) -> None:
    """From now on Megatron's checkpoints keep their inputs in FP8 groups of `group_size`: 16, 32, 64 or 128;
    does nothing a second time.

    Raises ValueError for another group size, RuntimeError if this Megatron is not as expected.
    """
    if group_size not in GROUP_SIZES:
        listed = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"recompute.install: group_size must be one of {listed}; found {group_size!r}")
    CHECKPOINT.apply(functools.partial(packing_function, group_size=group_size))


def uninstall() -> None:
    """Undoes `install`."""
    CHECKPOINT.remove()
