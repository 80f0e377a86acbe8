"""The options of a fused block's parts."""

import functools
from dataclasses import dataclass

from coat_kernels.norm.op import NormOptions


@dataclass(frozen=True, slots=True)
class ActivationOptions:
    """How an activation computes; fields are the arguments of `activation`."""

    kind: str
    gated: bool
    saved_format: str

    @property
    def arithmetic(self) -> tuple[str, bool]:
        return self.kind, self.gated


# cached, because layers create the same options in each forward
norm_options = functools.cache(NormOptions)
activation_options = functools.cache(ActivationOptions)
