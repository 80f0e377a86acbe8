"""Models of transformers with layers of real width."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """A model as wide as a real one, of few layers, without a head."""

    config: str
    fields: dict
    inputs: Callable[[torch.device, int], dict]
    layers: int = 4


def _tokens(device: torch.device, tokens: int) -> dict:
    ids = torch.randint(0, 1000, (max(tokens // 4096, 1), min(tokens, 4096)), device=device)
    return {"input_ids": ids, "use_cache": False}


def _with_images(device: torch.device, tokens: int) -> dict:
    found = _tokens(device, tokens)
    rows, patches = len(found["input_ids"]), 576
    found["input_ids"][:, :patches] = 32000
    pixels = torch.randn(rows, 3, 336, 336, device=device, dtype=torch.bfloat16)
    return found | {"pixel_values": pixels}


_LLAMA3 = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32064,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}
_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
SHAPES = {
    "llama3-8b": Shape("LlamaConfig", _LLAMA3, _tokens),
    "qwen3-8b": Shape("Qwen3Config", _LLAMA3 | {"intermediate_size": 12288, "head_dim": 128}, _tokens),
    # small enough to wait for Python
    "qwen3-0.6b": Shape(
        "Qwen3Config",
        _LLAMA3
        | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128},
        _tokens,
        layers=28,
    ),
    "qwen3-30b": Shape(
        "Qwen3MoeConfig",
        _LLAMA3
        | {"hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        _tokens,
    ),
    "mixtral": Shape("MixtralConfig", _LLAMA3 | {"num_local_experts": 8, "num_experts_per_tok": 2}, _tokens),
    "olmoe": Shape(
        "OlmoeConfig",
        _LLAMA3
        | {"hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
        _tokens,
    ),
    "gpt-oss-20b": Shape(
        "GptOssConfig",
        _LLAMA3
        | {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "head_dim": 64}
        | {"num_local_experts": 32, "num_experts_per_tok": 4},
        _tokens,
    ),
    "vlm": Shape(
        "LlavaConfig",
        {
            "vision_config": _VISION,
            "text_config": {"model_type": "llama"} | _LLAMA3,
            "image_token_index": 32000,
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": -1,
        },
        _with_images,
    ),
}
