"""The options of a fused block's parts."""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormOptions:
    """How a norm computes; fields are the arguments of `rms_norm`."""

    eps: float
    layer_norm: bool
    zero_centered: bool
    group_size: int
    saved_format: str

    @property
    def arithmetic(self) -> tuple[float, bool, bool, int]:
        return self.eps, self.layer_norm, self.zero_centered, self.group_size


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
