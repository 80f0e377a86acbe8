"""Packed batches."""

import torch
from transformers import (
    DataCollatorWithFlattening,
)

from tests.families import VOCABULARY


def documents(lengths) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def flat(lengths, **options) -> dict:
    """The batch of transformers' own collator."""
    return dict(DataCollatorWithFlattening(**options)(documents(lengths), return_tensors="pt"))


def loaded_with_flash(model: torch.nn.Module) -> torch.nn.Module:
    """The model as from_pretrained makes it where the package of FlashAttention is installed."""
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def only_attention(name, _) -> bool:
    return name.endswith("self_attn")
