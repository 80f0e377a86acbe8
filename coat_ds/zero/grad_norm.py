"""The norm of ZeRO's gradients, and whether one is inf or NaN, by one operation over all of them.

DeepSpeed looks at one gradient after the other, in about ten launches each, and copies it to FP64: the GPU
waits for the host, and moves ten times the bytes.
"""

import functools

import torch
from torch.utils.weak import WeakTensorKeyDictionary


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """L2 norms, summed in FP64 as DeepSpeed's are, so that only inf and NaN make one inf or NaN."""
    return torch._foreach_norm(gradients, 2, dtype=torch.float64)


def batch_gradient_norms(wrapper) -> None:
    """Has ZeRO 1, 2 or 3 read the gradients of a parameter group in one go for their norm; ZeRO 1 and 2 read
    all of them once for that and for inf and NaN.

    wrapper: what DeepSpeed put around the optimizer. One without such methods is left alone, and so are
    gradients on the CPU under offloading.
    Which gradients count, and the sums over ranks, stay DeepSpeed's: its own method is given the norms of
    those that it treats alike as if they were one gradient. The result differs by the order of sums in FP64.
    """
    ask = getattr(wrapper, "get_grad_norm_direct", None)
    if ask is None:
        return
    from deepspeed.runtime.constants import PIPE_REPLICATED
    from deepspeed.runtime.utils import is_model_parallel_parameter

    # what the check has read of each gradient, for the norm: a step asks for one right after the other
    known = WeakTensorKeyDictionary()

    @functools.wraps(ask)
    def norm(gradients, params, norm_type=2):
        # padding, which is zero, stands for no parameter
        gradients = [g for g in gradients if not getattr(g, "_zero_padding", False)][: len(params)]
        if norm_type != 2 or not gradients:
            return ask(gradients, params, norm_type)
        norms = [known.pop(g, None) for g in gradients]
        if any(found is None for found in norms):
            norms = _norms(gradients)
        alike: dict[tuple, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for found, p in zip(norms, params, strict=False):
            kind = is_model_parallel_parameter(p), getattr(p, PIPE_REPLICATED, False)
            alike.setdefault(kind, (p, []))[1].append(found)
        # a norm of norms; ZeRO-3 looks at the groups of all parameters
        return ask(
            [torch.stack(found) for _, found in alike.values()], [*(p for p, _ in alike.values()), *params]
        )

    wrapper.get_grad_norm_direct = norm
    if not hasattr(wrapper, "bit16_groups"):
        # ZeRO-3 checks its flat buffer
        return
    look = wrapper.has_overflow_partitioned_grads_serial

    @functools.wraps(look)
    def has_overflow() -> torch.Tensor:
        groups = [wrapper.averaged_gradients[i] for i in range(len(wrapper.bit16_groups))]
        gradients = [g for group in groups for g in group if g is not None]
        if not gradients:
            return look()
        norms = _norms(gradients)
        known.update(zip(gradients, norms, strict=True))
        return ~torch.stack(norms).isfinite().all().reshape(1)

    wrapper.has_overflow_partitioned_grads_serial = has_overflow
