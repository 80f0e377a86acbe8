"""A recorded graph is used only if its first replay reproduces the results of the eager pass on the same
inputs.

Replays can be silently wrong: two versions of cuDNN in one process gave gradients 10,000 times too large. The
comparison costs one eager pass of a layer per graph, when the graph is recorded. It cannot catch an illegal
memory access, so nothing is recorded if two versions of a library are mixed.
"""

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import Node

Results = Sequence[torch.Tensor | None]
# further eager passes, if the first one differs from the replay
REPEATS = 2
# a replay may differ from an eager pass by this factor more than eager passes differ from each other
MARGIN = 4.0
# and always by this much, relative to the norm: atomic additions may differ only occasionally (7.7e-6 of a
# gradient on an H100, where three eager passes were equal), and BF16 rounds results by up to 2^-8
FLOOR = 2.0**-8


def compare(
    replayed: Results, run: Callable[[], Results], agree: Callable[[bool], bool]
) -> tuple[float | None, Results]:
    """The distance of `replayed` results from those of the eager pass `run()`, and the results of that pass.

    A distance of None means "no further than eager passes are from each other": within `MARGIN` times their
    own distance, or within `FLOOR`.

    run: recomputes the results, in new memory.
    agree: returns True if all ranks that take part in the function's collectives call it with True. All of
        them call it, so that all repeat the pass equally often.

    The distance is that of the worst result, relative to its norm; 0 if only another rank found one.
    """
    eager = run()
    if agree(all(map(_same, replayed, eager))):
        return None, eager
    spread = [0.0] * len(eager)
    for _ in range(REPEATS):
        spread = [max(s, _distance(a, e)) for s, a, e in zip(spread, run(), eager, strict=True)]
    distances = [_distance(r, e) for r, e in zip(replayed, eager, strict=True)]
    beyond = [d for d, s in zip(distances, spread, strict=True) if not d <= max(FLOOR, MARGIN * s)]
    return None if agree(not beyond) else max(beyond, default=0.0), eager


def saved_for_backward(node: Node) -> list[torch.Tensor]:
    """The tensors that an autograd graph has saved, in the same order for each run of a function."""
    found, seen, waiting = [], set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "saved_tensors"):
            found += [t for t in node.saved_tensors if t is not None]
        else:
            held = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            # attention without dropout leaves its random state, integers, uninitialised
            found += [t for t in held if isinstance(t, torch.Tensor) and t.is_floating_point()]
        waiting += [previous for previous, _ in reversed(node.next_functions)]
    return found


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether both hold the same bits."""
    if a is None or b is None or a.data_ptr() == b.data_ptr():
        return (a is None) == (b is None)
    return _bytes(a).equal(_bytes(b))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The norm of the difference over the norm of b; infinite if only one of the two is finite."""
    if a is None or b is None:
        return 0.0 if a is b else torch.inf
    a, b = a.detach().float(), b.detach().float()
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
    ratio = (
        difference.norm() / b.nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(torch.finfo(a.dtype).tiny)
    ).item()
    return ratio if ratio == ratio else torch.inf
