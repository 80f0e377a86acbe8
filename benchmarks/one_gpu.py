"""Full fine-tuning of all layers on one GPU, states on it or in host memory."""

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import coat_ds
from benchmarks.adamw import OPTIONS
from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, row_or_note
from benchmarks.common.timing import measure, synchronize
from coat_ds import CoatAdamW
from coat_ds.optim.release import Release
from coat_ds.plan import Layout, predict
from coat_ds.plan.read import from_values
from coat_ds.plan.systems import coat

Fields = dict[str, int | bool]
LLAMA2: Fields = {"vocab_size": 32000, "tie_word_embeddings": False}


def shape(hidden: int, ffn: int, heads: int, layers: int, **rest) -> Fields:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        **rest,
    }


# kind of model in transformers, and its shape
MODELS = {
    "llama2-7b": ("llama", shape(4096, 11008, 32, 32, **LLAMA2)),
    "llama2-13b": ("llama", shape(5120, 13824, 40, 40, **LLAMA2)),
    "qwen3-14b": (
        "qwen3",
        shape(5120, 17408, 40, 40, num_key_value_heads=8, head_dim=128, vocab_size=151936),
    ),
    "qwen3-32b": (
        "qwen3",
        shape(5120, 25600, 64, 64, num_key_value_heads=8, head_dim=128, vocab_size=151936),
    ),
}
QUICK = shape(64, 128, 4, 2, num_key_value_heads=4, head_dim=16, vocab_size=512)


class Trained(NamedTuple):
    """A model and its training step.

    step: of the micro-batches that it is given.
    passes: the same forward and backward without the optimizer's step; None where they cannot be had alone.
    """

    model: torch.nn.Module
    step: Callable[[list[dict]], None]
    passes: Callable[[list[dict]], None] | None = None


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["llama2-13b"])
    add("--layers", type=int, help="default: all; ZeRO-Offload needs 16 bytes of host memory per parameter")
    add(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=["streamed, release"],
        metavar="SYSTEM",
        help="; ".join(SYSTEMS),
    )
    add("--gpu-gb", type=float, default=80, help="memory of the GPU that torch may use, 10^9 bytes")
    add("--sequences", type=int, nargs="+", default=[2048], help="tokens of a sequence")
    add("--tokens", type=int, nargs="+", default=[16384], help="tokens of a step")
    add("--micro-tokens", type=int, default=16384, help="tokens of a micro-batch at most, without release")
    add("--activations", type=json.loads, default={"attention_format": "recompute"}, help="keys of the block")
    add("--optimizer", type=json.loads, default={}, help="keys of the block's optimizer")
    add("--checkpointing", action="store_true", help="activation checkpointing of every layer")
    add("--steps", type=int, default=3, help="timed steps, after two others")


def config_of(arguments, model: str):
    import transformers

    kind, fields = MODELS[model]
    fields = QUICK if arguments.quick else fields
    if arguments.layers:
        fields = fields | {"num_hidden_layers": arguments.layers}
    return transformers.AutoConfig.for_model(kind, **fields, max_position_embeddings=32768, use_cache=False)


def built(arguments, model: str) -> torch.nn.Module:
    """A model with random weights, made on the device."""
    import transformers

    torch.manual_seed(0)
    with device():
        made = transformers.AutoModelForCausalLM.from_config(
            config_of(arguments, model), dtype=torch.bfloat16
        )
    if arguments.checkpointing:
        made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def with_coat(arguments, model: torch.nn.Module, offload: str, release: bool) -> Trained:
    coat_ds.convert(model, arguments.activations)
    optimizer = CoatAdamW(model.named_parameters(), **OPTIONS, offload=offload, **arguments.optimizer)
    optimizer.init_states()
    if release:
        optimizer.release_gradients()

    def backward(batches: list[dict]) -> None:
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()

    def step(batches: list[dict]) -> None:
        backward(batches)
        optimizer.step()
        optimizer.zero_grad()

    def passes(batches: list[dict]) -> None:
        apply = Release._apply
        Release._apply = dropped
        try:
            backward(batches)
            if release:
                # nothing is left to step
                optimizer.step()
        finally:
            Release._apply = apply
        optimizer.zero_grad()

    return Trained(model, step, passes)


def dropped(release: Release, optimizer, device: torch.device) -> None:
    """In place of `Release._apply`: frees the gradients and steps nothing."""
    for p in release._final.pop(device):
        p.grad = None


def zero_offload(model: torch.nn.Module, rows: int, accumulation: int) -> Trained:
    """Stock DeepSpeed: stage 2, masters and FP32 states on the CPU, which steps them."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "optimizer": {"type": "AdamW", "params": OPTIONS},
    }
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    # the GPU's number, so that two processes of one host use two ports
    port = 29531 + int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or 0)
    for name, value in (alone | {"MASTER_PORT": str(port)}).items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(batches: list[dict]) -> None:
        for batch in batches:
            engine.backward(engine(**batch).loss)
            engine.step()

    return Trained(engine, step)


# offload and whether gradients are released; None: DeepSpeed's
SYSTEMS = {
    "streamed, release": ("cpu", True),
    "streamed": ("cpu", False),
    "resident, release": ("none", True),
    "resident": ("none", False),
    "ZeRO-Offload": None,
}


@benchmark(options=options)
def one_gpu(arguments, table: Table) -> None:
    """Full fine-tuning of models with random weights on one GPU, of BF16 weights with exact masters.

    `release`: gradients are applied during backward, and a step is one micro-batch. `passes_s`: forward and
    backward without the optimizer's step; `not_hidden_s`: what the step takes more. `init_s`: from nothing to
    the first step. `host_gb`: the most that the process has held so far. `predicted_gb`, `error`: of
    `coat plan`'s peak, and over the measured one. `row_s`: seconds that the row took in all.
    """
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1e9 * arguments.gpu_gb / total))
    for model, system in itertools.product(arguments.models, arguments.systems):
        for sequence, tokens in itertools.product(arguments.sequences, arguments.tokens):
            start = time.perf_counter()
            released = SYSTEMS[system] is not None and SYSTEMS[system][1]
            micro_batch = max(1, (tokens if released else min(tokens, arguments.micro_tokens)) // sequence)
            accumulation = tokens // (sequence * micro_batch)
            case = {"sequence": sequence, "micro_batch": micro_batch, "accumulation": accumulation}
            row = row_or_note(lambda case=case, name=(model, system): trained(arguments, *name, **case))
            table.add(model=model, system=system, **case, **row, row_s=time.perf_counter() - start)


def trained(
    arguments, name: str, system: str, sequence: int, micro_batch: int, accumulation: int
) -> dict[str, float]:
    start = time.perf_counter()
    model, where = built(arguments, name), SYSTEMS[system]
    run = with_coat(arguments, model, *where) if where else zero_offload(model, micro_batch, accumulation)
    synchronize()
    init = time.perf_counter() - start
    ids = torch.randint(QUICK["vocab_size"], (micro_batch, sequence), device=device())
    batches = [{"input_ids": ids, "labels": ids}] * accumulation
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = measure(lambda: run.step(batches), warmup=1, repeats=arguments.steps).median / 1e3
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "checkpointing": arguments.checkpointing,
        "tokens_per_s": ids.numel() * accumulation / seconds,
        "step_s": seconds,
    }
    if run.passes:
        passes = measure(lambda: run.passes(batches), warmup=1, repeats=2).median / 1e3
        row |= {"passes_s": passes, "not_hidden_s": seconds - passes}
    row |= {
        "peak_gb": peak / 1e9,
        "host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "init_s": init,
    }
    if where and where[1]:
        predicted = predicted_bytes(arguments, name, where[0], micro_batch, sequence)
        row |= {"predicted_gb": predicted / 1e9, "error": predicted / peak - 1 if peak else 0.0}
    return row


def predicted_bytes(arguments, model: str, offload: str, micro_batch: int, sequence: int) -> float:
    """`coat plan`'s peak of a run that releases gradients."""
    system = coat(
        "",
        {"activations": arguments.activations, "optimizer": {"offload": offload, **arguments.optimizer}},
        bf16_masters=True,
        release=True,
        recompute="full" if arguments.checkpointing else "none",
    )
    sizes = from_values(config_of(arguments, model).to_dict(), None)
    layout = Layout(micro_batch=micro_batch, sequence=sequence, stage=2)
    return predict(sizes, layout, system).peak.total
