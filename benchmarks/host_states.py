"""Steps of states in host memory, and full fine-tuning on one GPU with them."""

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Callable

import torch

import coat_ds
from benchmarks.adamw import OPTIONS, llama_sizes
from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, row_or_note
from benchmarks.common.timing import measure, synchronize
from coat_ds import CoatAdamW
from coat_ds.optim import host_states as streamed

# slots, and elements of a chunk
CASES = [(3, 2**24), (4, 2**24), (6, 2**24), (4, 2**23), (3, 2**25), (4, 2**25)]
LLAMA2 = {
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
    },
}
QUICK = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def link_ms(size: int) -> float:
    """Milliseconds in which `size` bytes are copied to the GPU, and the same number back, at once."""
    part = min(size, 2**30)
    if not torch.cuda.is_available():
        return float("nan")
    here = [torch.empty(part, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(part, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        for stream, target, source in ((streams[0], there[0], here[0]), (streams[1], here[1], there[1])):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)

    return measure(both, warmup=3, repeats=10).median * size / part


def cpu_ms(step: Callable[[], None]) -> float:
    """Milliseconds of the CPU in a step, without those in which it waits for the end of the copies."""
    end, waited = streamed.Passage.end, []

    def timed(passage: streamed.Passage) -> None:
        start = time.perf_counter()
        end(passage)
        waited.append(time.perf_counter() - start)

    streamed.Passage.end = timed
    try:
        synchronize()
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start - sum(waited))
    finally:
        streamed.Passage.end = end


@benchmark
def host_states(arguments, table: Table) -> None:
    """A step of BF16 parameters whose states stream from host memory, by slots and elements of a chunk.

    `to_link`: over the time in which the same bytes are copied in both directions at once. `cpu_ms`: until
    the CPU has launched the step. `init_s`: seconds in which the states are created, once.
    """
    shapes = llama_sizes(8, 4096, 11008)
    params = [
        torch.nn.Parameter(0.02 * torch.randn(shape, device=device(), dtype=torch.bfloat16))
        for shape in (shapes[1:5] if arguments.quick else shapes[1:-2])
    ]
    for p in params:
        p.grad = 1e-3 * torch.randn_like(p)
    numel = sum(p.numel() for p in params)
    optimizer = CoatAdamW(params, **OPTIONS, offload="cpu")
    synchronize()
    start = time.perf_counter()
    optimizer.init_states()
    row = {"init_s": time.perf_counter() - start}
    size = coat_ds.state_bytes(optimizer)["bytes"]
    link = link_ms(size)
    usual = streamed.SLOTS, streamed.CHUNK
    try:
        for slots, chunk in CASES:
            streamed.SLOTS, streamed.CHUNK = slots, chunk
            timing = measure(optimizer.step, warmup=3, repeats=5)
            table.add(
                parameters=numel,
                chunk=chunk,
                slots=slots,
                ms=timing.median,
                gb_per_s_each_way=size / timing.median / 1e6,
                to_link=timing.median / link,
                cpu_ms=cpu_ms(optimizer.step),
                peak_mib=timing.peak / 2**20,
                **row,
            )
    finally:
        streamed.SLOTS, streamed.CHUNK = usual


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=LLAMA2, default="13b", help="shape of Llama-2")
    add("--layers", type=int, help="default: all; ZeRO-Offload needs 16 bytes of host memory per parameter")
    add(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=["streamed"],
        metavar="SYSTEM",
        help=", ".join(SYSTEMS),
    )
    add("--gpu-gb", type=float, default=80, help="memory of the GPU that torch may use, 10^9 bytes")
    add("--sequence", type=int, default=2048)
    add("--micro-batches", type=int, nargs="+", default=[8])
    add("--activations", type=json.loads, default={"attention_format": "recompute"}, help="keys of the block")
    add("--checkpointing", action="store_true", help="activation checkpointing of every layer")
    add("--steps", type=int, default=4, help="after two that are not timed")


def built(arguments) -> torch.nn.Module:
    """A Llama-2 with random weights, made on the device."""
    import transformers

    fields = dict(LLAMA2[arguments.model])
    if arguments.layers:
        fields["num_hidden_layers"] = arguments.layers
    config = transformers.LlamaConfig(
        **(QUICK if arguments.quick else fields), max_position_embeddings=4096, use_cache=False
    )
    torch.manual_seed(0)
    with device():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def coat_step(arguments, offload: str, release: bool) -> tuple[torch.nn.Module, Callable]:
    model = built(arguments)
    coat_ds.convert(model, arguments.activations)
    optimizer = CoatAdamW(model.named_parameters(), **OPTIONS, offload=offload)
    optimizer.init_states()
    if release:
        optimizer.release_gradients()

    def step(batch: dict) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def zero_offload(arguments) -> tuple[torch.nn.Module, Callable]:
    """Stock DeepSpeed: stage 2, masters and FP32 states on the CPU, which steps them."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "optimizer": {"type": "AdamW", "params": OPTIONS},
    }
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": "29531"}).items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    engine, *_ = deepspeed.initialize(model=built(arguments), config=config)

    def step(batch: dict) -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return engine, step


SYSTEMS = {
    "streamed": lambda arguments: coat_step(arguments, "cpu", True),
    "streamed after backward": lambda arguments: coat_step(arguments, "cpu", False),
    "resident": lambda arguments: coat_step(arguments, "none", True),
    "ZeRO-Offload": zero_offload,
}


@benchmark(options=options)
def one_gpu(arguments, table: Table) -> None:
    """Full fine-tuning of all layers of a Llama-2 with random weights on one GPU.

    `streamed`: BF16 weights with exact masters, states in host memory, gradients applied during backward.
    `init_s`: from nothing to the first step. `host_gb`: the most that the process has held so far.
    """
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1e9 * arguments.gpu_gb / total))
    for system, micro_batch in itertools.product(arguments.systems, arguments.micro_batches):
        row = row_or_note(lambda system=system, rows=micro_batch: trained(arguments, SYSTEMS[system], rows))
        table.add(
            model=arguments.model, system=system, sequence=arguments.sequence, micro_batch=micro_batch, **row
        )


def trained(arguments, make: Callable, rows: int) -> dict:
    start = time.perf_counter()
    model, step = make(arguments)
    synchronize()
    init = time.perf_counter() - start
    ids = torch.randint(
        QUICK["vocab_size"], (rows, 64 if arguments.quick else arguments.sequence), device=device()
    )
    timing = measure(lambda: step({"input_ids": ids, "labels": ids}), warmup=1, repeats=arguments.steps)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "checkpointing": arguments.checkpointing,
        "tokens_per_s": 1e3 * ids.numel() / timing.median,
        "step_s": timing.median / 1e3,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0,
        "host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "init_s": init,
    }
