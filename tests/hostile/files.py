"""Bytes and JSON values that differ a little from valid contents of a file."""

import json
import struct
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.hostile.conftest import RANDOM, share

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = [0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def tries(part: float = 0.06):
    """Settings of a test that takes `part` of the total inputs."""
    return settings(
        max_examples=max(5, share(part)),
        derandomize=not RANDOM,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """The bytes with bits flipped, parts removed, inserted or repeated, or numbers replaced by other
    numbers."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 5)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at:]
            case 2:
                del data[at : at + draw(st.integers(1, 9))]
            case 3:
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case 4:
                data[at:at] = data[draw(st.integers(0, len(data))) :][:64]
            case 5:
                kind = draw(st.sampled_from(["<B", "<I", "<Q"]))
                value = draw(st.sampled_from(NUMBERS)) % 256 ** struct.calcsize(kind)
                data[at : at + struct.calcsize(kind)] = struct.pack(kind, value)
    return bytes(data)


HOSTILE_TEXT = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "auto", "1e-3", "nan", "AdamW", "adam", "../x", "a" * 300, "\0", "é"]),
)
HOSTILE_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from([0, 1, 2, 3, 128, -1, 1e-3, 2**80, 10**400]),
        HOSTILE_TEXT,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(HOSTILE_TEXT, inner, max_size=3)),
    max_leaves=6,
)


def changed(whole):
    """A JSON value with some parts exchanged, missing, or under other names."""
    if isinstance(whole, dict):
        parts = {key: st.one_of(st.just(value), changed(value)) for key, value in whole.items()}
        more = st.dictionaries(HOSTILE_TEXT, HOSTILE_VALUES, max_size=1)
        return st.one_of(
            st.builds(lambda old, new: {**old, **new}, st.fixed_dictionaries({}, optional=parts), more),
            st.fixed_dictionaries(parts),
            HOSTILE_VALUES,
        )
    return HOSTILE_VALUES


def json_files(whole) -> st.SearchStrategy[bytes]:
    return st.one_of(
        changed(whole).map(lambda value: json.dumps(value).encode()),
        damaged(json.dumps(whole).encode()),
        st.binary(max_size=30),
        st.sampled_from([b"[" * 10**5, b'{"a":' * 10**5, b"9" * 6000, b"\xff\xfe", b"", b"\0" * 20]),
    )
