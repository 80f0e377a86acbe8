"""The documents of Megatron's batches: packed sequences (THD), and masks of `--reset-attention-mask`.

All layers of a forward receive the same tensors, so that what the first layer finds is noted on them. There
the CPU waits for the device.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from coat_kernels.attention import Documents
from coat_kernels.autograd.origin import BORDERS, TABLES, note, noted

Tables = tuple[torch.Tensor, torch.Tensor]


def is_thd(params: PackedSeqParams | None) -> bool:
    return params is not None and params.qkv_format == "thd"


def packed_sequences(params: PackedSeqParams, tokens: int) -> Documents:
    """The documents of packed sequences with `tokens` tokens. Padding at the end of a document belongs to the
    document: no token attends to later ones.

    Raises ValueError for another format than THD, without documents, for keys of other documents than the
    queries', and for documents that do not cover all tokens.
    """
    if not is_thd(params) or params.cu_seqlens_q is None:
        raise ValueError(
            "packed_seq_params: expected qkv_format 'thd' and cu_seqlens_q, found "
            f"{params.qkv_format!r} and {params.cu_seqlens_q}. Pack sequences one after another, or give no "
            "packed_seq_params."
        )
    given, of_keys = (
        exact if padded is None else padded
        for exact, padded in (
            (params.cu_seqlens_q, params.cu_seqlens_q_padded),
            (params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
        )
    )
    found = noted(given, BORDERS)
    if found is None:
        if of_keys is not None and of_keys is not given and not of_keys.equal(given):
            raise ValueError(
                "packed_seq_params: expected equal cu_seqlens_q and cu_seqlens_kv, found "
                f"{given.tolist()} and {of_keys.tolist()}. Tokens attend to their own document."
            )
        found = Documents.between(given.tolist(), given.device)
        note(given, BORDERS, found)
    if (last := found.cu_seqlens_cpu[-1]) != tokens:
        raise ValueError(
            f"packed_seq_params: expected documents of all {tokens} tokens of the batch, found cu_seqlens_q "
            f"that ends at {last}. Give the padding at the end a document of its own."
        )
    return found


def masked_documents(mask: torch.Tensor | None, s: int, b: int) -> Documents:
    """The documents of `b` sequences of `s` tokens by Megatron's mask [b, 1, s, s], which is True where a
    token does not attend to another. A token that does not attend to the token before it begins a document.

    Raises ValueError without a mask of this shape.
    """
    if mask is None or mask.shape != (b, 1, s, s):
        raise ValueError(
            f"--reset-attention-mask: expected a mask [{b}, 1, {s}, {s}], found "
            f"{None if mask is None else list(mask.shape)}. Megatron makes it in its data loader, for the "
            "first and the last pipeline stage: drop --no-create-attention-mask-in-dataloader, take at most "
            "two stages, or pack sequences (THD)."
        )
    found = noted(mask, BORDERS)
    if found is None:
        begins = mask[:, 0].diagonal(-1, 1, 2)
        found = Documents.of(torch.cat([torch.ones_like(begins[:, :1]), begins], 1), mask.device)
        note(mask, BORDERS, found)
    return found


def by_token(tables: Tables, packed: Documents, tokens: int) -> Tables:
    """The rows of `tables` for the position of each token in its document.

    Raises ValueError if a document is longer than the tables.
    """
    if packed.max_seqlen > len(tables[0]):
        raise ValueError(
            f"packed_seq_params: expected max_seqlen_q of at least {packed.max_seqlen}, that of the "
            f"longest document, found {len(tables[0])}."
        )
    given, found = noted(packed.cu_seqlens, TABLES) or (None, None)
    if given is not tables:
        with torch.inference_mode(False):
            positions = packed.positions(tokens)
            found = tables[0][positions], tables[1][positions]
        note(packed.cu_seqlens, TABLES, (tables, found))
    return found
