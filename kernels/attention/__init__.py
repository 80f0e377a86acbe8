"""Attention that saves q, k, v and its output unquantized or in 8 bits, in 1 x G groups along the channels.

The backward kernel is the backend's own; before it runs, groups are converted back to the input's dtype. The
output carries its origin, which is the copy that attention saves of it, so the next projection saves no
second copy.

whole.py attends to whole sequences or with a mask, packed.py inside of documents and in sliding windows, and
saved.py is what both save.
"""

from coat_kernels.attention.packed import Documents, packed_attention, takes_packed
from coat_kernels.attention.saved import origin_in_groups
from coat_kernels.attention.whole import (
    BACKENDS,
    additive_mask,
    causal_attention,
    custom_attention,
    switched_on,
)

__all__ = [
    "BACKENDS",
    "Documents",
    "additive_mask",
    "causal_attention",
    "custom_attention",
    "origin_in_groups",
    "packed_attention",
    "switched_on",
    "takes_packed",
]
