"""Packed batches and sliding windows of transformers' models, without a mask of sequence x sequence.

transformers builds one mask for all layers. `coat_mask` returns a `PackedMask` where it finds documents or a
window: borders of documents, which `packed_attention` reads. Any other reader of a `PackedMask` reads the
boolean mask, which is then computed once.
"""

import logging

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from coat_ds.log import log_once
from coat_kernels.attention import Documents
from coat_kernels.autograd.origin import BORDERS, note, noted

# numbers of documents that a CUDA graph has room for, and parts of the batch that a document may have
DOCUMENTS = (64, 256)
_PARTS = (4, 1)


class PackedMask(torch.Tensor):
    """A boolean mask [b, 1, s, s] without memory. Every operation of torch on it reads `whole()`."""

    packed: Documents

    @staticmethod
    def __new__(cls, packed: Documents, b: int, s: int):
        shape, device = (b, 1, s, s), packed.cu_seqlens.device
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.packed, mask.computed = packed, None
        return mask

    def whole(self) -> torch.Tensor:
        """The mask as a plain tensor."""
        if self.computed is None:
            # training may use a mask that an evaluation computed
            with torch.inference_mode(False):
                self.computed = self.packed.mask(self.shape[0], self.shape[-1])
        return self.computed

    def __repr__(self, **how):
        return f"PackedMask({self.packed})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return function(*args, **kwargs)


def coat_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **rest,
) -> torch.Tensor | None:
    """The mask of a model whose attention is converted: a `PackedMask` for documents or a sliding window,
    else transformers' own mask for "sdpa".

    mask_function(row, head, query, key): whether a token attends to another. It is read on the two diagonals
    next to the main one. Without functions of the model's own, which come with `use_vmap`, transformers
    combines causality, a window, chunks, documents and blocks that attend in both directions. A token that
    does not attend to its predecessor begins a document or a chunk. A token that attends to its successor is
    in such a block, and the batch gets the mask for "sdpa". The CPU waits for the device here and in no
    layer.
    """
    from transformers.masking_utils import sdpa_mask

    device = torch.device(rest.get("device", "cpu"))
    plain = not rest.get("use_vmap", True) and attention_mask is None and device.type != "meta"
    square = (
        q_length == kv_length > 1 and not isinstance(q_offset, torch.Tensor) and q_offset == kv_offset == 0
    )
    skipped = allow_is_causal_skip and (local_size is None or kv_length < local_size)
    if plain and square and not skipped and not torch.compiler.is_compiling():
        packed = _read(mask_function, batch_size, q_length, device)
        if packed is not None:
            window = None if local_size is None or packed.max_seqlen <= local_size else local_size - 1
            return PackedMask(packed._replace(window=window), batch_size, q_length)
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **rest,
    )


def _read(mask_function, b: int, s: int, device: torch.device) -> Documents | None:
    """The documents of `mask_function`; None if a token attends to its successor."""
    rows, later = torch.arange(b, device=device)[:, None], torch.arange(1, s, device=device)[None]
    head = torch.zeros_like(rows)
    joined = mask_function(rows, head, later, later - 1).expand(b, s - 1)
    ahead = mask_function(rows, head, later - 1, later).expand(b, s - 1)
    # one copy, for which the CPU waits
    joined, ahead = torch.stack([joined, ahead]).cpu()
    if ahead.any():
        return None
    return Documents.of(torch.cat([torch.ones_like(joined[:, :1]), ~joined], 1), device)


def documents_of(mask: torch.Tensor | None, readable: bool) -> tuple[Documents | None, torch.Tensor | None]:
    """The documents of a `PackedMask` and no mask if they are `readable`: attention takes borders. Otherwise
    no documents and the mask as a plain tensor, if there is one."""
    if type(mask) is not PackedMask:
        return None, mask
    return (mask.packed, None) if readable else (None, mask.whole())


def packed_mask(
    mask: torch.Tensor | None, arguments: dict, b: int, s: int, flash: bool
) -> torch.Tensor | None:
    """A `PackedMask` of the documents of a batch [b, s] that `cu_seq_lens_q` in the `arguments` of a layer
    gives, in the place of `mask`; `mask` itself if it is a plain tensor or there are no such borders. flash:
    as transformers' FlashAttention does, also from `position_ids` of one row, which not all models give to
    their masks."""
    if mask is not None and type(mask) is not PackedMask:
        return mask
    given = arguments.get("cu_seq_lens_q")
    if given is None and flash:
        given = _borders(arguments.get("position_ids"), s)
    if given is None:
        return mask
    # each mask of a model, such as that of windows, has its own
    holder = given if mask is None else mask
    known, found = noted(holder, BORDERS) or (None, None)
    if known == given.data_ptr():
        return found
    own = given[:0] if mask is None else mask.packed.cu_seqlens
    # one copy, for which the CPU waits
    borders = torch.cat([given, own]).tolist()
    if (last := borders[len(given) - 1]) != b * s:
        raise ValueError(
            f"cu_seq_lens_q: expected documents of all {b * s} tokens of the batch, found documents of "
            f"{last}. Give the padding at the end a document of its own."
        )
    packed = Documents.between(sorted({*borders}), given.device)
    found = PackedMask(packed._replace(window=None if mask is None else mask.packed.window), b, s)
    note(holder, BORDERS, (given.data_ptr(), found))
    return found


def _borders(positions: torch.Tensor | None, s: int) -> torch.Tensor | None:
    """Borders of the documents of one row, whose positions count from one token to the next; None if it has
    one document."""
    if positions is None or positions.shape != (1, s):
        return None
    name = BORDERS, s
    found = noted(positions, name)
    if found is None:
        cu_seqlens = Documents.of(positions.diff(prepend=positions[:, :1]) != 1, positions.device).cu_seqlens
        found = (cu_seqlens if len(cu_seqlens) > 2 else None,)
        note(positions, name, found)
    return found[0]


def cu_seqlens_of_numbers(model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """A forward pre-hook of text models that were loaded with FlashAttention. If `attention_mask` [b, s]
    numbers the documents of each row from 1, the layers get the borders of these documents instead. Packed
    batches of LLaMA-Factory and Axolotl have such masks; transformers only reads which numbers are 0. Padding
    is a document here. The CPU waits for the device."""
    mask, tokens = kwargs.get("attention_mask"), kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if torch.compiler.is_compiling() or not isinstance(mask, torch.Tensor) or tokens is None:
        return None
    if mask.dtype == torch.bool or mask.is_meta or mask.shape != tokens.shape[:2]:
        return None
    numbers = mask.cpu()
    if numbers.max() <= 1:
        return None
    before = numbers.new_full((len(numbers), 1), -1)
    packed = Documents.of(numbers.diff(prepend=before) != 0, mask.device)
    borders = {"cu_seq_lens_q": packed.cu_seqlens, "cu_seq_lens_k": packed.cu_seqlens}
    borders |= {"max_length_q": packed.max_seqlen, "max_length_k": packed.max_seqlen}
    return args, {**kwargs, "attention_mask": None, **borders}


class GraphPadding:
    """Makes packed batches of one number of tokens alike, so that one CUDA graph serves them: borders for a
    fixed number of documents, and a bound of their length. Unused documents have no tokens. A batch that
    does not fit takes the next of `DOCUMENTS` or `_PARTS`, and so do later ones: graphs are recorded again at
    most twice."""

    def __init__(self):
        self.tokens = self.documents = self.max_seqlen = 0

    def why_not(self, packed: Documents, rows: int) -> str | None:
        """Why no graph serves these documents in `rows` rows; None if one does."""
        documents = len(packed.cu_seqlens) - 1
        too_many = documents > max(rows, DOCUMENTS[-1])
        return f"for packed batches of more than {DOCUMENTS[-1]} documents" if too_many else None

    def pad(self, packed: Documents, rows: int, s: int) -> Documents:
        """The documents `packed` of a batch [rows, s], for which `why_not` is None. All layers get the same
        borders."""
        documents, tokens = len(packed.cu_seqlens) - 1, rows * s
        if documents <= rows:
            # each row is one document, in every batch
            return packed
        if self.tokens != tokens:
            self.tokens, self.documents, self.max_seqlen = tokens, 0, 0
        if documents > self.documents or packed.max_seqlen > self.max_seqlen:
            self.documents = next(n for n in DOCUMENTS if n >= max(documents, self.documents))
            parts = (-(-tokens // part) for part in _PARTS)
            self.max_seqlen = next(n for n in parts if n >= max(packed.max_seqlen, self.max_seqlen))
            log_once(
                f"packed batches of {tokens} tokens run as CUDA graphs, which have room for {self.documents} "
                f"documents of up to {self.max_seqlen} tokens.",
                logging.INFO,
            )
        name = BORDERS, self.documents
        cu_seqlens = noted(packed.cu_seqlens, name)
        if cu_seqlens is None:
            cu_seqlens = F.pad(packed.cu_seqlens, (0, self.documents - documents), value=tokens)
            note(packed.cu_seqlens, name, cu_seqlens)
        return packed._replace(cu_seqlens=cu_seqlens, max_seqlen=self.max_seqlen, cu_seqlens_cpu=None)


def traced_mask(mask: torch.Tensor | None, arguments: dict, b: int, s: int) -> torch.Tensor | None:
    """`mask`, without keys of other documents than `cu_seq_lens_q` gives, by operations that torch.compile
    traces."""
    given = arguments.get("cu_seq_lens_q")
    if given is None or (mask is not None and mask.dtype != torch.bool):
        return mask
    documents = Documents(given.to(torch.int32), s).mask(b, s)
    return documents if mask is None else mask & documents
