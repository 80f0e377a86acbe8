"""The update of one parameter group of `CoatAdamW`, by `coat_kernels.adamw`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from coat_ds.optim.checks import grad_of
from coat_ds.optim.host_states import HostTransfers, stepping_device
from coat_ds.optim.narrow_grad import narrow_and_scale
from coat_ds.optim.options import rounds_stochastically
from coat_ds.optim.pieces import Operands, Piece
from coat_ds.optim.shards import local, shard_of
from coat_kernels.adamw import AdamWOptions, adamw_


class Scaling(NamedTuple):
    """The factor of gradients, applied while they are read, and the flag that skips the step; on a device."""

    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None


def unscale_(params: Iterable[torch.Tensor], inverse: torch.Tensor) -> None:
    """Multiplies the gradients of `params` by `inverse`, a tensor of one element, in place."""
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for p in dict.fromkeys(params):
        by_device[p.device].append(local(grad_of(p)))
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, inverse.to(device).reshape(()))


def update_group(
    group: dict[str, Any],
    params: list[torch.Tensor],
    states: list[dict[str, Any]],
    scaling: Scaling,
    *,
    seed: int,
    transfers: HostTransfers | None,
) -> None:
    """One step of `params`, which all have gradients, in place.

    states: the optimizer's state of each parameter, ready for the step.
    seed: as in `CoatAdamW`.
    transfers: of the states in host memory; None: all states are on the parameters' devices.
    """
    held = [local(p) for p in params]
    contiguous = [shard.contiguous() for shard in held]
    read = [narrow_and_scale(shard_of(grad_of(p), p)) for p in params]
    factors = {id(factor): factor for _, factor in read}
    steps = _count(states, scaling.found_inf)
    # either all BF16 parameters of a group have remainders, or none
    launches: dict[tuple, list[Operands]] = defaultdict(list)
    for p, param, (grad, factor), state, step in zip(params, contiguous, read, states, steps, strict=True):
        offloaded = transfers is not None and transfers.host.offloaded[p]
        for x in _operands(param, grad, state, step):
            codecs = x.exp_avg.codec.name, x.exp_avg_sq.codec.name
            launches[offloaded, id(factor), p.device, p.dtype, grad.dtype, codecs].append(x)
    for (offloaded, of_grads, *_), bucket in launches.items():
        scale, factor = scaling.grad_scale, factors[of_grads]
        if scale is not None and factor is not None:
            factor = scale.to(factor.device) * factor
        scaled = scaling._replace(grad_scale=scale if factor is None else factor)
        parts: Iterable[list[Operands]] = [bucket]
        if transfers is not None and offloaded:
            parts = transfers[stepping_device(bucket[0].param.device)].chunks(bucket)
        for part in parts:
            _launch(group, part, scaled, seed)
    for shard, updated in zip(held, contiguous, strict=True):
        if updated is not shard:
            # what is on the CPU is there by now: it is not pinned, and such copies block
            shard.copy_(updated)
    # autograd does not see a kernel's writes: a graph that saved the old values must detect them
    torch.autograd.graph.increment_version(
        [*params, *(x for x, p in zip(held, params, strict=True) if x is not p)]
    )


def _operands(
    param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], step: torch.Tensor
) -> Iterator[Operands]:
    """The operands for each piece of a parameter's moments. A rank may hold an empty shard of a DTensor:
    it has none."""
    if not grad.numel():
        return
    grad, remainder = grad.contiguous(), local(state.get("remainder"))
    for first, second in zip(local(state["exp_avg"]).pieces, local(state["exp_avg_sq"]).pieces, strict=True):
        more = None if remainder is None else _cut(remainder, first)
        yield Operands(_cut(param, first), _cut(grad, first), first, second, step, more)


def _launch(
    group: dict[str, Any],
    bucket: list[Operands],
    scaling: Scaling,
    seed: int,
) -> None:
    """Steps pieces on one device that have the same dtypes and codecs."""
    first, steps = bucket[0], [x.step for x in bucket]
    device, second_codec = first.param.device, first.exp_avg_sq.codec
    scale, found_inf = scaling
    adamw_(
        [x.param for x in bucket],
        [x.grad for x in bucket],
        [x.exp_avg.storage for x in bucket],
        [x.exp_avg_sq.storage for x in bucket],
        # as numbers if they are on the CPU, where reading does not synchronize
        [int(step) for step in steps] if steps[0].is_cpu else torch.stack(steps),
        AdamWOptions(
            exp_avg_codec=first.exp_avg.codec,
            exp_avg_sq_codec=second_codec,
            # an lr on another device would synchronize in every step
            lr=group["lr"] if is_on(group["lr"], device) else float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            # a kernel would read a tensor as an address
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            stochastic=first.param.dtype == torch.bfloat16 and group["bf16_params"] == "stochastic",
            dither=rounds_stochastically(group, second_codec),
            seed=seed,
        ),
        None if first.remainder is None else [x.remainder for x in bucket],
        # the kernel reads 32 bits; PyTorch's step keeps the gradient's shape
        grad_scale=None if scale is None else scale.to(device, torch.float32).reshape(()),
        found_inf=None if found_inf is None else found_inf.to(device),
    )


def is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def _cut(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    return x if piece.end - piece.begin == x.numel() else x.view(-1)[piece.begin : piece.end]


def _count(states: list[dict[str, Any]], found_inf: torch.Tensor | None) -> list[torch.Tensor]:
    """Advances every `step`, unless `found_inf` skips this step, and returns the counts."""
    steps = [state["step"] for state in states]
    if found_inf is None:
        if all(step.is_cpu for step in steps):
            # a number would become a tensor for every step, which takes four times as long
            torch._foreach_add_(steps, torch.ones(()), alpha=1.0)
        else:
            torch._foreach_add_(steps, 1.0)
        return steps
    counts = list(torch._foreach_add(steps, 1.0))
    # layers of one group may lie on several devices
    for device in {step.device for step in steps}:
        counted = (found_inf.to(device) == 0).float().reshape(())
        # without alpha torch reads the flag as a number, which synchronizes with the GPU
        torch._foreach_add_([step for step in steps if step.device == device], counted, alpha=1.0)
    return counts
