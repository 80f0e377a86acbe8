"""What a router of experts chose in a region, chosen again where the region is recomputed.

Backward recomputes a region from inputs that `compressed_checkpoints` has rounded. A router whose best
experts are nearly equal would send a token to others than in the forward pass. Experts would get gradients
of tokens that they have not seen, and tensors would have other shapes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, torch.Tensor.topk)
_ARGMAX = (torch.argmax, torch.Tensor.argmax)


class Choices(TorchFunctionMode):
    """A context for one region: entered for the first time it keeps the indices that `torch.topk` and
    `torch.argmax` find, 8 bytes each. From then on they find these, and `topk` the values that are there now.

    Fused routers (Transformer Engine's) and compiled ones choose anew, and so does who passes `out`, which
    carries no gradient. So does a region inside the region where it is recomputed by itself.
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
        # the same operations in both passes, since checkpointing compares and counts what they save
        with torch.no_grad():
            found = func(*args, **kwargs)
            # a copy, since whoever gets it may change it in place
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
    """What `torch.topk(input, k, dim)` would give if it found `indices`."""
    return input.gather(dim, indices)
