"""Core attention of Megatron's classes, and its inputs."""

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_ext.layers.attention import SDPACoreAttention

S, B, HEADS, D = 24, 2, 4, 16


def config(**overrides) -> TransformerConfig:
    settings = dict(
        num_layers=1,
        hidden_size=HEADS * D,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
    )
    return TransformerConfig(**(settings | overrides))


def attention(cls=SDPACoreAttention, softmax_scale=None, given=None, **overrides):
    """given: further arguments of the module; overrides: fields of Megatron's config."""
    return cls(
        config=config(**overrides),
        layer_number=2,
        attn_mask_type=AttnMaskType.causal,
        softmax_scale=softmax_scale,
        attention_type="self",
        **(given or {}),
    )


def qkv(device, groups=HEADS, dtype=torch.float32):
    """q, k, v as Megatron makes them: q and k are outputs of rotary positions, v is a view of the fused
    GEMM's output. The values are numbers of BF16."""
    torch.manual_seed(0)
    fused = torch.randn(S, B, groups, (HEADS // groups + 2) * D, device=device).bfloat16().to(dtype)
    q, k, v = fused.requires_grad_().split([HEADS // groups * D, D, D], dim=3)
    return fused, q.reshape(S, B, HEADS, D).clone(), k.clone(), v
