"""Formats of saved activations: eight bits per element in groups of 1 x G, each with a power-of-two scale.

It may import the observers of `autograd` and the files of `coat_kernels`. Start at format.py, which defines a
format; each format is one file (e4m3.py, sqrt8.py) and an entry in `GROUP_FORMATS` of reference.py.
kernels.py stores groups on a GPU and provides tiles to other kernels, op.py calls the kernels or the
references.
"""

from coat_kernels.groups.format import GroupFormat
from coat_kernels.groups.op import dequantize_groups, quantize_groups
from coat_kernels.groups.reference import (
    DEFAULT_FORMAT,
    GROUP_FORMATS,
    GROUP_SIZE,
    Grouped,
    empty_grouped,
    quantize_groups_reference,
)

__all__ = [
    "DEFAULT_FORMAT",
    "GROUP_FORMATS",
    "GROUP_SIZE",
    "GroupFormat",
    "Grouped",
    "dequantize_groups",
    "empty_grouped",
    "quantize_groups",
    "quantize_groups_reference",
]
