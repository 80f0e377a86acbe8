"""The options of a fused block's parts."""

import functools
from dataclasses import dataclass

from coat_kernels.norm.op import NormOptions


@dataclass(frozen=True, slots=True)
class ActivationOptions:
    """How an activation computes; fields are the arguments of `activation`."""

    kind: str
    gated: bool
    group_size: int
    saved_format: str

    @property
    def arithmetic(self) -> tuple[str, bool, int]:
        return self.kind, self.gated, self.group_size


# cached, because layers create the same options in each forward
norm_options = functools.lru_cache(NormOptions)
activation_options = functools.lru_cache(ActivationOptions)
