"""Storage formats of optimizer moments, by name. A new format is one file here and its entry below."""

from coat_kernels.codecs import absmax, expanded, log, plain
from coat_kernels.codecs.codec import Codec, Storage

CODECS: dict[str, Codec] = {c.name: c for c in (*expanded.CODECS, *log.CODECS, *absmax.CODECS, *plain.CODECS)}
# the formats that can hold a first moment
SIGNED_CODECS: dict[str, Codec] = {name: codec for name, codec in CODECS.items() if codec.signed}


def get_codec(name: str) -> Codec:
    """The codec called `name`. Raises ValueError for an unknown one."""
    if name not in CODECS:
        raise ValueError(f"moment format: expected one of {', '.join(CODECS)}; found {name!r}")
    return CODECS[name]


__all__ = ["CODECS", "SIGNED_CODECS", "Codec", "Storage", "get_codec"]
