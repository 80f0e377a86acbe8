"""How systems compare on a GPU, the largest micro-batch of each, and the fastest that fits."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coat_ds.plan.errors import PlanError
from coat_ds.plan.layout import Layout
from coat_ds.plan.memory import Prediction, predict
from coat_ds.plan.roofline import Gpu, Time, step_time
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System

# beyond that nothing gets faster
MOST = 1024
# speeds that differ by less are one: the roofline is no nearer
SAME_SPEED = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """A system on a layout."""

    system: System
    layout: Layout
    prediction: Prediction
    time: Time
    largest: int
    """The largest micro-batch that fits, 0 if none does."""

    @property
    def tokens_per_second(self) -> float:
        """Of a GPU, at best."""
        layout = self.layout
        return 1e3 * layout.tokens * layout.accumulation * layout.data / layout.gpus / self.time.total


def goes_with(system: System, layout: Layout) -> bool:
    """Whether a host can do it."""
    if layout.host == "megatron":
        return not system.offload and not system.bf16_masters
    if (system.offload or system.bf16_masters) and layout.stage == 0:
        return False
    # DeepSpeed's BF16_Optimizer has masters in FP32
    return not (system.bf16_masters and (layout.optimizer_device == "cpu" or layout.in_one_buffer))


def largest_micro_batch(
    sizes: Sizes, layout: Layout, system: System, limit: float, with_room: bool = False
) -> int:
    """The largest micro-batch, at most `MOST` sequences, whose peak is within `limit` bytes.
    `with_room`: whose `Prediction.with_room` is within it. 0 if one sequence is too large."""

    def fits(micro_batch: int) -> bool:
        found = predict(sizes, dataclasses.replace(layout, micro_batch=micro_batch), system)
        return (found.with_room if with_room else found.peak.total) <= limit

    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, min(2 * high, MOST + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def compare(
    sizes: Sizes, layout: Layout, systems: Iterable[System], gpu: Gpu, limit: float | None = None
) -> list[Choice]:
    """Each system that goes with the layout, at its micro-batch; `limit` is in bytes, the GPU's without."""
    limit = gpu.memory if limit is None else limit
    return [
        Choice(
            system,
            layout,
            predict(sizes, layout, system),
            step_time(sizes, layout, system, gpu),
            largest_micro_batch(sizes, layout, system, limit),
        )
        for system in systems
        if goes_with(system, layout)
    ]


def fastest(
    sizes: Sizes,
    systems: Iterable[tuple[System, Layout]],
    gpu: Gpu,
    limit: float,
    grow: bool,
) -> Choice:
    """The system, layout and, if it may `grow`, micro-batch of most tokens a second within `limit` bytes.

    If several are as fast, the first: `systems` is expected in order of preference. Raises PlanError if
    nothing fits.
    """
    systems = list(systems)
    found, nearest = [], None
    candidates = (
        (system, layout)
        for system, given in systems
        for layout in (given.grown(_fast_micro_batch(sizes, given, system, limit)) if grow else [given])
    )
    for system, layout in candidates:
        choice = Choice(
            system,
            layout,
            predict(sizes, layout, system),
            step_time(sizes, layout, system, gpu),
            layout.micro_batch,
        )
        total = choice.prediction.peak.total
        if total <= limit:
            found.append(choice)
        elif nearest is None or total < nearest.prediction.peak.total:
            nearest = choice
    if not found:
        layout = nearest.layout
        stage = f" at stage {layout.stage}" if layout.host == "deepspeed" else ""
        raise PlanError(
            f"fit: nothing fits into {limit / 1e9:.1f} GB: {nearest.system.name}{stage} takes "
            f"{nearest.prediction.peak.total / 1e9:.1f} GB with a micro-batch of {layout.micro_batch}. Give "
            f"{_ways_out(layout, [given for _, given in systems])}."
        )
    most = max(choice.tokens_per_second for choice in found)
    return next(choice for choice in found if choice.tokens_per_second >= (1 - SAME_SPEED) * most)


def _fast_micro_batch(sizes: Sizes, layout: Layout, system: System, limit: float) -> int:
    """The largest that is not slowed down by torch's allocator, if there is one; else the largest, or 1."""
    largest = (largest_micro_batch(sizes, layout, system, limit, with_room) for with_room in (True, False))
    return next(filter(None, largest), 1)


def _ways_out(layout: Layout, tried: Sequence[Layout]) -> str:
    """What would take less than `layout`, the cheapest first."""
    ways = []
    if layout.micro_batch > 1:
        ways.append("a smaller micro-batch")
    # what divides states and weights over data-parallel ranks
    if layout.data > 1 and layout.host == "megatron" and layout.stage == 0:
        ways.append("--use-distributed-optimizer")
    zero3_goes = layout.host == "deepspeed" and layout.pipeline == 1
    if layout.data > 1 and zero3_goes and all(other.stage < 3 for other in tried):
        ways.append("ZeRO's stage 3")
    ways += ["more GPUs", "a tensor parallel size"]
    return f"{', '.join(ways)} or shorter sequences"
