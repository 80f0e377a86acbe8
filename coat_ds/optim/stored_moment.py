"""What state dicts hold of moments and remainders; moments that files hold as codes, in the checkpoint layout
"compressed"."""

import math
from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.pieces import Pair, Piece
from coat_ds.optim.saving import decodes_on_save
from coat_ds.optim.shards import is_distributed, laid_out_like, local
from coat_kernels.codecs import CODECS, GROUP_SIZE, Encoded, Storage


class StoredMoment(Moment):
    """A moment in a state dict, which is pickled as codes and needs `coat_ds` to be unpickled. A cast returns
    a plain tensor.

    torch's optimizers cast loaded states to the parameter's dtype. AdamW would otherwise step a `Moment`, and
    write a first moment relative to second moments from before the step, where zeros would lose it.
    """

    def to(self, *args, **how):
        is_cast = any(isinstance(x, torch.dtype) for x in (*args, *how.values()))
        return self.decode().to(*args, **how) if is_cast else super().to(*args, **how)

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


def states_to_save(packed: dict[str, Any], layout: str) -> dict[str, Any]:
    """The state dict of `torch.optim.Optimizer` with moments in the given layout, "stock" or "compressed"."""
    state: dict[Any, dict[str, Any]] = {}
    indices = {index for group in packed["param_groups"] for index in group["params"]}
    for index, entry in packed["state"].items():
        if index not in indices:
            # a note of the caller, not the state of a parameter
            state[index] = entry
            continue
        state[index] = dict(entry)
        for name, value in entry.items():
            moment = local(value)
            if isinstance(moment, Moment):
                state[index][name] = _given(value, moment, layout)
            elif name == "step":
                state[index][name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
            elif name == "remainder":
                # the same bits as FP16: neither NCCL nor gloo sends int16
                state[index][name] = laid_out_like(value, local(value).view(torch.float16))
    return {**packed, "state": state}


def _given(value: torch.Tensor, moment: Moment, layout: str) -> torch.Tensor:
    if is_distributed(value):
        # on its device: NCCL cannot gather CPU tensors
        return laid_out_like(value, moment.decode())
    if layout == "compressed":
        return StoredMoment(moment.pieces, moment.shape, pair=moment.pair)
    # torch.save decodes the moment as it writes it
    return moment.detach() if decodes_on_save() else moment.decode("cpu")


def _rebuild(pieces: list[tuple], group_size: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The moment of a pickled `StoredMoment`.

    Readers that accept data only, such as `torch.load(weights_only=True)`, call this function, so it checks
    all contents of the file. Raises ValueError for data that `StoredMoment` never writes.
    """
    _expect(
        type(group_size) is int and group_size == GROUP_SIZE, f"groups of {GROUP_SIZE} elements", group_size
    )
    is_shape = type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape)
    _expect(is_shape and math.prod(shape) < 2**63, "a shape", shape)
    is_list = type(pieces) is list and all(type(x) is tuple and len(x) in (5, 9) for x in pieces)
    _expect(is_list and pieces, "first element, codec and three tensors, of one moment or of two", pieces)
    begins = [piece[0] for piece in pieces]
    _expect(all(type(n) is int for n in begins) and begins[0] == 0, "pieces from element 0 on", begins)
    made, seconds = [], []
    for piece, begin, end in zip(pieces, begins, [*begins[1:], math.prod(shape)], strict=True):
        _expect(begin <= end, f"a piece that ends before element {end}", begin)
        made.append(Piece(begin, end, *_rebuild_stored(piece[1:5], end - begin)))
        codec = made[-1].codec
        _expect(len(piece) == 5 + 4 * codec.relative, f"what {codec.name} needs", piece)
        if codec.relative:
            second = _rebuild_stored(piece[5:], end - begin)
            _expect(codec.pairs_with(second.codec), f"a second moment for {codec.name}", second.codec.name)
            seconds.append(Piece(begin, end, *second))
        else:
            seconds.append(made[-1])
    devices = {t.device for piece in (*made, *seconds) for t in piece.storage}
    _expect(len(devices) == 1, "all tensors on one device", devices)
    moment = StoredMoment(tuple(made), shape)
    if moment.has_relative_codes:
        moment.pair = Pair(moment.pieces, tuple(seconds), shared=False)
    return moment


# the module name in files
_rebuild.__module__ = "coat_ds.state"
# Hugging Face's Trainer and torch.load by default read with weights_only=True
torch.serialization.add_safe_globals([_rebuild])


def _rebuild_stored(stored: tuple, numel: int) -> Encoded:
    """One moment of a piece of `numel` elements."""
    name, *tensors = stored
    _expect(type(name) is str and name in CODECS, f"one of {', '.join(CODECS)}", name)
    codec = CODECS[name]
    for t, like in zip(tensors, codec.zeros(numel, device="meta"), strict=True):
        wanted = f"a contiguous vector of {like.numel()} {like.dtype}"
        _expect(type(t) is torch.Tensor and t.layout == torch.strided and not t.is_meta, wanted, type(t))
        # a tensor of stride 0 would need far more memory than the bytes in its file
        fits = (t.dtype, t.shape) == (like.dtype, like.shape) and t.is_contiguous()
        _expect(fits, wanted, f"{t.dtype}, shape {tuple(t.shape)}, stride {t.stride()}")
    return Encoded(codec, Storage(*tensors))


def _expect(holds: object, expected: str, found: object) -> None:
    if not holds:
        shown = " ".join(str(found).split())[:200]
        raise ValueError(f"stored moment: expected {expected}, found {shown}")
