"""Makes the router of an MoE layer repeat its choices when a region is recomputed.

Backward recomputes a region from inputs that `compressed_checkpoints` has rounded. If two experts score
nearly the same, the router could send a token to another expert than in the forward pass. Experts would then
get gradients of tokens that they have not seen, and tensors would have other shapes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, torch.Tensor.topk)
_ARGMAX = (torch.argmax, torch.Tensor.argmax)


class Choices(TorchFunctionMode):
    """A context for one region. The first time it is entered, it keeps the indices that `torch.topk` and
    `torch.argmax` return, 8 bytes each. From then on both return these indices, and `topk` returns the
    current values at these indices.

    It does not cover fused routers (Transformer Engine's), compiled routers, and calls with `out`, which have
    no gradient. Nor does it cover an inner region that is recomputed separately.
    """

    def __init__(self) -> None:
        super().__init__()
        self._indices: list[torch.Tensor] = []
        self._used = 0

    def __enter__(self) -> "Choices":
        self._used = 0
        return super().__enter__()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        chooses = func in _TOPK or func in _ARGMAX
        if not chooses or "out" in kwargs or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        # the same operations in both passes, because checkpointing compares and counts saved tensors
        with torch.no_grad():
            found = func(*args, **kwargs)
            # a copy, because the caller may change it in place
            indices = self._chosen(found if func in _ARGMAX else found.indices).clone()
        if func in _ARGMAX:
            return indices
        return torch.return_types.topk((_gathered(indices, *args, **kwargs), indices))

    def _chosen(self, found: torch.Tensor) -> torch.Tensor:
        if self._used == len(self._indices):
            self._indices.append(found)
        self._used += 1
        return self._indices[self._used - 1]


def _gathered(
    indices: torch.Tensor,
    input: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> torch.Tensor:
    """The result of `torch.topk(input, k, dim)` if it had found `indices`."""
    return input.gather(dim, indices)
