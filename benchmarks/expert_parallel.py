"""Training steps of a mixture of experts on two GPUs, in BF16 and with COAT: with expert parallelism, and
under ZeRO alone."""

import argparse
import functools
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import coat_ds
from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark
from benchmarks.common.spawn import Rank, join_deepspeed, run_ranks
from benchmarks.common.timing import measure
from benchmarks.common.wide_models import SHAPES

RANKS, LAYERS, LR = 2, 4, 1e-4
TINY = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "vocab_size": 512,
}
SYSTEMS = {"BF16": False, "COAT": True}
# each shape's name in AutoEP
PRESETS = {"qwen3-30b": "qwen3_moe", "mixtral": "mixtral"}
Step = Callable[[], float]


def config_of(name: str, quick: bool):
    import transformers

    shape = SHAPES[name]
    fields = shape.fields | {"num_hidden_layers": LAYERS, "output_router_logits": False}
    return getattr(transformers, shape.config)(**fields | (TINY | {"num_hidden_layers": 1} if quick else {}))


def model_of(config) -> torch.nn.Module:
    import transformers

    with device():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def batch_of(vocabulary: int, tokens: int) -> dict[str, torch.Tensor]:
    """A batch of the rank's own, in rows of 4,096 tokens or fewer."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(vocabulary, (max(tokens // 4096, 1), min(tokens, 4096)), generator=generator)
    return {"input_ids": ids.to(device()), "labels": ids.to(device()), "use_cache": False}


def transformers_ep(coat: bool, shape: str, config, tokens: int, folder: str) -> Step:
    """transformers' `ep_size` on top of FSDP2, which needs a checkpoint to load."""
    import transformers
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        model_of(config).save_pretrained(folder)
    dist.barrier()
    sizes = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=sizes
    ).train()
    if coat:
        coat_ds.convert(model)
        optimizer = coat_ds.CoatAdamW(model.named_parameters(), lr=LR)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batch = batch_of(config.vocab_size, tokens)

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def deepspeed_zero(
    coat: bool, shape: str, config, tokens: int, folder: str, *, stage: int, spread: bool = False
) -> Step:
    """ZeRO of DeepSpeed. spread: with AutoEP."""
    import deepspeed

    torch.manual_seed(0)
    spreading = {"enabled": True, "autoep_size": RANKS, "preset_model": PRESETS[shape]}
    engine = deepspeed.initialize(
        model=model_of(config).train(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "coat": {"enabled": coat},
            **({"expert_parallel": spreading} if spread else {}),
        },
    )[0]
    batch = batch_of(config.vocab_size, tokens)

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


FRAMEWORKS = {
    "transformers": transformers_ep,
    "AutoEP": functools.partial(deepspeed_zero, stage=2, spread=True),
    "ZeRO-2": functools.partial(deepspeed_zero, stage=2),
    "ZeRO-3": functools.partial(deepspeed_zero, stage=3),
}


def rank(place: Rank, framework: str, shape: str, system: str, tokens: int, quick: bool) -> Iterator[dict]:
    warnings.simplefilter("ignore")
    join_deepspeed(place)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        step = FRAMEWORKS[framework](SYSTEMS[system], shape, config_of(shape, quick), tokens, folder[0])
        first = step().item()
        timing = measure(step, *((1, 1) if quick else (4, 15)))
        on_gpu = torch.cuda.is_available()
        yield {
            "tokens_s": 1e3 * tokens / timing.median,
            "ms": timing.median,
            "ms_p20": timing.low,
            "ms_p80": timing.high,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
            "first_loss": first,
            "loss": step().item(),
        }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--shapes", nargs="+", choices=PRESETS, default=["qwen3-30b"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank in a step")


@benchmark(needs_gpu=False, options=options)
def expert_parallel(arguments, table: Table) -> None:
    """Steps of four layers of Qwen3-30B or Mixtral: forward, backward and optimizer.

    Frameworks: transformers and AutoEP (ZeRO-2) with expert parallelism 2; ZeRO-2 and ZeRO-3 without.
    Columns: tokens_s, of one GPU; ms (median, 20th and 80th percentiles); peak_gb, all that torch holds on
    rank 0 at its peak; the losses of the first and of the last step, on the same batch. Without a GPU, or
    with --quick: a tiny layer.
    """
    quick = arguments.quick or not torch.cuda.is_available()
    tokens = 128 if quick else arguments.tokens
    for case in itertools.product(arguments.frameworks, arguments.shapes, arguments.systems):
        rows, failure = run_ranks(rank, RANKS, *case, tokens, quick)
        head = dict(zip(("framework", "shape", "system"), case, strict=True))
        table.add(**head, gpus=RANKS, tokens=tokens, **(rows[0][0] if rows[0] else {"note": failure}))
