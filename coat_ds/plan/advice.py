"""How systems compare on a GPU, the largest micro-batch of each, and the fastest that fits."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from coat_ds.plan.errors import PlanError
from coat_ds.plan.gpus import Gpu
from coat_ds.plan.layout import Layout
from coat_ds.plan.memory import Prediction, predict
from coat_ds.plan.roofline import Time, step_time
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System

# beyond that nothing gets faster
MOST = 1024
# speeds that differ by less are one: the roofline is no nearer
SAME_SPEED = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """A system on a layout, with its predicted memory and time."""

    system: System
    layout: Layout
    prediction: Prediction
    time: Time

    @property
    def bytes(self) -> float:
        """Bytes at the peak."""
        return self.prediction.peak.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one GPU, by the roofline."""
        layout = self.layout
        return 1e3 * layout.tokens * layout.accumulation / layout.pipeline / self.time.total


def goes_with(system: System, layout: Layout) -> bool:
    """Whether the framework of `layout` supports `system`."""
    if layout.framework == "megatron":
        return not system.offload and not system.bf16_masters
    if system.release:
        return layout.gpus == layout.accumulation == 1 and layout.stage < 3 and not layout.offload_optimizer
    return not (system.bf16_masters and layout.offload_optimizer)


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


def compare(sizes: Sizes, layout: Layout, systems: Iterable[System], gpu: Gpu) -> list[Choice]:
    """Each system that goes with the layout, at its micro-batch."""
    return [choice_of(sizes, layout, system, gpu) for system in systems if goes_with(system, layout)]


def choice_of(sizes: Sizes, layout: Layout, system: System, gpu: Gpu) -> Choice:
    return Choice(system, layout, predict(sizes, layout, system), step_time(sizes, layout, system, gpu))


def fastest(
    sizes: Sizes, systems: Iterable[tuple[System, Layout]], gpu: Gpu, limit: float, grow: bool
) -> Choice:
    """The system, layout and, if it may `grow`, micro-batch of most tokens a second within `limit` bytes.

    If several are as fast, the first: `systems` is expected in order of preference. Raises PlanError if
    nothing fits.
    """
    choices = [
        choice_of(sizes, layout, system, gpu)
        for system, given in systems
        for layout in (given.grown(_fast_micro_batch(sizes, given, system, limit)) if grow else [given])
    ]
    found = [choice for choice in choices if choice.bytes <= limit]
    if not found:
        nearest = min(choices, key=lambda choice: choice.bytes)
        raise PlanError(
            f"fit: nothing fits into {limit / 1e9:.1f} GB: {nearest.system.name} takes "
            f"{nearest.bytes / 1e9:.1f} GB at stage {nearest.layout.stage} with a micro-batch of "
            f"{nearest.layout.micro_batch}. Give a smaller micro-batch, a higher ZeRO stage, more GPUs, "
            "a tensor parallel size or shorter sequences."
        )
    most = max(choice.tokens_per_second for choice in found)
    return next(choice for choice in found if choice.tokens_per_second >= (1 - SAME_SPEED) * most)


def _fast_micro_batch(sizes: Sizes, layout: Layout, system: System, limit: float) -> int:
    """The largest that is not slowed down by torch's allocator, if there is one; else the largest, or 1."""
    largest = (largest_micro_batch(sizes, layout, system, limit, with_room) for with_room in (True, False))
    return next(filter(None, largest), 1)
