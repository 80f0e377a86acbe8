"""A GPT of megatron-core that learns real text in this process: where realistic tensors come from."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from coat_launch.data import load_corpus, padded_vocab_size
from coat_launch.split import Split

CONFIGS = Path(__file__).parents[1] / "configs"
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
WARMUP_STEPS = 20


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


@contextmanager
def one_process() -> Iterator[None]:
    """Megatron's process groups for this process alone; on a CPU, with what lets Megatron run there."""
    # the other benchmarks do without Megatron
    from megatron.core import parallel_state

    from megatron_ext import cpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        cpu.disable()


def join(rank: int, ranks: int, folder: str, patience: timedelta) -> None:
    """Makes this process one of `ranks` under DeepSpeed, on a GPU of its own if there are any. They meet in
    `folder`; one that waits for another longer than `patience` ends."""
    on_gpu = torch.cuda.is_available()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(1)
    import deepspeed

    if not on_gpu:
        # every rank would compile DeepSpeed's shared-memory collectives; gloo does the same
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if on_gpu else "gloo"
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience)
    deepspeed.init_distributed(backend)


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
