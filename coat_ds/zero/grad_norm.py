"""The norm of ZeRO's gradients, and whether any is inf or NaN, by one operation over all gradients.

DeepSpeed reads one gradient after the other, in about ten launches each, and copies it to FP64. So the GPU
waits for the CPU and moves ten times the bytes.
"""

from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from coat_ds.patches import Patch, wrapping

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
NORM, NORM_STAGE_3 = (
    Patch(
        "gradient norm",
        f"{wrapper}.get_grad_norm_direct",
        "the norm of all gradients of a parameter group by one operation",
        parameters=parameters,
    )
    # DeepSpeed's profiling hides the signatures of stage 3
    for wrapper, parameters in ((STAGE_1_AND_2, ("gradients", "params", "norm_type")), (STAGE_3, None))
)
OVERFLOW = Patch(
    "gradient norm",
    f"{STAGE_1_AND_2}.has_overflow_partitioned_grads_serial",
    "gradients are read once for their norm and for inf and NaN",
    parameters=(),
)


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """L2 norms, summed in FP64 as in DeepSpeed, so that a norm is inf or NaN only if a gradient is."""
    return torch._foreach_norm(gradients, 2, dtype=torch.float64)


def batch_gradient_norms(wrapper) -> None:
    """Has ZeRO 1, 2 or 3 compute the norm of a parameter group's gradients by one operation. ZeRO 1 and 2
    read all gradients once for both the norm and the check for inf and NaN.

    wrapper: DeepSpeed's wrapper of the optimizer. A wrapper without these methods is not changed, and neither
    is the norm of gradients that are on the CPU with offloading.
    DeepSpeed still filters and reduces: its own method gets one vector of norms for each kind of parameter
    in place of the gradients. The result differs only by the order of FP64 sums.
    """
    if not hasattr(wrapper, "get_grad_norm_direct"):
        return
    # the norm of each gradient from the check: a step computes the total norm right after it
    known = WeakTensorKeyDictionary()
    if not hasattr(wrapper, "bit16_groups"):
        # ZeRO-3 checks its flat buffer
        NORM_STAGE_3.apply(wrapping(_norm_by_kinds, known), on=wrapper)
        return
    NORM.apply(wrapping(_norm_by_kinds, known), on=wrapper)
    OVERFLOW.apply(wrapping(_has_overflow, wrapper, known), on=wrapper)


def _norm_by_kinds(
    known: WeakTensorKeyDictionary, original: Callable, gradients, params, norm_type=2
) -> torch.Tensor:
    """DeepSpeed's function for the norm, called with one vector of norms for each kind of parameter."""
    from deepspeed.runtime.constants import PIPE_REPLICATED
    from deepspeed.runtime.utils import is_model_parallel_parameter

    # padding, which is zero, belongs to no parameter
    gradients = [g for g in gradients if not getattr(g, "_zero_padding", False)]
    if norm_type != 2:
        return original(gradients, params, norm_type)
    norms = [known.pop(g, None) for g in gradients]
    if any(found is None for found in norms):
        norms = _norms(gradients)
    alike: dict[tuple, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    # in DeepSpeed 0.18 padding at the end is not marked
    for found, p in zip(norms, params, strict=False):
        kind = is_model_parallel_parameter(p), getattr(p, PIPE_REPLICATED, False)
        alike.setdefault(kind, (p, []))[1].append(found)
    # a norm of norms; ZeRO-3 reads the process groups of all parameters
    return original(
        [torch.stack(found) for _, found in alike.values()], [*(p for p, _ in alike.values()), *params]
    )


def _has_overflow(wrapper, known: WeakTensorKeyDictionary, original: Callable) -> torch.Tensor:
    """DeepSpeed's check for inf and NaN, computed from norms, which it stores in `known`."""
    groups = [wrapper.averaged_gradients[i] for i in range(len(wrapper.bit16_groups))]
    gradients = [g for group in groups for g in group if g is not None]
    if not gradients:
        return original()
    norms = _norms(gradients)
    known.update(zip(gradients, norms, strict=True))
    return ~torch.stack(norms).isfinite().all().reshape(1)
