"""Models that learn real text in this process: where realistic tensors come from."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common.environment import device
from benchmarks.common.shapes import Stack
from coat_launch.batches import Batch, Split
from coat_launch.data import load_corpus, padded_vocab_size

CONFIGS = Path(__file__).parents[2] / "configs"
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
WARMUP_STEPS = 20
# small, so that layers are what counts
STACK_VOCABULARY = 1024

# what a parameter's name holds, in Megatron and in transformers; norms are named after what they precede, so
# they are matched first
KINDS = {
    "norm": ("norm",),
    "embedding": ("word_embeddings", "embed_tokens"),
    "head": ("output_layer", "lm_head"),
    "attention": ("attention", "attn"),
    "MLP": ("mlp",),
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
    """Mean loss of a batch of `coat_launch.batches`."""
    device = next(model.parameters()).device
    tokens, labels, _, positions = (t.to(device) for t in batch)
    return model(tokens, positions, None, labels=labels).mean()


def gpt(
    setting: Setting,
    vocab_size: int,
    seed: int,
    spec: str = "sdpa_layer_spec",
    *,
    bf16: bool = False,
    **config: object,
) -> torch.nn.Module:
    """A GPT, in FP32 unless `bf16`; the seed decides its weights. `config` goes to `build_gpt`."""
    from megatron_ext import layer_specs
    from megatron_ext.model import build_gpt, load_shape

    return build_gpt(
        load_shape(setting.shape_file),
        getattr(layer_specs, spec),
        seq_length=setting.seq_length,
        vocab_size=padded_vocab_size(vocab_size),
        bf16=bf16,
        seed=seed,
        **config,
    )


def train(
    model: torch.nn.Module,
    text: Split,
    batch_size: int,
    steps: int,
    lr: float = LR,
    look: Callable[[int], None] | None = None,
) -> torch.optim.Optimizer:
    """Trains with FP32 moments.

    `look` is called before each step, counted from 1, when clipped gradients lie at the parameters.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / WARMUP_STEPS))
    started = time.monotonic()
    for step in range(steps):
        loss = loss_of(model, text.batch(range(step * batch_size, (step + 1) * batch_size)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if look is not None:
            look(step + 1)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            seconds = time.monotonic() - started
            print(f"step {step + 1} of {steps}, {seconds:.0f} s: loss {loss.item():.4f}", flush=True)
    return optimizer


def train_gpt(setting: Setting, steps: int, seed: int = 1234) -> Trained:
    """Trains on the standard library's sources.

    The seed decides weights, the order of the text and what of it is held out.
    """
    corpus = load_corpus(seq_length=setting.seq_length, seed=seed)
    model = gpt(setting, corpus.vocab_size, seed)
    optimizer = train(model, corpus.train, setting.batch_size, steps)
    return Trained(model, optimizer, corpus.validation)


def kind_of(name: str) -> str:
    """The kind of a parameter: one of KINDS."""
    return next(kind for kind, parts in KINDS.items() if any(part in name for part in parts))


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
