"""The least time that a step can take: products at the rates of products, everything else at that of a copy.

A step waits for the products of its layers and its head, for attention, for the bytes that all other
kernels read and write, for the optimizer, and for messages. Nothing else is counted: no
launches, no kernel's own losses. The GPU was busy for 3 to 25 % longer with COAT, and for 20 to 40 % longer
with Megatron's own BF16 layers, which are not fused (benchmarks/results/train_*.csv, compute_ms). Rates are
those of 8,192 rows: with 2,048 tokens a pass COAT took 41 % longer, with 4,096 BF16 49 %.
Steps that the CPU cannot launch in time, and ZeRO-3's small ones, take up to twice as long.
"""

from dataclasses import dataclass

from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import Experts
from coat_ds.plan.layout import Layout
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System
from coat_kernels.groups import GROUP_FORMATS

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What a GPU can do: operations and bytes a second."""

    name: str
    memory: float
    """Bytes that torch's allocator can have: all but what CUDA and NCCL take, 3 x 10^9."""
    bf16: float
    """Rate of BF16 GEMMs, two operations for each multiplication."""
    fp8: float
    """Rate of FP8 GEMMs with a scale per tensor; 0 without FP8."""
    attention: float
    """Rate of causal attention, forward and backward."""
    copy: float
    """Bytes that a copy reads and writes."""
    link: float
    """Bytes that a GPU sends to others of its host in messages that all take part in."""
    source: str
    """Where the rates are from."""


# Products of a 7B layer, 8192 rows: BF16 660 to 790 TFLOP/s, FP8 1210 to 1380; attention of 4 x 32 heads x
# 2048 x 128, 4.81e11 operations, in 1.23 ms by cuDNN; a copy at 4.28 TB/s of the data sheet's 4.8
_H200 = Gpu(
    name="H200",
    memory=150.1 * GB - 3 * GB,
    bf16=725e12,
    fp8=1295e12,
    attention=4.81e11 / 1.23e-3,
    copy=4.28e12,
    link=368 * GB,
    source="measured on H200s (torch 2.11, CUDA 13.0); link: a copy between two, 368 GB/s",
)


def _of_data_sheet(name: str, memory: float, bf16: float, fp8: float, bandwidth: float, link: float) -> Gpu:
    """A GPU that was not measured: GB, dense TFLOP/s with FP32 sums and GB/s of its data sheet, at the shares
    of theirs that an H200 reaches (of 989 and 1,979 TFLOP/s, and 4,800 GB/s)."""
    return Gpu(
        name=name,
        memory=memory * GB - 3 * GB,
        bf16=bf16 * 1e12 * _H200.bf16 / 989e12,
        fp8=fp8 * 1e12 * _H200.fp8 / 1979e12,
        attention=bf16 * 1e12 * _H200.attention / 989e12,
        copy=bandwidth * GB * _H200.copy / (4800 * GB),
        link=link * GB,
        source="its data sheet, at the share of theirs that H200s reach; nothing was measured on it",
    )


GPUS = {
    "h200": _H200,
    "h100": Gpu(
        name="H100",
        memory=85.0 * GB - 3 * GB,
        bf16=_H200.bf16,
        fp8=_H200.fp8,
        attention=_H200.attention,
        copy=3.03e12,
        link=_H200.link,
        source="a copy of 3.03 TB/s, measured on an H100; else as the H200, which has the same cores",
    ),
    "a100": _of_data_sheet("A100", 85.0, 312, 0, 2039, 245),
    "b200": _of_data_sheet("B200", 192, 2250, 4500, 8000, 736),
    "l40s": _of_data_sheet("L40S", 47.7, 362, 733, 864, 25),
    "4090": _of_data_sheet("RTX 4090", 25.3, 165, 330, 1008, 25),
    "5090": _of_data_sheet("RTX 5090", 33.7, 209, 419, 1792, 50),
}
# bytes a second between a GPU and the CPU, as measured from pinned memory to an H200
HOST_LINK = 55 * GB
# and in each direction, if both run at once (90.4 GB/s in all on an H100)
TWO_WAY_LINK = 45 * GB
# seconds an element of AdamW on 16 cores: 4.4 ns of one (benchmarks/results/adamw_cpu.csv)
CPU_STEP = 4.4e-9 / 16
# bytes per element that the optimizer's step moves besides reading and writing states and masters
_GRADIENT, _WEIGHT = 2, 2


@dataclass(frozen=True, slots=True)
class Time:
    """Milliseconds of a step on a GPU, of all its micro-batches."""

    products: float
    attention: float
    bytes: float
    """Time of all other kernels of the layers and the head."""
    optimizer: float
    messages: float
    bubble: float
    """In which a stage of a pipeline waits for others."""

    @property
    def total(self) -> float:
        return self.products + self.attention + self.bytes + self.optimizer + self.messages + self.bubble


def gpu_called(name: str) -> Gpu:
    """The GPU whose name is in `name`. Raises PlanError for one whose rates are not known."""
    for key, gpu in GPUS.items():
        if key in name.lower():
            return gpu
    raise PlanError(f"gpu: found {name!r}; expected one of {', '.join(GPUS)}.")


def layer_flops(sizes: Sizes, batch: int, sequence: int) -> float:
    """FLOPs of a layer's GEMMs, forward and backward; attention's over the half that causality leaves."""
    return 6 * batch * sequence * (sizes.layer_products + sequence * sizes.queries)


def flops(sizes: Sizes, batch: int, sequence: int) -> float:
    """FLOPs of forward and backward of the whole model; recompute is not counted."""
    return sizes.layers * layer_flops(sizes, batch, sequence) + 6 * batch * sequence * sizes.table


def step_time(sizes: Sizes, layout: Layout, system: System, gpu: Gpu) -> Time:
    """Time of a step with all its micro-batches."""
    tensor, tokens, count = layout.tensor, layout.tokens, layout.accumulation
    layers = sizes.layers / layout.pipeline
    # forward, and two GEMMs in backward; recompute is one more forward
    passes = {"none": 3, "full": 4, "mlp": 3 + sizes.hidden * sizes.fc1 / sizes.layer_matrices}[
        system.recompute
    ]
    attended = 3.5 if system.recompute != "full" else 4.5
    matrices = sizes.layer_products
    if system.attends_again:
        passes += sizes.attends_again * sizes.hidden * sizes.qkv / matrices
        attended += sizes.attends_again
    in_fp8 = 0 if system.layers == "bf16" else sizes.converted_products
    # seconds for each token, times the rate of a product
    taken = (in_fp8 / gpu.fp8 if in_fp8 else 0) + (matrices - in_fp8) / gpu.bf16
    products = layers * passes * 2 * tokens * taken / tensor
    products += 6 * tokens * sizes.table / tensor / gpu.bf16 / layout.pipeline
    attention = layers * attended * 2 * tokens * layout.sequence * sizes.queries / tensor / gpu.attention
    moved = layers * (tokens * _layer_traffic(sizes, layout, system) + _weight_traffic(sizes, layout, system))
    # logits: to FP32 and back, their exponentials and sums
    moved += tokens * sizes.vocabulary / tensor * (2 + 4 + 4 + 4 + 4 + 2) / layout.pipeline
    compute = count * (products + attention + moved / gpu.copy)
    messages = count * _messages(sizes, layout, system) / gpu.link
    routed, rest = _on_gpu(sizes, layout)
    stepped = routed / layout.expert_data + rest / layout.data if layout.stage else routed + rest
    per_element = 2 * system.state_bytes() + (4 if system.bf16_masters else 8) + _GRADIENT + _WEIGHT
    if system.optimizer != "coat":
        # BF16 gradients are made FP32 first
        per_element += 2 + 4 + 4
    optimizer = stepped * per_element / gpu.copy
    if system.offload or layout.optimizer_device == "cpu":
        optimizer = stepped * ((_GRADIENT + _WEIGHT) / HOST_LINK + CPU_STEP)
    elif system.streams:
        # and 16 more bits of each master; nothing hides the copies
        streamed = system.state_bytes() + 2 * (
            system.bf16_masters and system.coat.optimizer.bf16_params == "exact"
        )
        optimizer = max(optimizer, stepped * streamed / TWO_WAY_LINK)
    bubble = (layout.pipeline - 1) / count * compute
    times = (count * products, count * attention, count * moved / gpu.copy, optimizer, messages, bubble)
    return Time(*(1e3 * seconds for seconds in times))


def _layer_traffic(sizes: Sizes, layout: Layout, system: System) -> float:
    """Bytes that a layer's kernels read and write for a token, forward and backward, except in GEMMs."""
    between, tensor = layout.between, layout.tensor
    h, f, a, o = sizes.hidden / between, sizes.active_ffn, sizes.qkv, sizes.queries
    u = (1 + sizes.gated) * f
    f, u, a, o = (n / tensor for n in (f, u, a, o))
    positions = 2 * 2 * 2 * a
    if system.layers == "bf16":
        # norms read x and write y; backward reads x, the gradient and the residual's, and writes one
        norms, additions = 2 * (2 + 2) * h + 2 * (3 * 2 + 2) * h, 2 * 3 * 2 * h
        activation = 2 * (u + f) + 2 * (u + f + u)
        found = norms + additions + activation + positions
    else:
        saved = saved_per_token(sizes, layout, system)
        # what is saved is written once and read once, or twice where it is recomputed and differentiated
        kept = 3 * saved
        # each input of a GEMM is written in FP8, and by columns again in backward
        inputs = 4 * (2 * h + f + o)
        # gradients are read in BF16, and written in FP8 by rows and by columns
        gradients = (2 + 2) * (a + u + 2 * h)
        norms = 2 * 2 * 2 * h + 2 * 4 * 2 * h
        activation = 2 * u + 2 * f
        found = kept + inputs + gradients + norms + activation + positions
        if system.layers == "coat" and system.coat.activations.attention_format in GROUP_FORMATS:
            # read to be made 8 bits, and written to be BF16 again
            found += 2 * 2 * (a + o)
    if sizes.experts is not None:
        # tokens are brought into the experts' order and back, and their outputs weighted; the gradients, too
        rows = sizes.experts.used * layout.of_experts_tensor / tensor
        found += sizes.mean(0, 2 * 3 * 2 * rows * sizes.hidden)
    if system.recompute == "full":
        found *= 4 / 3
    return found


def _weight_traffic(sizes: Sizes, layout: Layout, system: System) -> float:
    """Bytes of making a layer's weights FP8, by rows and by columns, in each micro-batch."""
    if system.layers == "bf16":
        return 0
    share = layout.accumulation if system.caches_weights else 1
    return 2 * (2 + 1) * sizes.converted_on_gpu(layout.tensor, layout.expert_shares) / share


def _on_gpu(sizes: Sizes, layout: Layout) -> tuple[float, float]:
    """Elements of routed experts on a GPU, and of all else, mean over the stages of a pipeline."""
    routed, rest = sizes.layer_on_gpu(layout.tensor, layout.expert_shares)
    around = sizes.parameters - sizes.layers * sizes.layer_matrices
    layers = sizes.layers / layout.pipeline
    return layers * routed, layers * rest + around / (layout.tensor * layout.pipeline)


def _messages(sizes: Sizes, layout: Layout, system: System) -> float:
    """Bytes that a GPU sends for a micro-batch. Overlap with computation is not counted: as
    measured, even at stage 3 hardly any of their time is hidden."""
    routed, rest = _on_gpu(sizes, layout)
    # each rank sends all but its own part of what is gathered or reduced
    weights = 2 * (rest * (1 - 1 / layout.data) + routed * (1 - 1 / layout.expert_data))
    layers, found = sizes.layers / layout.pipeline, 0.0
    if layout.tensor > 1:
        # Around attention and around the feed-forward layer three gathers of hidden states, one of them for
        # gradients of weights, and two reductions, which are in BF16. Without sequence parallelism two sums,
        # of a reduction and a gather each.
        gathered = 2 if system.layers == "bf16" else 1
        each = 3 * gathered + 2 * 2 if layout.sequence_parallel else 2 * (2 + 2)
        hidden = layout.tokens * sizes.hidden * (layout.tensor - 1) / layout.tensor
        shared = each if sizes.experts is None or sizes.experts.shared else 0
        found += (each + sizes.mean(each, shared)) * layers * hidden
    if sizes.experts is not None:
        found += sizes.mean(0, _dispatched(sizes.experts, sizes.hidden, layout)) * layers
    if layout.stage == 3:
        gathered = 0.5 if layout.quantized_gathers else 1.0
        found += (2 * gathered + 1) * weights
    elif layout.stage == 2:
        # reduced each micro-batch; weights once a step
        found += (1 + 1 / layout.accumulation) * weights
    else:
        found += 2 * weights / layout.accumulation
    return found


def _dispatched(experts: Experts, h: int, layout: Layout) -> float:
    """Bytes of a layer's tokens that a GPU sends to experts and gets back, forward and backward."""
    if layout.gathers_tokens:
        # gathered by all that share the experts
        sent = layout.expert_shares - 1
    else:
        # each expert's, and gathered by those that share its channels
        sent = experts.used * ((1 - 1 / layout.expert) + layout.of_experts_tensor - 1)
    return 4 * 2 * h * sent * layout.tokens / layout.tensor
