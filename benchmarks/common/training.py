"""A GPT of megatron-core that learns real text in this process: where realistic tensors come from."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common.environment import device
from benchmarks.common.shapes import Stack
from coat_launch.data import load_corpus, padded_vocab_size
from coat_launch.split import Batch, Split

CONFIGS = Path(__file__).parents[2] / "configs"
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
WARMUP_STEPS = 20
# small, so that layers are what counts
STACK_VOCABULARY = 1024

# what a parameter's name holds, by kind; norms are named after what they precede, so they are asked for first
KINDS = {
    "norm": "norm",
    "word_embeddings": "embedding",
    "output_layer": "head",
    "attention": "attention",
    "mlp": "MLP",
}


class Setting(NamedTuple):
    """What is trained, and on how much in a step."""

    shape_file: Path
    batch_size: int
    seq_length: int


SMALL = Setting(CONFIGS / "model_quickstart.json", 8, 128)
LARGE = Setting(CONFIGS / "model_125m.json", 32, 512)


class Trained(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    held_out: Split
    """Text that it has not seen."""


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean loss of a batch of `coat_launch.split`."""
    device = next(model.parameters()).device
    tokens, labels, _, positions = (t.to(device) for t in batch)
    return model(tokens, positions, None, labels=labels).mean()


def train_gpt(
    setting: Setting,
    steps: int,
    seed: int = 1234,
    look: Callable[[torch.nn.Module, int], None] | None = None,
) -> Trained:
    """Trains in FP32, with FP32 moments, on the standard library's sources.

    The seed decides weights, the order of the text and what of it is held out. `look` is called before each
    step, counted from 1, with the model and its clipped gradients.
    """
    from megatron_ext import layer_specs
    from megatron_ext.model import build_gpt, load_shape

    corpus = load_corpus(seq_length=setting.seq_length, seed=seed)
    model = build_gpt(
        load_shape(setting.shape_file),
        layer_specs.sdpa_layer_spec,
        seq_length=setting.seq_length,
        vocab_size=padded_vocab_size(corpus.vocab_size),
        bf16=False,
        seed=seed,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / WARMUP_STEPS))
    for step in range(steps):
        first = step * setting.batch_size
        loss = loss_of(model, corpus.train.batch(range(first, first + setting.batch_size)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if look is not None:
            look(model, step + 1)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step + 1} of {steps}: loss {loss.item():.4f}", flush=True)
    return Trained(model, optimizer, corpus.validation)


def kind_of(name: str) -> str:
    """Of a parameter of such a GPT: one of the values of KINDS."""
    return next(kind for part, kind in KINDS.items() if part in name)


def stack_gpt(stack: Stack, spec: str, **config: object) -> tuple[torch.nn.Module, Batch]:
    """Megatron's GPTModel of a stack by a spec of `megatron_ext.layer_specs`, and random tokens for it.

    `config`: further fields of Megatron's TransformerConfig.
    """
    from megatron_ext import layer_specs
    from megatron_ext.model import ModelShape, build_gpt

    x = stack.layer
    model = build_gpt(
        ModelShape(stack.layers, x.hidden, x.ffn, x.heads, x.groups),
        getattr(layer_specs, spec),
        seq_length=x.sequence,
        vocab_size=STACK_VOCABULARY,
        **config,
    ).train()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(STACK_VOCABULARY, (x.batch, x.sequence), generator=generator).to(device())
    positions = torch.arange(x.sequence, device=device()).expand_as(tokens)
    return model, Batch(tokens, tokens, torch.ones_like(tokens), positions)
