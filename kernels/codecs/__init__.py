"""Storage formats of optimizer moments, by name. A new format is one file here and its entry below.

It may import the files of `coat_kernels`. Start at codec.py, which defines what a format computes.
"""

from coat_kernels.codecs import expanded, log, plain, ratio
from coat_kernels.codecs.codec import AT_ONCE, GROUP_SIZE, Codec, Encoded, Storage, parts_of

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (expanded.CODEC, log.CODEC, ratio.CODEC, plain.BF16, plain.FP32)
}
# the formats that can hold a first moment
SIGNED_CODECS: dict[str, Codec] = {name: codec for name, codec in CODECS.items() if codec.signed}


def first_codec(name: str | None, second: Codec) -> Codec:
    """The codec called `name` for a first moment whose second moment is stored by `second`. None is
    "ratio8" if `second` allows it, else "fp8_expanded". Raises ValueError for an unknown name."""
    if name is None:
        name = "ratio8" if CODECS["ratio8"].pairs_with(second) else "fp8_expanded"
    return get_codec(name)


def get_codec(name: str) -> Codec:
    """The codec called `name`. Raises ValueError for an unknown one."""
    if name not in CODECS:
        raise ValueError(f"moment format: expected one of {', '.join(CODECS)}; found {name!r}")
    return CODECS[name]


__all__ = [
    "AT_ONCE",
    "CODECS",
    "GROUP_SIZE",
    "SIGNED_CODECS",
    "Codec",
    "Storage",
    "Encoded",
    "first_codec",
    "get_codec",
    "parts_of",
]
