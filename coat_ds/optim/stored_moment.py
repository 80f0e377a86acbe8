"""Moments that are written to files as codes: the checkpoint layout "compressed"."""

import math
from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.pieces import Pair, Piece
from coat_kernels.codecs import CODECS, GROUP_SIZE, Storage, Stored


class GivenMoment(Moment):
    """A moment in a state dict. A cast returns a plain tensor.

    torch's optimizers cast loaded states to the parameter's dtype. AdamW would otherwise step a `Moment`, and
    write a first moment relative to second moments from before the step, where zeros would lose it.
    """

    def to(self, *args, **how):
        is_cast = any(isinstance(x, torch.dtype) for x in (*args, *how.values()))
        return self.decode().to(*args, **how) if is_cast else super().to(*args, **how)


class StoredMoment(GivenMoment):
    """A moment that is pickled as codes and unpickled as a `GivenMoment`, which needs `coat_ds`."""

    def data_ptr(self):
        """Raises TypeError: `torch.distributed.checkpoint.async_save` and safetensors copy a tensor's memory,
        and a moment has none."""
        raise TypeError(
            "CoatAdamW: checkpoint_layout='compressed' gives moments that hold codes and have no memory of "
            "their own to copy, as async_save and safetensors do. Take checkpoint_layout='stock', or "
            "torch.save or torch.distributed.checkpoint.save."
        )

    # safetensors reads this first
    storage = data_ptr

    def __reduce_ex__(self, protocol):
        moment = self if self.is_whole else self.clone()
        if not isinstance(moment, StoredMoment):
            return moment.__reduce_ex__(protocol)
        if moment.has_relative_codes and moment.pair is None:
            return moment.decode("cpu").__reduce_ex__(protocol)
        pieces = [
            (
                piece.begin,
                piece.codec.name,
                *piece.storage,
                # the second moment's tensors again; a file stores shared tensors once
                *((second.codec.name, *second.storage) if piece.codec.relative else ()),
            )
            for piece, second in moment.paired_pieces()
        ]
        return _rebuild, (pieces, GROUP_SIZE, tuple(moment.shape))


def _rebuild(pieces: list[tuple], group_size: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The moment of a pickled `StoredMoment`.

    Readers that accept data only, such as `torch.load(weights_only=True)`, call this function, so it checks
    all contents of the file. Raises ValueError for data that `StoredMoment` never writes.
    """
    _expect(
        type(group_size) is int and group_size == GROUP_SIZE, f"groups of {GROUP_SIZE} elements", group_size
    )
    _expect(type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape), "a shape", shape)
    _expect(type(pieces) is list and pieces, "a list of pieces", pieces)
    made, seconds, end = [], [], 0
    for piece in pieces:
        is_piece = type(piece) is tuple and len(piece) in (5, 9)
        _expect(is_piece, "first element, codec and three tensors, of one moment or of two", piece)
        begin = piece[0]
        _expect(type(begin) is int and begin == end, f"a piece from element {end}", begin)
        codec, storage = _rebuild_stored(piece[1:5], None)
        end += storage.codes.numel()
        made.append(Piece(begin, end, codec, storage))
        if codec.relative:
            second = _rebuild_stored(piece[5:], storage.codes.numel())
            _expect(codec.stands_beside(second.codec), f"a second moment for {codec.name}", second.codec.name)
            seconds.append(Piece(begin, end, *second))
        else:
            _expect(len(piece) == 5, f"one moment, as {codec.name} needs", piece)
            seconds.append(made[-1])
    _expect(math.prod(shape) == end, f"a shape of {end} elements", shape)
    devices = {t.device for piece in (*made, *seconds) for t in piece.storage}
    _expect(len(devices) == 1, "all tensors on one device", devices)
    moment = GivenMoment(tuple(made), shape)
    if moment.has_relative_codes:
        moment.pair = Pair(moment.pieces, tuple(seconds), shared=False)
    return moment


# the module name in files
_rebuild.__module__ = "coat_ds.state"
# Hugging Face's Trainer and torch.load by default read with weights_only=True
torch.serialization.add_safe_globals([_rebuild])


def _rebuild_stored(stored: tuple, numel: int | None) -> Stored:
    """One moment of a piece, of `numel` elements; None: of any number."""
    _expect(len(stored) == 4, "a codec and three tensors", stored)
    name, *tensors = stored
    _expect(type(name) is str and name in CODECS, f"one of {', '.join(CODECS)}", name)
    codec, storage = CODECS[name], Storage(*tensors)
    # read the size of the codes only after checking that they are a tensor
    _expect_vector("codes", storage.codes, codec.dtype, numel)
    groups = -(-storage.codes.numel() // GROUP_SIZE)
    _expect_vector("scale", storage.scale, torch.float32, groups if codec.has_scale else 0)
    _expect_vector("exponent", storage.exponent, torch.uint8, groups if codec.has_exponent else 0)
    return Stored(codec, storage)


def _expect(holds: object, expected: str, found: object) -> None:
    if not holds:
        shown = " ".join(str(found).split())[:200]
        raise ValueError(f"stored moment: expected {expected}, found {shown}")


def _expect_vector(name: str, t: Any, dtype: torch.dtype, numel: int | None) -> None:
    wanted = f"{name} as a contiguous vector of {dtype}" + ("" if numel is None else f" of {numel} elements")
    _expect(type(t) is torch.Tensor and t.layout == torch.strided and not t.is_meta, wanted, type(t))
    # a tensor of stride 0 would need far more memory than the bytes in its file
    found = f"{t.dtype}, shape {tuple(t.shape)}, stride {t.stride()}"
    _expect(t.dtype == dtype and t.dim() == 1 and t.is_contiguous(), wanted, found)
    _expect(numel is None or t.numel() == numel, wanted, found)
