"""Gradients that look FP32 and are BF16 or FP16 underneath.

ZeRO copies a rank's gradients to FP32 for the step, beside all that training holds: 4 bytes a parameter of
the partition (stages 1 and 2), often the peak, or of a part of it (3). CoatAdamW's kernels widen and scale
what they read, to the same bits.
"""

import functools

import torch
from torch.utils._pytree import tree_map

from coat_kernels.exchange import exchanged

aten = torch.ops.aten


class _Content:
    """What a narrow gradient and what is detached from it share."""

    def __init__(self, narrow: torch.Tensor):
        self.narrow = narrow
        # by which it is multiplied, FP32 of one element, or None
        self.scale: torch.Tensor | None = None
        # the gradient in FP32, once an operation wanted it
        self.wide: torch.Tensor | None = None

    def multiply(self, factor: torch.Tensor | float) -> None:
        if not isinstance(factor, torch.Tensor):
            factor = torch.full((), factor, dtype=torch.float32, device=self.narrow.device)
        self.scale = factor.float() if self.scale is None else self.scale * factor

    def widen(self) -> torch.Tensor:
        if self.wide is None:
            self.wide = self.narrow.float()
            if self.scale is not None:
                self.wide *= self.scale
            self.narrow = self.scale = None
        return self.wide


class NarrowGrad(torch.Tensor):
    """An FP32 tensor, to everyone but CoatAdamW, of the values of `narrow`, BF16 or FP16.

    Multiplying it in place by one number is put off to the step; any other operation makes it FP32 first.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, content: _Content):
        held = content.wide if content.narrow is None else content.narrow
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=torch.float32, device=held.device
        )

    def __init__(self, content: _Content):
        self._content = content

    @classmethod
    def of(cls, narrow: torch.Tensor) -> "NarrowGrad":
        return cls(_Content(narrow.detach()))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        content = args[0]._content if isinstance(args[0], cls) else None
        if content is not None and content.narrow is not None:
            if func is aten.detach.default:
                return cls(content)
            if func in (aten.mul_.Scalar, aten.mul_.Tensor) and _is_number(args[1]):
                content.multiply(args[1])
                return args[0]

        def plain(x):
            return x._content.widen() if isinstance(x, cls) else x

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        # what changes its first argument returns it
        return args[0] if content is not None and result is content.wide else result

    def __repr__(self):
        return f"NarrowGrad({tuple(self.shape)})"


def _is_number(factor) -> bool:
    return not isinstance(factor, torch.Tensor) or (factor.numel() == 1 and type(factor) is torch.Tensor)


def narrow_and_scale(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values of a gradient as they are stored, and what they are to be multiplied by, FP32, or None."""
    if not isinstance(grad, NarrowGrad):
        return grad, None
    content = grad._content
    return (content.wide, None) if content.narrow is None else (content.narrow, content.scale)


def keep_gradients_narrow(wrapper) -> None:
    """Has a DeepSpeed optimizer of ZeRO 1, 2 or 3 hand its gradients over as they are.

    The step of ZeRO 1 and 2 asks for what is flat already before it makes a flat tensor and has that in the
    masters' type. DeepSpeed 0.18 does not ask, and makes FP32.
    """
    if hasattr(wrapper, "_prepare_fp32_grad_for_sub_group"):
        _in_stage3(wrapper)
        return
    ask = getattr(wrapper, "_get_preflattened_grad_partition", None)
    if ask is None:
        return
    from deepspeed import comm as dist

    @functools.wraps(ask)
    def partition(group: int) -> torch.Tensor | None:
        flat = ask(group)
        if flat is None:
            grads, ranks = wrapper.averaged_gradients[group], wrapper.real_dp_process_group[group]
            if dist.get_rank(group=ranks) == dist.get_world_size(group=ranks) - 1:
                flat = wrapper.flatten_dense_tensors_aligned(grads, int(wrapper.partition_size[group]))
            else:
                flat = wrapper.flatten(grads)
        return _as_wide_as(wrapper.single_partition_of_fp32_groups[group], flat)

    wrapper._get_preflattened_grad_partition = partition


def _in_stage3(wrapper) -> None:
    """Its step flattens the gradients of a part of the parameters and then has them in the masters' type."""
    prepare = wrapper._prepare_fp32_grad_for_sub_group

    @functools.wraps(prepare)
    def prepare_narrow(part: int) -> None:
        master, flatten = wrapper.fp32_partitioned_groups_flat[part], wrapper.flatten
        with exchanged(wrapper, flatten=lambda gradients: _as_wide_as(master, flatten(gradients))):
            prepare(part)

    wrapper._prepare_fp32_grad_for_sub_group = prepare_narrow


def _as_wide_as(master: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    return NarrowGrad.of(flat) if flat.dtype != master.dtype == torch.float32 else flat
