"""How the parts of a fused block compute."""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormOptions:
    """How a norm computes; fields as the arguments of `rms_norm`."""

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
    """How an activation computes; fields as the arguments of `activation`."""

    kind: str
    gated: bool
    group_size: int
    saved_format: str

    @property
    def arithmetic(self) -> tuple[str, bool, int]:
        return self.kind, self.gated, self.group_size


# cached, since layers ask for the same object in each forward
norm_options = functools.lru_cache(NormOptions)
activation_options = functools.lru_cache(ActivationOptions)
