"""The least time that a step can take: GEMMs at the rates of GEMMs, all other kernels at that of a copy.

Three parts follow each other: forward and backward with their kernels, the optimizer's step, and messages.
The GPU was busy for 3 to 25 % longer with COAT, and for 20 to 40 % longer with Megatron's own BF16 layers
(benchmarks/results/train_*.csv, compute_ms). Rates are those of 8,192 rows: with 2,048 tokens a pass COAT
took 41 % longer. Steps that the CPU cannot launch in time, and ZeRO-3's small ones, take up to twice as long.
"""

from dataclasses import dataclass

from coat_ds.plan.gpus import GB, Gpu
from coat_ds.plan.layout import Layout
from coat_ds.plan.model_states import ModelStates
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System
from coat_kernels.groups import GROUP_FORMATS

# bytes a second from and to host memory, if both run at once (90.4 GB/s in all on an H100)
TWO_WAY_LINK = 45 * GB


@dataclass(frozen=True, slots=True)
class Time:
    """Milliseconds of a step on a GPU, of all its micro-batches."""

    compute: float
    """Forward and backward."""
    optimizer: float
    messages: float
    """Their overlap with computation is not counted: as measured, even at stage 3 hardly any of their time is
    hidden. Messages between experts are not counted."""

    @property
    def total(self) -> float:
        return self.compute + self.optimizer + self.messages


def layer_flops(sizes: Sizes, batch: int, sequence: int) -> float:
    """FLOPs of a layer's GEMMs, forward and backward; attention's over the half that causality leaves."""
    return 6 * batch * sequence * (sizes.active_matrices + sequence * sizes.queries)


def flops(sizes: Sizes, batch: int, sequence: int) -> float:
    """FLOPs of forward and backward of the whole model; recompute is not counted."""
    return sizes.layers * layer_flops(sizes, batch, sequence) + 6 * batch * sequence * sizes.table


def step_time(sizes: Sizes, layout: Layout, system: System, gpu: Gpu) -> Time:
    """Time of a step with all its micro-batches."""
    compute = sizes.layers * _layer_time(sizes, layout, system, gpu)
    # the head, and logits: to FP32 and back, their exponentials and sums
    compute += layout.tokens * (6 * sizes.table / gpu.bf16 + 20 * sizes.vocabulary / gpu.copy)
    # each stage of a pipeline waits for the others before its first micro-batch and after its last one
    compute *= (layout.accumulation + layout.pipeline - 1) / layout.pipeline
    optimizer = _optimizer_time(sizes, layout, system, gpu)
    if system.release:
        # backward, two GEMMs of three, hides the copies
        optimizer = max(0, optimizer - 2 / 3 * compute)
    seconds = (
        compute,
        optimizer,
        _message_bytes(sizes, layout, system) / gpu.link,
    )
    return Time(*(1e3 * part for part in seconds))


def _layer_time(sizes: Sizes, layout: Layout, system: System, gpu: Gpu) -> float:
    """Seconds of a layer's forward and backward of a micro-batch, mean over the layers."""
    full = system.recompute == "full"
    again = sizes.recomputes_attention * system.recomputes_attention
    in_fp8 = 0 if system.layers == "bf16" else sizes.converted_active
    gemms = (in_fp8 / gpu.fp8 if in_fp8 else 0) + (sizes.active_matrices - in_fp8) / gpu.bf16
    # two GEMMs in backward for one in forward; recompute is one more forward of what is recomputed
    passes = 3 + full + again * sizes.hidden * sizes.qkv / sizes.active_matrices
    if system.recompute == "mlp":
        passes += sizes.hidden * sizes.fc1 / sizes.layer_matrices
    attention = (3.5 + full + again) * layout.sequence * sizes.queries / gpu.attention
    kernels = _layer_bytes(sizes, system) * (4 / 3 if full else 1) / gpu.copy
    found = layout.tokens * (2 * passes * gemms + 2 * attention + kernels)
    if system.layers != "bf16":
        # weights to FP8, by rows and by columns, in each micro-batch
        converted = sizes.converted_matrices / layout.tensor
        converted -= layout.remote_expert_share * sizes.expert_weights / sizes.layers
        found += 6 * converted / (layout.accumulation if system.caches_weights else 1) / gpu.copy
    return found


def _layer_bytes(sizes: Sizes, system: System) -> float:
    """Bytes that a layer's kernels read and write for a token, except in GEMMs and attention."""
    h, f, a, o = sizes.hidden, sizes.active_ffn, sizes.qkv, sizes.queries
    u = (1 + sizes.gated) * f
    if system.layers == "bf16":
        # norms and residual additions; the activation; positions
        found = 36 * h + 4 * f + 6 * u + 8 * a
    else:
        # What is saved is written once and read twice. Inputs of GEMMs are written in FP8 by rows and by
        # columns. Gradients are read in BF16, and written in FP8 twice.
        found = 3 * saved_per_token(sizes, system) + 40 * h + 6 * f + 6 * u + 12 * a + 4 * o
        if system.layers == "coat" and system.coat.activations.attention_format in GROUP_FORMATS:
            # to 8 bits, and back
            found += 4 * (a + o)
    # tokens are brought into the experts' order and back, and their outputs weighted; the gradients, too
    return found + sizes.mean(0, 12 * h * sizes.experts.used if sizes.experts else 0)


def _optimizer_time(sizes: Sizes, layout: Layout, system: System, gpu: Gpu) -> float:
    """Seconds of the optimizer's step. Nothing hides copies between the GPU and host memory."""
    states = ModelStates(sizes, layout, system)
    if states.on_cpu:
        return states.offloaded / TWO_WAY_LINK
    # gradients are read and weights are written; other optimizers make BF16 gradients FP32 first
    each = 4 if system.optimizer == "coat" else 4 + 10
    moved = 2 * (states.masters + states.states) + each * states.part
    return max(moved / gpu.copy, states.streamed / TWO_WAY_LINK) / layout.pipeline


def _message_bytes(sizes: Sizes, layout: Layout, system: System) -> float:
    """Bytes that a GPU sends in a step."""
    # each rank sends all except its own part of what is gathered or reduced
    weights = 2 * sizes.parameters * (1 / layout.tensor / layout.pipeline - 1 / layout.gpus)
    weights -= 2 * layout.remote_expert_share * sizes.expert_weights / layout.pipeline
    # ZeRO-2 reduces gradients in each micro-batch and gathers weights once; ZeRO-3 gathers for forward and
    # for backward of each micro-batch
    times = {2: layout.accumulation + 1, 3: 3 * layout.accumulation}
    # Around attention and around the feed-forward layer three gathers of hidden states, one of them for
    # gradients of weights, and two reductions, which are in BF16
    gathered = 2 if system.layers == "bf16" else 1
    hidden = 2 * (3 * gathered + 2 * 2) * layout.tokens * sizes.hidden * (layout.tensor - 1)
    found = times.get(layout.stage, 2) * weights
    return found + layout.accumulation * sizes.layers * hidden / layout.pipeline
