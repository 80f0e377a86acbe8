"""Codes of optimizer moments as functions that give moments back as they are read: ours, those of other
libraries, and what is not built.

Codes of other libraries are their formulas; tests compare them with libraries that run without a GPU:
bitsandbytes' and torchao's 8 bits (dynamic map, blocks of 256, to nearest), torchao's FP8 (E4M3, blocks of
256), FlashOptim's (m by softsign, the root of v linearly, groups of 32 with FP16 scales), and the FP8 of
TransformerEngine's FusedAdam (E4M3, a scale for each tensor).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from coat_kernels.adamw import dither_reference
from coat_kernels.codecs import GROUP_SIZE, Codec, Encoded, get_codec
from coat_kernels.codecs.codec import encode_reference

# several codes of a step take the same one
dither_of = functools.lru_cache(maxsize=8)(dither_reference)

# FP32 moments and their step, to the moments as they are read back
Code = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class Case(NamedTuple):
    bytes: float
    """A parameter, with metadata."""
    code: Code
    per_tensor: bool = False
    """Whether the code takes moments over the largest of their tensor, which has one scale."""


def ours(m_codec: Codec, v_codec: Codec, dither: bool) -> Code:
    """Two codecs, as `adamw_reference` uses them."""

    def code(m, v, step):
        shift = dither_of(step, v.numel(), v.device) if dither else None
        second = Encoded(v_codec, encode_reference(v_codec, v, dither=shift))
        turn = None
        if m_codec.relative:
            m, turn = m / second.roots(), dither_of(step, 1, m.device).expand_as(m)
        first = encode_reference(m_codec, m, dither=turn)
        return m_codec.decode(first, second), v_codec.decode(second.storage)

    return code


def power_of(exponent: float, levels: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Integers that are powers of magnitudes."""

    def code(x):
        rows = x.view(-1, GROUP_SIZE)
        largest = rows.abs().amax(1, keepdim=True).clamp_min(1e-30)
        y = ((rows.abs() / largest) ** exponent * levels).round() / levels
        return (y ** (1 / exponent) * largest).copysign(rows).view(-1)

    return code


def in_blocks(
    x: torch.Tensor, size: int, smallest: float, code: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Codes values over the largest of their block, which counts as `smallest` at least."""
    rows = x.view(-1, size)
    scale = rows.abs().amax(1, keepdim=True).clamp_min(smallest)
    return (code(rows / scale) * scale).view(-1)


def fp8(x: torch.Tensor) -> torch.Tensor:
    """torchao's: E4M3, whose largest value is 448."""
    rows = x.view(-1, 256)
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
    return ((rows / scale).to(torch.float8_e4m3fn).float() * scale).view(-1)


def flashoptim(x: torch.Tensor, code: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Codes values over the largest of 32, and reads them back with that in FP16."""
    rows = x.view(-1, 32)
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12)
    return (code(rows / scale) * scale.half().float()).view(-1)


def softsign(u: torch.Tensor) -> torch.Tensor:
    """Stored values of `u` in [-1, 1], int8."""
    y = (2 * u / (1 + u.abs()) * 127 + 0.5).floor() / 127
    return y / (2 - y.abs())


def linear(u: torch.Tensor) -> torch.Tensor:
    """Stored values of `u` in [0, 1], uint8."""
    return (u * 255 + 0.5).floor() / 255


def e4m3(u: torch.Tensor) -> torch.Tensor:
    """Stored values of `u` in [-1, 1], in FP8 whose largest is 1."""
    return (u * 448).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 448


def dynamic_map(signed: bool) -> torch.Tensor:
    """The 256 values of bitsandbytes' `create_dynamic_map`, ascending: seven decades, each with twice the
    number of values of the one below."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        decade = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*decade.tolist(), *((-decade).tolist() if signed else ())]
    return torch.tensor(sorted(values))


@functools.cache
def map_and_edges(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of `dynamic_map`, and the middles between them."""
    values = dynamic_map(signed)
    return values.to(device), ((values[1:] + values[:-1]) / 2).to(device)


def nearest_of_map(u: torch.Tensor, signed: bool) -> torch.Tensor:
    values, edges = map_and_edges(signed, u.device)
    return values[torch.bucketize(u, edges, right=True)]


def eight_bits(smallest: float) -> Code:
    """The dynamic map, signed for first moments, in blocks of 256."""
    first, second = (functools.partial(nearest_of_map, signed=signed) for signed in (True, False))
    return apart(lambda m: in_blocks(m, 256, smallest, first), lambda v: in_blocks(v, 256, smallest, second))


def apart(m_code: Callable, v_code: Callable) -> Code:
    return lambda m, v, _: (m_code(m), v_code(v))


def cases(beta2: float) -> dict[str, Case]:
    dither = 1 - beta2 < 1 / 64
    log8, root = get_codec("log8"), power_of(0.5, 127)
    of_log8 = ours(get_codec("fp32"), log8, dither)
    found = {
        "int8 roots, log8": Case(2 + 9 / 128, lambda m, v, step: (root(m), of_log8(m, v, step)[1])),
        # of blocks of 256, two FP32 scales
        "bitsandbytes 8-bit": Case(2 + 8 / 256, eight_bits(1e-30)),
        "torchao 8-bit": Case(2 + 8 / 256, eight_bits(1e-12)),
        "torchao FP8": Case(2 + 8 / 256, apart(fp8, fp8)),
        "TransformerEngine FP8": Case(2, apart(e4m3, e4m3), per_tensor=True),
        "FlashOptim": Case(
            2 + 4 / 32,
            apart(lambda m: flashoptim(m, softsign), lambda v: flashoptim(v.sqrt(), linear).square()),
        ),
    }
    pairs = ("ratio8", "log8"), ("fp8_expanded", "fp8_expanded"), ("fp8_expanded", "log8"), ("bf16", "bf16")
    for names in pairs:
        m, v = map(get_codec, names)
        nbytes = sum(codec.zeros(2**20, "meta").nbytes for codec in (m, v)) / 2**20
        found[", ".join(names)] = Case(nbytes, ours(m, v, dither and v.fine))
        if names == ("ratio8", "log8") and dither:
            found["ratio8, log8 to nearest"] = Case(nbytes, ours(m, v, False))
    return found
