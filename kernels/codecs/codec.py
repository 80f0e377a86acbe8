"""Definition of a storage format of optimizer moments, and the kernels that every format shares.

A moment of n elements is stored as n codes, in groups of consecutive elements of the flat tensor, with at
most an FP32 scale and an 8-bit exponent per group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import INTERPRET, cast
from coat_kernels.prepared import PreparedKernel, cdiv
from coat_kernels.tiles import load_tile, store_tile

# consecutive elements that share one scale and one exponent in optimizer states
GROUP_SIZE = 128
# elements per part, whole groups; a PyTorch step makes several copies of a part
AT_ONCE = 2**22
# groups per program; a wider tile only lengthens the tail
ROWS = 4


def parts_of(numel: int) -> Iterator[slice]:
    """Slices of `numel` elements, `AT_ONCE` elements each, so that temporaries of one slice fit into
    memory."""
    for begin in range(0, numel, AT_ONCE):
        yield slice(begin, min(begin + AT_ONCE, numel))


class Storage(NamedTuple):
    """A stored moment: `codes` [n]; `scale` FP32 [groups] and `exponent` uint8 [groups], empty if unused."""

    codes: torch.Tensor
    scale: torch.Tensor
    exponent: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self)

    def to(self, device: torch.device) -> "Storage":
        """The storage on `device`; itself if it is there."""
        return Storage(*(t.to(device) for t in self))

    def parts(self) -> Iterator[tuple[slice, "Storage"]]:
        """Slices of elements, and views of their storage, `AT_ONCE` elements each."""
        for part in parts_of(self.codes.numel()):
            yield part, self.groups(part.start // GROUP_SIZE, -(-part.stop // GROUP_SIZE))

    def groups(self, first: int, last: int) -> "Storage":
        """A view of the groups from `first` to `last`, exclusive."""
        codes = self.codes[first * GROUP_SIZE : last * GROUP_SIZE]
        return Storage(codes, self.scale[first:last], self.exponent[first:last])


class Functions(NamedTuple):
    """What a format computes, in plain PyTorch or as Triton tile functions.

    References take FP32 groups [rows, GROUP_SIZE], scale [rows, 1] and exponent [rows, 1] (uint8); the last
    group is padded with zeros. Tile functions do the same on a tile inside a kernel, with one value of the
    statistics per row, [rows]. Their last arguments are the flags SIGNED, set for a first moment, which has
    signs, and, for `to_codes`, DITHER. The tile function `to_codes` may assume that the statistics are those
    of the same values; the reference takes any.
    """

    statistics: Callable
    """x -> (scale, exponent)."""
    to_codes: Callable
    """(x, scale, exponent, dither or None) -> codes. Dither, in (-1/2, 1/2), is added in steps of codes."""
    from_codes: Callable
    """(codes, scale, exponent) -> x."""


class Roots(NamedTuple):
    """The roots of a stored second moment, by which a relative code divides the first moment."""

    log2: Callable
    """(codes, scale, exponent) -> log2 of the roots in plain PyTorch, finite for every code."""
    log2_tile: Callable
    tile: Callable
    """(codes, scale, exponent) -> the roots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A storage format: its layout and its functions."""

    name: str
    dtype: torch.dtype
    """The dtype of the codes; uint8 holds FP8 bit patterns."""
    has_scale: bool = True
    has_exponent: bool = True
    reference: Functions
    tiles: Functions
    fine: bool = False
    """Whether neighbouring codes are so close everywhere that stochastic rounding adds little noise."""
    signed: bool = True
    """Whether it stores negative values, which a first moment needs; otherwise they become NaN."""
    roots: Roots | None = None
    """Given by a codec of second moments, if the first moment may have a relative code."""
    ratio_tile: Callable | None = None
    """Given by a relative code: (x, log2 of the roots, dither) -> (codes, scale) in one step."""

    @property
    def relative(self) -> bool:
        """Whether its values are exp_avg over the root of the stored exp_avg_sq (`Encoded.roots`)."""
        return self.ratio_tile is not None

    def pairs_with(self, exp_avg_sq: "Codec") -> bool:
        """Whether it can store the first moment when `exp_avg_sq` stores the second."""
        return not self.relative or exp_avg_sq.roots is not None

    def zeros(self, numel: int, device: torch.device | str = "cpu") -> Storage:
        """A moment of zeros."""
        groups = cdiv(numel, GROUP_SIZE)
        return Storage(
            torch.zeros(numel, dtype=self.dtype, device=device),
            torch.zeros(groups if self.has_scale else 0, dtype=torch.float32, device=device),
            # the statistics of an all-zero group are the largest exponent
            torch.full((groups if self.has_exponent else 0,), 255, dtype=torch.uint8, device=device),
        )

    def encode(self, x: torch.Tensor, relative_to: "Encoded | None" = None) -> Storage:
        """Stores `x` (any shape; converted to FP32, flat), rounded to nearest.

        relative_to: the second moment on which a relative code depends; None stands for roots of 1. Other
        codes ignore it.
        """
        x = x.detach().reshape(-1).float()
        if self.relative and relative_to is not None:
            x = x.clone()
            for part, roots in relative_to.roots_in_parts():
                x[part] /= roots
        encode = encode_kernel_launch if uses_kernels(x, fp8=False) else encode_reference
        return encode(self, x)

    def decode(self, storage: Storage, relative_to: "Encoded | None" = None) -> torch.Tensor:
        """The stored moment as FP32 [n]; `relative_to` as in `encode`."""
        decode = decode_kernel_launch if uses_kernels(storage.codes, fp8=False) else decode_reference
        x = decode(self, storage)
        if self.relative and relative_to is not None:
            for part, roots in relative_to.roots_in_parts():
                x[part] *= roots
        return x


class Encoded(NamedTuple):
    """A stored second moment, from which a relative first moment takes its roots."""

    codec: Codec
    storage: Storage

    def to(self, device: torch.device) -> "Encoded":
        return Encoded(self.codec, self.storage.to(device))

    def roots(self) -> torch.Tensor:
        """Square roots of the stored values, FP32 [n]. They are positive and finite even where a value is
        zero or NaN, because the first moment is divided by them."""
        codes = _rows(self.storage.codes)
        scale, exponent = (_column(t, len(codes)) for t in self.storage[1:])
        roots = torch.exp2(self.codec.roots.log2(codes, scale, exponent))
        return roots.view(-1)[: self.storage.codes.numel()]

    def parts(self) -> Iterator["Encoded"]:
        """Views of the storage, `AT_ONCE` elements each, as `Storage.parts`."""
        for _, storage in self.storage.parts():
            yield Encoded(self.codec, storage)

    def roots_in_parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of elements and their `roots`, part by part, because a moment may be as large as the
        memory."""
        for part, storage in self.storage.parts():
            yield part, Encoded(self.codec, storage).roots()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % GROUP_SIZE)).view(-1, GROUP_SIZE)


def _column(t: torch.Tensor, rows: int) -> torch.Tensor:
    return t.view(-1, 1) if t.numel() else t.new_zeros(rows, 1)


def encode_reference(
    codec: Codec, x: torch.Tensor, like: Storage | None = None, dither: torch.Tensor | None = None
) -> Storage:
    """`Codec.encode` in plain PyTorch; x FP32 [n]. `like` supplies scale and exponent. `dither` FP32 [n] in
    (-1/2, 1/2) rounds stochastically."""
    rows = _rows(x)
    if like is None:
        scale, exponent = codec.reference.statistics(rows)
    else:
        scale, exponent = _column(like.scale, len(rows)), _column(like.exponent, len(rows))
    dither = None if dither is None else _rows(dither)
    codes = codec.reference.to_codes(rows, scale, exponent, dither).view(-1)[: x.numel()].clone()
    return Storage(
        codes,
        scale.reshape(-1).clone() if codec.has_scale else x.new_empty(0),
        exponent.reshape(-1).clone() if codec.has_exponent else codes.new_empty(0, dtype=torch.uint8),
    )


def decode_reference(codec: Codec, storage: Storage) -> torch.Tensor:
    """`Codec.decode` in plain PyTorch."""
    codes = _rows(storage.codes)
    scale, exponent = _column(storage.scale, len(codes)), _column(storage.exponent, len(codes))
    return codec.reference.from_codes(codes, scale, exponent).view(-1)[: storage.codes.numel()].clone()


@triton.jit
def extremes_tile(b_x, SIGNED: tl.constexpr):
    """Largest and smallest non-zero finite magnitude of each row, FP32 [rows]; both zero in a row of zeros.

    Magnitudes have the order of their bit patterns. Adding one exponent step makes non-finite values
    negative, so they cannot be the maximum. Subtracting one makes zero the largest unsigned number, so it
    cannot be the minimum. Without SIGNED, the patterns of negative values drop out in the same way.
    """
    b_bits = b_x.to(tl.int32, bitcast=True)
    if SIGNED:
        b_bits &= 0x7FFFFFFF
    b_top = tl.maximum(tl.max(b_bits + 0x800000, axis=1), 0x800000) - 0x800000
    b_bottom = tl.min((b_bits - 1).to(tl.uint32, bitcast=True), axis=1).to(tl.int32, bitcast=True) + 1
    return b_top.to(tl.float32, bitcast=True), b_bottom.to(tl.float32, bitcast=True)


@triton.jit
def load_rows(p_values, o_row, m_row, MASKED: tl.constexpr):
    if MASKED:
        # past the end, any valid scale and exponent are fine
        return tl.load(p_values + o_row, mask=m_row, other=1)
    return tl.load(p_values + o_row)


# Every thread that shares a row holds the row's value. `tl.store` would first move it to one thread, through
# shared memory and two barriers. Storing it from all of them is one instruction.
@triton.jit
def store_scale(p_rows, b_scale, m_row, MASKED: tl.constexpr):
    if INTERPRET or MASKED:
        tl.store(p_rows, b_scale, mask=m_row)
    else:
        tl.inline_asm_elementwise(
            "st.global.f32 [$1], $2; mov.b32 $0, 0;",
            "=r,l,f",
            [p_rows.to(tl.uint64), b_scale],
            tl.int32,
            False,
            1,
        )


@triton.jit
def store_exponent(p_rows, b_exponent, m_row, MASKED: tl.constexpr):
    if INTERPRET or MASKED:
        tl.store(p_rows, b_exponent.to(tl.uint8), mask=m_row)
    else:
        tl.inline_asm_elementwise(
            "st.global.u8 [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [p_rows.to(tl.uint64), b_exponent],
            tl.int32,
            False,
            1,
        )


@triton.jit
def load_metadata(p_scale, p_exponent, o_row, m_row,
                  HAS_SCALE: tl.constexpr, HAS_EXPONENT: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The scales and exponents [rows, 1] of a tile."""
    b_scale = 0.0
    b_exponent = 0
    if HAS_SCALE:
        b_scale = load_rows(p_scale, o_row, m_row, MASKED)[:, None]
    if HAS_EXPONENT:
        b_exponent = load_rows(p_exponent, o_row, m_row, MASKED)[:, None]
    return b_scale, b_exponent


@triton.jit
def store_moment(b_x, b_dither, p_codes, p_scale, p_exponent, o_x, m_x, o_row, m_row,
                 STATISTICS: tl.constexpr, TO_CODES: tl.constexpr, HAS_SCALE: tl.constexpr,
                 HAS_EXPONENT: tl.constexpr, SIGNED: tl.constexpr, DITHER: tl.constexpr,
                 MASKED: tl.constexpr):  # fmt: skip
    """Stores an FP32 tile [rows, group]; elements past the end must be zero. b_dither is used only if DITHER.

    Returns what is stored: codes, and scales and exponents [rows, 1].
    """
    b_scale, b_exponent = STATISTICS(b_x, SIGNED)
    b_codes = TO_CODES(b_x, b_scale[:, None], b_exponent[:, None], b_dither, SIGNED, DITHER)
    store_tile(p_codes, o_x, cast(b_codes, p_codes.dtype.element_ty), m_x, MASKED)
    if HAS_SCALE:
        store_scale(p_scale + o_row, b_scale, m_row, MASKED)
    if HAS_EXPONENT:
        store_exponent(p_exponent + o_row, b_exponent, m_row, MASKED)
    return b_codes, b_scale[:, None], b_exponent[:, None]


@PreparedKernel
@triton.jit
def encode_kernel(p_x, p_codes, p_scale, p_exponent, n,
                  STATISTICS: tl.constexpr, TO_CODES: tl.constexpr, HAS_SCALE: tl.constexpr,
                  HAS_EXPONENT: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_x = o_row[:, None] * G + tl.arange(0, G)[None, :]
    m_x, m_row = o_x < n, o_row * G < n
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)
    store_moment(b_x, 0.0, p_codes, p_scale, p_exponent, o_x, m_x, o_row, m_row,
                 STATISTICS, TO_CODES, HAS_SCALE, HAS_EXPONENT, True, False, True)  # fmt: skip


@PreparedKernel
@triton.jit
def decode_kernel(p_codes, p_scale, p_exponent, p_x, n,
                  FROM_CODES: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_EXPONENT: tl.constexpr,
                  ROWS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_x = o_row[:, None] * G + tl.arange(0, G)[None, :]
    m_x, m_row = o_x < n, o_row * G < n
    b_codes = load_tile(p_codes, o_x, m_x, True)
    b_scale, b_exponent = load_metadata(p_scale, p_exponent, o_row, m_row, HAS_SCALE, HAS_EXPONENT, True)
    b_x = FROM_CODES(b_codes, b_scale, b_exponent, True)
    tl.store(p_x + o_x, b_x, mask=m_x)


def encode_kernel_launch(codec: Codec, x: torch.Tensor) -> Storage:
    """`Codec.encode` by the Triton kernel; x FP32 [n]."""
    out = codec.zeros(x.numel(), x.device)
    if x.numel():
        encode_kernel[(cdiv(x.numel(), ROWS * GROUP_SIZE),)](
            x,
            *out,
            x.numel(),
            STATISTICS=codec.tiles.statistics,
            TO_CODES=codec.tiles.to_codes,
            HAS_SCALE=codec.has_scale,
            HAS_EXPONENT=codec.has_exponent,
            ROWS=ROWS,
            G=GROUP_SIZE,
        )
    return out


def decode_kernel_launch(codec: Codec, storage: Storage) -> torch.Tensor:
    """`Codec.decode` by the Triton kernel."""
    n = storage.codes.numel()
    x = torch.empty(n, dtype=torch.float32, device=storage.codes.device)
    if n:
        decode_kernel[(cdiv(n, ROWS * GROUP_SIZE),)](
            *storage,
            x,
            n,
            FROM_CODES=codec.tiles.from_codes,
            HAS_SCALE=codec.has_scale,
            HAS_EXPONENT=codec.has_exponent,
            ROWS=ROWS,
            G=GROUP_SIZE,
        )
    return x
