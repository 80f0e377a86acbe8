"""FP8 inputs for what Megatron recomputes: `--recompute-granularity full`, uniform or block, and the modules
core_attn, mlp, moe and shared_experts of selective recompute.

Megatron's `tensor_parallel.checkpoint` looks up the class that saves the inputs, `CheckpointFunction`, in
its module. `install()` patches that name with a subclass that compresses activations
(`coat_kernels.autograd.checkpointing`) while they are saved. With `--distribute-saved-activations` each
tensor-parallel rank saves the codes of its share.
"""

import functools

from coat_ds.patches import Patch
from coat_kernels.autograd.checkpointing import compressing_function

CHECKPOINT = Patch(
    "Megatron's recompute",
    "megatron.core.tensor_parallel.random:CheckpointFunction",
    "inputs of recomputed regions are kept in FP8",
    parameters=("ctx", "run_function", "distribute_saved_activations", "args"),
    expected="a class that checkpoint() looks up, with forward",
    used_by="checkpoint",
    remedy="or drop coat.fp8_activation_checkpointing",
)


def install() -> None:
    """From now on Megatron's recompute saves inputs in FP8. A second call does nothing.

    Raises RuntimeError if this Megatron is not as expected.
    """
    CHECKPOINT.apply(functools.partial(compressing_function, always=True))
