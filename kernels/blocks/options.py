"""The options of a fused block's parts."""

import functools
from dataclasses import dataclass

from coat_kernels.groups.reference import GROUP_SIZE
from coat_kernels.norm.op import NormOptions


@dataclass(frozen=True, slots=True)
class ActivationOptions:
    """How an activation computes; fields are the arguments of `activation`."""

    kind: str
    gated: bool
    saved_format: str

    @property
    def arithmetic(self) -> tuple[str, bool, int]:
        return self.kind, self.gated, GROUP_SIZE


# cached, because layers create the same options in each forward
@functools.cache
def norm_options(eps: float, layer_norm: bool, zero_centered: bool, saved_format: str) -> NormOptions:
    return NormOptions(eps, layer_norm, zero_centered, GROUP_SIZE, saved_format)


activation_options = functools.lru_cache(ActivationOptions)
