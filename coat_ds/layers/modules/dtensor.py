"""Converted layers under torch's tensor parallelism (`parallelize_module`).

torch's hooks pass a DTensor to a module's forward and expect a DTensor. In the forward each rank computes
with its local tensors: a part of a linear layer's weight, quantized with a scale of its own, or a part of a
norm's tokens.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from coat_ds.layers.modules.converted_forward import DTYPES
from coat_ds.layers.modules.hooks import forget_if_pre_hooked
from coat_ds.optim.shards import is_distributed
from coat_kernels.autograd.origin import Origin, origin_of, whole_of
from coat_kernels.fp8 import ALIGNMENT

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Origin | None], torch.Tensor]


def why_not(x: torch.Tensor, weight: "DTensor") -> str | None:
    """Why ranks cannot multiply their parts of `x` [..., K] and `weight` [N, K] in FP8; None if they can."""
    from torch.distributed.tensor import Replicate, Shard

    if x.dtype not in DTYPES:
        return f"their inputs are {x.dtype}"
    if not is_distributed(x) or x.device_mesh != weight.device_mesh:
        return "their inputs are not DTensors, as ColwiseParallel and RowwiseParallel make them"
    split = tuple(x.placements), tuple(weight.placements)
    if split not in (((Replicate(),), (Shard(0),)), ((Shard(x.ndim - 1),), (Shard(1),))):
        return f"they are laid out as {weight.placements} for inputs as {x.placements}"
    return unaligned(weight)


def unaligned(weight: "DTensor") -> str | None:
    """Why FP8 GEMMs do not support the sizes of this rank's part of `weight`; None if they do."""
    sizes = weight._local_tensor.shape
    if any(size % ALIGNMENT or size == 0 for size in sizes):
        return f"a rank's part is {' x '.join(map(str, sizes))}, not multiples of {ALIGNMENT}"
    return None


def linear(module: torch.nn.Module, x: "DTensor", multiply: Multiply) -> "DTensor":
    """The output of a linear layer for which `why_not` returns None.

    multiply(x, weight, bias, origin): the GEMM of this rank's parts; `origin` is how to recompute its x.
    """
    from torch.distributed.tensor import DTensor, Partial, Shard

    weight, bias = module.weight, module.bias
    by_rows = weight.placements[0] == Shard(0)
    _wait(x)
    # if each rank computes a part of the outputs, the gradient of the input is a sum over ranks
    held = x.to_local(grad_placements=[Partial()] if by_rows else None)
    # DTensors do not carry notes
    origin = None
    if (whole := whole_of(held)) is not None:
        forget_if_pre_hooked(module, whole)
        origin = origin_of(whole)
    if not by_rows:
        y = multiply(held, weight.to_local(), None, origin)
        y = DTensor.from_local(y, x.device_mesh, [Partial()], run_check=False)
        # the bias is added once, to the sum, in the dtype of the GEMM's output, which autocast may set
        return y if bias is None else y + bias.to(y.dtype)
    y = multiply(held, weight.to_local(), None if bias is None else bias.to_local(), origin)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    return _whole(y, x, (Shard(x.ndim - 1),), shape)


def norm(x: "DTensor", *weights: "DTensor | None", norm: Callable[..., torch.Tensor]) -> "DTensor | None":
    """norm(x, *weights) of this rank's tokens; None if `x` or the weights have another layout."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    split = any(isinstance(at, Shard) and at.dim != x.ndim - 1 for at in x.placements)
    if not (split or all(at == Replicate() for at in x.placements)) or len(x.placements) != 1:
        return None
    held = []
    for weight in weights:
        if weight is not None and (
            not is_distributed(weight)
            or weight.device_mesh != x.device_mesh
            or tuple(weight.placements) != (Replicate(),)
        ):
            return None
        # a rank's gradient of the weight is a sum over its own tokens
        grad = [Partial()] if split else None
        held.append(None if weight is None else weight.to_local(grad_placements=grad))
    _wait(x)
    return _whole(norm(x.to_local(), *held), x, tuple(x.placements), x.shape)


def _wait(x: "DTensor") -> None:
    """Waits for a collective that may still write the local tensor; kernels cannot wait for it."""
    held: Any = x._local_tensor
    if type(held).__name__ == "AsyncCollectiveTensor":
        x._local_tensor = held.wait()


def _whole(y: torch.Tensor, like: "DTensor", placements: tuple, shape: torch.Size) -> "DTensor":
    """The DTensor of this shape with the local tensor `y`. Local tensors may differ in size."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)
