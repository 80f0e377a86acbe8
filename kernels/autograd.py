"""Refuses second derivatives, as torch's own operations do where they have none."""

import functools
from collections.abc import Callable

import torch

_TWICE = (
    b"the gradient of a COAT operation cannot be differentiated again (create_graph=True, as for a gradient "
    b"penalty): it is computed from 8-bit copies. Build layers whose gradients are penalised without COAT."
)


def once_differentiable(backward: Callable) -> Callable:
    """Makes the results of an `autograd.Function`'s `backward` raise RuntimeError when they are
    differentiated.

    Unlike torch's decorator of that name it also does so where the incoming gradient is a constant, since the
    results still depend on what forward saved. Without create_graph, the usual case, it enters no context.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        several = found if isinstance(found, tuple) else (found,)
        refuse = torch._C._functions.DelayedError(_TWICE, len(several))
        # the error needs tensors that require gradients
        refused = refuse(*(None if t is None else t.detach().requires_grad_() for t in several))
        return refused if isinstance(found, tuple) else refused[0]

    return once
