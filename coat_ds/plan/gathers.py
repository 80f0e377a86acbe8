"""What ZeRO-3 holds gathered, module by module: its coordinator replayed.

DeepSpeed gathers a module's weights when it begins, and ahead of that those of following modules until
`stage3_prefetch_bucket_size` elements are under way, not beyond `stage3_max_live_parameters` in all. It
releases a module's weights after it, except weights that are used again within
`stage3_max_reuse_distance` elements, or that it has looked at ahead of that use. Weights that are gathered
together come in one buffer and are copied out of it; the buffer lives until the last of them was waited for.
"""

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Gathered(NamedTuple):
    """Elements on each rank."""

    weights: int
    """In tensors of their own."""
    buffers: int
    """In the buffers of gathers that are not yet all read."""
    released: int
    """Elements of parameters that were gathered and released before, whether or not they are gathered now."""


class Module(NamedTuple):
    """What is gathered while a module begins, and while it runs."""

    begins: Gathered
    """Its weights have been copied out of buffers, and no buffer is freed yet. DeepSpeed waits for a module's
    parameters in the order of a set, so the last parameter of each buffer may be the last of all."""
    runs: Gathered
    """Those buffers are freed, and gathers for modules ahead are under way."""


class Limits(NamedTuple):
    """Of DeepSpeed's `zero_optimization`, in elements; its defaults."""

    prefetch: int = 50_000_000
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    persistence: int = 100_000
    """Smaller parameters stay whole on every rank."""


def replay(modules: Sequence[Sequence[int]], limits: Limits) -> tuple[Module, ...]:
    """What is gathered at each module: `modules` forward, then backward in the opposite order.

    modules: elements of the parameters of each, in the order in which forward uses them.
    """
    return _replay(tuple(map(tuple, modules)), limits)


# a search for a micro-batch asks for the same again and again
@functools.lru_cache(maxsize=64)
def _replay(modules: tuple[tuple[int, ...], ...], limits: Limits) -> tuple[Module, ...]:
    trace: list[Sequence[int]] = []
    numel: list[int] = []
    for sizes in modules:
        trace.append(range(len(numel), len(numel) + len(sizes)))
        numel += sizes
    trace += reversed(trace)
    stays = {p for p, size in enumerate(numel) if size <= limits.persistence}

    queue = deque((p, step) for step, module in enumerate(trace) for p in module)
    # the last use of a parameter that the search ahead has seen
    seen = [-1] * len(numel)
    available, released = set(stays), set[int]()
    # by parameter that is not yet waited for: its gather
    under_way: dict[int, _Gather] = {}
    live, found = 0, []

    def gather(wanted: list[int]) -> None:
        nonlocal live
        wanted = [p for p in wanted if p not in available and p not in under_way]
        if wanted:
            size = sum(numel[p] for p in wanted)
            live += size
            under_way.update(dict.fromkeys(wanted, _Gather(set(wanted), size)))

    def held() -> Gathered:
        weights = sum(numel[p] for p in available if p not in stays)
        buffers = sum({id(g): g.size for g in under_way.values()}.values())
        return Gathered(weights, buffers, sum(numel[p] for p in released))

    for step, module in enumerate(trace):
        gather(list(module))
        before = held().buffers
        for p in module:
            if (handle := under_way.pop(p, None)) is not None:
                available |= handle.arrive()
        begins = held()._replace(buffers=before)
        missed = {p for p in module if seen[p] < step}
        while missed:
            p, seen[p] = (entry := queue.popleft())[0], entry[1]
            missed.discard(p)

        ahead, size, room = [], 0, min(limits.max_live - live, limits.prefetch)
        while queue and size < room:
            p, use = queue.popleft()
            seen[p] = max(seen[p], use)
            if p not in available and p not in under_way and p not in ahead:
                ahead.append(p)
                size += numel[p]
        gather(ahead)
        found.append(Module(begins, held()))

        again, distance = set(), 0
        for following in trace[step + 1 :]:
            if distance >= limits.max_reuse:
                break
            again.update(following)
            distance += sum(numel[p] for p in following)
        for p in module:
            if p in available and p not in stays and p not in again and seen[p] <= step + 1:
                available.discard(p)
                released.add(p)
                live -= numel[p]
    return tuple(found)


class _Gather:
    def __init__(self, members: set[int], size: int):
        self.size, self._coming = size, members

    def arrive(self) -> set[int]:
        """The parameters that are there now and were not before: all, the first time."""
        arrived, self._coming = self._coming, set()
        return arrived
