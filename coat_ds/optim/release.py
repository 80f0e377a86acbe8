"""Gradient release: parameters are stepped during backward, and their gradients are freed.

A hook of torch runs when the gradient of a parameter is final: the rest of backward neither adds to it nor
reads the parameter. States in host memory pass through the GPU on a stream of their own, while backward goes
on.
"""

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator

import torch

from coat_ds.optim.checks import check_changes, grad_of
from coat_ds.optim.host_states import CHUNK, HostTransfers
from coat_ds.optim.shards import is_distributed, local
from coat_ds.optim.step import Scaling

# elements of gradients that wait for states in host memory; beyond them the CPU waits, and backward with it
BACKLOG = 2**29
_ERROR = "CoatAdamW.release_gradients: "


class Release:
    """The steps that an optimizer makes during one backward after another.

    clip_by_last_norm: as in `CoatAdamW.release_gradients`.
    """

    def __init__(self, optimizer, clip_by_last_norm: float | None):
        # hooks of the parameters must not keep the optimizer alive
        self._optimizer = weakref.ref(optimizer)
        self._max_norm = clip_by_last_norm
        # parameters with a final gradient, by device; and all whose gradients came since the last `end`
        self._final: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        self._taken: set[torch.Tensor] = set()
        self._transfers: HostTransfers | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # gradients that a stream may still read, until the event
        self._read: dict[torch.device, deque[tuple[torch.cuda.Event, list[torch.Tensor]]]] = defaultdict(
            deque
        )
        # squared norms of gradients since the last `end`, and the factor of gradients until the next
        self._squares: list[torch.Tensor] = []
        self._factor: torch.Tensor | None = None
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(self._take)

    @torch.no_grad()
    def _take(self, p: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        dist = torch.distributed
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1 and not is_distributed(p):
            raise RuntimeError(
                f"{_ERROR}found a parameter of shape {tuple(p.shape)} that is not sharded, in one of "
                f"{ranks} processes: its gradient is not averaged yet. Shard all parameters with "
                "fully_shard, or do not release gradients."
            )
        if p in self._taken:
            raise RuntimeError(
                f"{_ERROR}found a second gradient of a parameter of shape {tuple(p.shape)} since the last "
                "step, and the first one was applied. Call step() after every backward, without gradient "
                "accumulation, and checkpoint with use_reentrant=False; or do not release gradients."
            )
        if not self._taken:
            check_changes(optimizer)
        self._taken.add(p)
        self._final[p.device].append(p)
        # fewer elements than a chunk of states keep the GPU waiting for the CPU
        if sum(local(x).numel() for x in self._final[p.device]) >= CHUNK:
            self._apply(optimizer, p.device)

    def _apply(self, optimizer, device: torch.device) -> None:
        """Steps the parameters on `device` that have final gradients, and frees the gradients."""
        params = dict.fromkeys(self._final.pop(device))
        if any(p.grad is None for p in params):
            raise RuntimeError(
                f"{_ERROR}found no gradient of a parameter that backward has computed one of, and other "
                "gradients were applied. Call zero_grad() after step(), not before it."
            )
        grads = [grad_of(p) for p in params]
        if self._transfers is None and optimizer.offloads:
            self._transfers = HostTransfers(optimizer._host)
        with contextlib.nullcontext() if self._transfers is None else self._on_step_stream(device, grads):
            if self._max_norm is not None:
                self._squares += [norm.float().square() for norm in torch._foreach_norm(grads)]
            if self._max_norm is None or self._factor is not None:
                work = [
                    (group, [p for p in group["params"] if p in params]) for group in optimizer.param_groups
                ]
                optimizer._update(work, Scaling(self._factor, None), self._transfers)
        for p in params:
            p.grad = None

    @contextlib.contextmanager
    def _on_step_stream(self, device: torch.device, grads: list[torch.Tensor]) -> Iterator[None]:
        """A context on the stream for steps on `device`, which reads `grads`."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
            self._read[device].append((stream.record_event(), grads))
        read = self._read[device]
        while read and (read[0][0].query() or sum(g.numel() for _, held in read for g in held) > BACKLOG):
            read.popleft()[0].synchronize()

    def end(self, optimizer, *scales: torch.Tensor | None) -> None:
        """Ends the step of the last backward.

        scales: what a step would multiply gradients by, or skip the step for. Raises RuntimeError if there is
        one.
        """
        if any(scale is not None for scale in scales):
            raise RuntimeError(
                f"{_ERROR}found a gradient scaler or grad_scale, but backward has applied the gradients. "
                "Train in BF16 without a scaler, clip by clip_by_last_norm, or do not release gradients."
            )
        # parameters without a hook: added or unfrozen since, or their gradients were set by the caller
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p not in self._taken:
                    self._final[p.device].append(p)
        for device in list(self._final):
            self._apply(optimizer, device)
        if self._transfers is not None:
            self._transfers.end()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self._read.clear()
        self._taken.clear()
        self._transfers = None
        if self._max_norm is not None and self._squares:
            squares = torch.stack([x.to(self._squares[0].device) for x in self._squares])
            self._factor = (self._max_norm / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)
            self._squares = []
