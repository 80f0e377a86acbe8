"""The optimizer step on the CPU, where DeepSpeed offloads it to: ours and DeepSpeedCPUAdam."""

import time

import torch

from benchmarks.harness import Table, Timing, benchmark
from coat_ds import CoatAdamW, state_bytes

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def deepspeed_cpu_adam(params):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, fp32_optimizer_states=True, **OPTIONS)


CASES = {
    "ours, C++": lambda params: CoatAdamW(params, **OPTIONS, min_numel=0, compiled=True),
    "ours, PyTorch": lambda params: CoatAdamW(params, **OPTIONS, min_numel=0),
    "DeepSpeedCPUAdam": deepspeed_cpu_adam,
    "torch fused": lambda params: torch.optim.AdamW(params, **OPTIONS, fused=True),
}


@benchmark(needs_gpu=False)
def adamw_cpu(arguments, table: Table) -> None:
    """One step over a flat FP32 partition with an FP32 gradient, as ZeRO-Offload has it."""
    numel = 2**18 if arguments.quick else 2**25
    for name, build in CASES.items():
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(numel).mul_(0.02))
        p.grad = torch.randn(numel).mul_(1e-3)
        optimizer = build([p])
        samples = []
        for _ in range(3 if "PyTorch" in name else 12):
            start = time.perf_counter()
            optimizer.step()
            samples.append((time.perf_counter() - start) * 1e3)
        # the first compiles, and makes the states
        timing = Timing(samples[1:], 0)
        table.add(
            optimizer=name,
            parameters=numel,
            threads=torch.get_num_threads(),
            ms=timing.median,
            low=timing.low,
            high=timing.high,
            ns_per_parameter=timing.median * 1e6 / numel,
            state_bytes_per_parameter=state_bytes(optimizer)["bytes_per_parameter"],
        )
