"""The models whose gradients are compared, and what they read."""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.common.environment import device
from benchmarks.common.harness import RESULTS
from benchmarks.common.training import Setting, train
from benchmarks.finetune import start_of
from benchmarks.finetune.pretrained import TokenLosses, hugging_face
from coat_launch.data import load_corpus, padded_vocab_size

# channels of the inputs of qkv, gate and up, and what they are multiplied by
OUTLIERS = {0: 30, 1: 50, 2: 70, 3: 100}
# sequences of a training step
BATCH = 8


class Sample(NamedTuple):
    """A model of transformers, FP32 with values of BF16, and what it reads, [b, s]."""

    names: dict[str, object]
    model: torch.nn.Module
    tokens: torch.Tensor


def with_outliers(model: torch.nn.Module) -> torch.nn.Module:
    """The same function, with some channels of normalized inputs much larger and their weights smaller."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            read = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
            norms = layer.input_layernorm, layer.post_attention_layernorm
            for norm, readers in zip(norms, read, strict=True):
                for channel, factor in OUTLIERS.items():
                    norm.weight[channel] *= factor
                    for reader in readers:
                        reader.weight[:, channel] /= factor
    return model


def in_bf16_values(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, FP32, with values that BF16 holds."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


def trained(setting: Setting, ages: list[int], tokens: int) -> Iterator[Sample]:
    """A Llama that reads the standard library, after some numbers of steps; without and with outliers."""
    import transformers

    from megatron_ext.model import load_shape

    corpus, sizes = load_corpus(seq_length=setting.seq_length, seed=0), load_shape(setting.shape_file)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=padded_vocab_size(corpus.vocab_size),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_query_groups,
    )
    with device():
        model = TokenLosses(transformers.LlamaForCausalLM(config))
    snapshots = []

    def look(step: int) -> None:
        if step - 1 in ages:
            snapshots.append(copy.deepcopy(model.model))

    torch.set_float32_matmul_precision("high")
    # `look` is called before a step, so there is one more than the last age
    train(model, corpus.train, BATCH, max(ages) + 1, look=look)
    # gradients are compared in FP32
    torch.set_float32_matmul_precision("highest")
    read = corpus.validation.batch(range(tokens // setting.seq_length))[0].to(device())
    for age, snapshot in zip(sorted(ages), snapshots, strict=True):
        names = {"model": f"Llama {setting.shape_file.stem.removeprefix('model_')}", "steps": age}
        yield Sample(names | {"outliers": False}, in_bf16_values(snapshot), read)
        outliers = in_bf16_values(with_outliers(snapshot))
        yield Sample(names | {"outliers": True}, outliers, read)


def pretrained(arguments, tokens: int) -> Sample:
    """The pretrained model, which reads this project's pages."""
    start = start_of(arguments)
    if start.tokenizer is None:
        ids = torch.randint(3, start.config.vocab_size, (tokens,))
    else:
        from tokenizers import Tokenizer

        pages = sorted((RESULTS.parents[1] / "docs").glob("*.md"))
        text = "\n".join(page.read_text() for page in pages)
        ids = torch.tensor(Tokenizer.from_str(start.tokenizer).encode(text).ids[:tokens])
    names = {"model": "tiny" if start.tokenizer is None else "SmolLM2-135M", "steps": "pretrained"}
    model = hugging_face(start).model.float()
    return Sample(names, model, ids.view(-1, min(512, tokens)).to(device()))
