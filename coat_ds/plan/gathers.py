"""Weights that ZeRO-3 has gathered at each module of a model: a replay of DeepSpeed's coordinator.

DeepSpeed gathers a module's weights when it begins, and ahead of that those of the next modules until
`stage3_prefetch_bucket_size` elements are under way, not beyond `stage3_max_live_parameters` in all. It
releases a module's weights after it, except weights that are used again within
`stage3_max_reuse_distance` elements, or that it has looked at ahead of that use. Weights that are gathered
together come in one buffer and are copied out of it; the buffer lives until the last of them was waited for.
"""

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from coat_ds.plan.layout import Layout, Limits
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System

# elements, DeepSpeed's default
PREFETCH = 50_000_000


class Gathered(NamedTuple):
    """Elements on each rank."""

    weights: int
    """In tensors of their own."""
    buffers: int
    """In the buffers of gathers that are not yet all read."""


class Module(NamedTuple):
    """What is gathered while a module begins, and while it runs."""

    begins: Gathered
    """Its weights were copied out of buffers, and no buffer is freed yet. DeepSpeed waits for a module's
    parameters in the order of a set, so the last parameter of each buffer may be the last of all."""
    runs: Gathered
    """Those buffers are freed, and gathers for modules ahead are under way."""


class Gathers(NamedTuple):
    """What is gathered at each module of the layers, and while the head runs. Each module is preceded by the
    index of its layer."""

    forward: list[tuple[int, Module]]
    head: Gathered
    backward: list[tuple[int, Module]]


def gathers_of(sizes: Sizes, layout: Layout, system: System) -> Gathers:
    """What ZeRO-3 gathers in forward and backward, one after the other."""
    layers = [[[n / layout.tensor for n in module] for module in layer] for layer in sizes.stack()]
    if system.has_units:
        if sizes.maker == "megatron":
            # in the order of a layer's parameters, the projection is the first of attention
            layers = [[norm, proj, qkv, *rest] for norm, qkv, proj, *rest in layers]
        # a layer is gathered as one module
        layers = [[[n for module in layer for n in module]] for layer in layers]
    limits = layout.limits
    if limits.prefetch is None:
        prefetch = max(PREFETCH, *(sum(layer[0]) for layer in layers)) if system.has_units else PREFETCH
        limits = limits._replace(prefetch=prefetch)
    table = sizes.table / layout.tensor
    # the model, and what holds the embedding, or all layers, have no weights of their own, and look ahead
    before, after = [[], [], [table], []], [[sizes.hidden], [table]]
    modules = [tuple(module) for module in (*before, *(m for layer in layers for m in layer), *after)]
    found = replay(tuple(modules), limits)
    layer_of = [layer for layer, modules in enumerate(layers) for _ in modules]
    half = len(modules)
    return Gathers(
        list(zip(layer_of, found[len(before) : half - len(after)], strict=True)),
        found[half - 1].runs,
        list(zip(reversed(layer_of), found[half + len(after) : -len(before)], strict=True)),
    )


# a search for a micro-batch replays the same model many times
@functools.lru_cache(maxsize=64)
def replay(modules: tuple[tuple[int, ...], ...], limits: Limits) -> tuple[Module, ...]:
    """What is gathered at each module: `modules` forward, then backward in the opposite order.

    modules: elements of the parameters of each, in the order in which forward uses them.
    """
    return tuple(_Coordinator(modules, limits).run())


class _Coordinator:
    """DeepSpeed's PartitionedParameterCoordinator. Parameters are numbered in the order of forward."""

    def __init__(self, modules: Sequence[Sequence[int]], limits: Limits):
        self.limits, self.numel = limits, [n for module in modules for n in module]
        numbers = iter(range(len(self.numel)))
        forward = [[next(numbers) for _ in module] for module in modules]
        self.trace = [*forward, *reversed(forward)]
        self.queue = deque((p, step) for step, module in enumerate(self.trace) for p in module)
        # by parameter its last use that the search ahead has seen
        self.seen = [-1] * len(self.numel)
        self.stays = {p for p, n in enumerate(self.numel) if n <= limits.persistence}
        self.available, self.live = set(self.stays), 0
        # by parameter that is not yet waited for
        self.under_way: dict[int, _Gather] = {}

    def run(self):
        for step, module in enumerate(self.trace):
            self._gather(module)
            before = self._gathered().buffers
            for p in module:
                if (gather := self.under_way.pop(p, None)) is not None:
                    self.available |= gather.arrive()
            begins = self._gathered()._replace(buffers=before)
            self._look_ahead(step, module)
            yield Module(begins, self._gathered())
            self._release(step, module)

    def _gather(self, wanted: Sequence[int]) -> None:
        wanted = [p for p in wanted if p not in self.available and p not in self.under_way]
        gather = _Gather(set(wanted), self._size(wanted))
        self.live += gather.size
        self.under_way.update(dict.fromkeys(wanted, gather))

    def _gathered(self) -> Gathered:
        buffers = sum(gather.size for gather in set(self.under_way.values()))
        return Gathered(self._size(self.available - self.stays), buffers)

    def _look_ahead(self, step: int, module: Sequence[int]) -> None:
        missed = {p for p in module if self.seen[p] < step}
        while missed:
            p, self.seen[p] = (entry := self.queue.popleft())[0], entry[1]
            missed.discard(p)
        ahead: list[int] = []
        room = min(self.limits.max_live - self.live, self.limits.prefetch)
        while self.queue and self._size(ahead) < room:
            p, use = self.queue.popleft()
            self.seen[p] = max(self.seen[p], use)
            if p not in self.available and p not in self.under_way and p not in ahead:
                ahead.append(p)
        self._gather(ahead)

    def _release(self, step: int, module: Sequence[int]) -> None:
        again, distance = set(), 0
        for following in self.trace[step + 1 :]:
            if distance >= self.limits.max_reuse:
                break
            again.update(following)
            distance += self._size(following)
        for p in module:
            if p in self.available - self.stays - again and self.seen[p] <= step + 1:
                self.available.discard(p)
                self.live -= self.numel[p]

    def _size(self, parameters) -> int:
        return sum(self.numel[p] for p in parameters)


class _Gather:
    """Parameters that are gathered together, in one buffer of `size` elements."""

    def __init__(self, members: set[int], size: int):
        self.size, self._coming = size, members

    def arrive(self) -> set[int]:
        """The parameters that are copied out of the buffer: all, when the first of them is waited for."""
        arrived, self._coming = self._coming, set()
        return arrived
