"""Small models of each family of transformers, with inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import coat_ds

HIDDEN, VOCABULARY, LAYERS = 128, 256, 2
# of a vision tower: patches of 8 x 8 in images of 32 x 32
IMAGE, PATCH = 32, 8
IMAGE_TOKEN = VOCABULARY - 1

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # as Trainer has it; generate() asks for a cache itself
    "use_cache": False,
}
_GROUPED = _TEXT | {"num_key_value_heads": 2}
_WINDOW = {"sliding_window": 48}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}
_VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": PATCH,
}


@dataclass(frozen=True)
class Family:
    """A family's model: names of its classes in transformers, and the config's fields."""

    config: str
    model: str
    fields: dict = field(default_factory=dict)
    inputs: str = "text"
    # that can keep a cache and generate
    generates: bool = True
    # RMSNorm, gated feed-forward and grouped queries, whose saved bytes are promised
    like_llama: bool = False

    def build(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **fields) -> torch.nn.Module:
        """The model with random weights, training, without dropout; `fields` of the config besides."""
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**_nested(self.fields), **fields})
        return getattr(transformers, self.model)(config).to(dtype).train()

    def deeper(self, layers: int, **build) -> torch.nn.Module:
        """`build` with this number of layers in each of its stacks."""
        return replace(self, fields=_with_layers(self.fields, layers)).build(**build)

    def batch(
        self, seed: int = 0, rows: int = 2, tokens: int = 64, dtype: torch.dtype = torch.bfloat16
    ) -> dict:
        """Inputs that give the model a loss; `dtype` of images."""
        return _INPUTS[self.inputs](torch.Generator().manual_seed(seed), rows, tokens, dtype)


def _nested(fields: dict) -> dict:
    """A copy, since configs change what they are handed."""
    return {name: _nested(value) if isinstance(value, dict) else value for name, value in fields.items()}


def _with_layers(fields: dict, layers: int) -> dict:
    return {
        name: layers
        if name in ("num_hidden_layers", "n_layer")
        else _with_layers(value, layers)
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }


def _text(generator, rows, tokens, dtype) -> dict:
    # ramps with a few steps, so that there is something to learn
    start = torch.randint(3, IMAGE_TOKEN, (rows, 1), generator=generator)
    step = torch.randint(1, 4, (rows, 1), generator=generator)
    ids = 3 + (start + step * torch.arange(tokens)) % (IMAGE_TOKEN - 3)
    return {"input_ids": ids, "labels": ids.clone()}


def _pixels(generator, rows, dtype) -> torch.Tensor:
    return torch.randn(rows, 3, IMAGE, IMAGE, generator=generator).to(dtype)


def _images(generator, rows, tokens, dtype) -> dict:
    labels = torch.randint(0, 10, (4 * rows,), generator=generator)
    # each label has its brightness
    brightness = labels.view(-1, 1, 1, 1).to(dtype) / 5
    return {"pixel_values": _pixels(generator, 4 * rows, dtype) + brightness, "labels": labels}


def _both(generator, rows, tokens, dtype) -> dict:
    found = _text(generator, rows, tokens, dtype)
    patches = (IMAGE // PATCH) ** 2
    found["input_ids"][:, 1 : 1 + patches] = IMAGE_TOKEN
    found["labels"][:, 1 : 1 + patches] = -100
    return found | {"pixel_values": _pixels(generator, rows, dtype)}


_INPUTS: dict[str, Callable] = {"text": _text, "images": _images, "both": _both}

FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _GROUPED, like_llama=True),
    "mistral": Family("MistralConfig", "MistralForCausalLM", _GROUPED | _WINDOW, like_llama=True),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", _GROUPED, like_llama=True),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _GROUPED | {"head_dim": 32}, like_llama=True),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", _GROUPED | _GEMMA | _WINDOW),
    "gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _GROUPED | _GEMMA | _WINDOW,
        like_llama=True,
    ),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", _GROUPED, like_llama=True),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 512}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", _TEXT),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        _TEXT | {"ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "dropout": 0.0},
    ),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", _GROUPED | {"num_local_experts": 4}),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _GROUPED
        | {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN},
    ),
    "qwen3_moe_grouped": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _GROUPED
        | {"head_dim": 32, "num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": HIDDEN // 2},
    ),
    "bert": Family(
        "BertConfig",
        "BertForMaskedLM",
        _TEXT | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        generates=False,
    ),
    "vit": Family(
        "ViTConfig",
        "ViTForImageClassification",
        _VISION
        | {"num_labels": 10}
        | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        inputs="images",
        generates=False,
    ),
    "siglip": Family(
        "SiglipConfig",
        "SiglipForImageClassification",
        {"vision_config": _VISION, "text_config": _TEXT, "num_labels": 10},
        inputs="images",
        generates=False,
    ),
    "llava": Family(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model"} | _VISION,
            "text_config": {"model_type": "llama"} | _GROUPED,
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": -1,
        },
        inputs="both",
    ),
}


def losses_of(family: Family, steps: int, activations: dict | None, seed: int = 0) -> list[float]:
    """The loss of each step of a small run; `seed` is of the weights."""
    model = family.build(seed=seed)
    if activations is not None:
        coat_ds.convert(model, activations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        loss = model(**family.batch(seed=step, rows=4, tokens=32)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
