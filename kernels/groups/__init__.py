"""Eight bits per element in groups of 1 x G, each with a power-of-two scale: the saved format of activations.

reference.py specifies the format, kernels.py stores it on a GPU and provides tiles to other kernels, op.py
calls one of the two.
"""

from coat_kernels.groups.kernels import dequantize_groups_triton, quantize_groups_triton
from coat_kernels.groups.op import dequantize_groups, quantize_groups
from coat_kernels.groups.reference import (
    DEFAULT_FORMAT,
    GROUP_FORMATS,
    Grouped,
    GroupFormat,
    dequantize_groups_reference,
    empty_grouped,
    quantize_groups_reference,
)

__all__ = [
    "DEFAULT_FORMAT",
    "GROUP_FORMATS",
    "GroupFormat",
    "Grouped",
    "dequantize_groups",
    "dequantize_groups_reference",
    "dequantize_groups_triton",
    "empty_grouped",
    "quantize_groups",
    "quantize_groups_reference",
    "quantize_groups_triton",
]
