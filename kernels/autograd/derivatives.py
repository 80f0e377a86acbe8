"""Refuses derivatives that operations on 8-bit copies do not have, before a wrong number is computed."""

import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

_TWICE = (
    "the gradient of a COAT operation cannot be differentiated again (create_graph=True, as for a gradient "
    "penalty, a Hessian or functional.jvp): it is computed from 8-bit copies. Call coat_ds.unconvert(model), "
    "or leave the layers whose gradients are differentiated out of convert by `filter`."
)
_FORWARD = (
    "COAT operations have no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp). Call "
    "coat_ds.unconvert(model) first."
)


def once_differentiable(backward: Callable) -> Callable:
    """Makes an `autograd.Function`'s `backward` raise RuntimeError under create_graph=True.

    torch's decorator of the same name returns gradients that raise when they are differentiated. Autograd
    reaches such a node only through the incoming gradient. The tensors saved here in 8 bits have no edge to
    forward's inputs. So a second derivative would be zero or None wherever the incoming gradient is a
    constant.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        return backward(ctx, *grads)

    return once


def refuse_forward_mode(*tensors: torch.Tensor | None) -> None:
    """Raises RuntimeError if a tensor has a forward-mode tangent, which a kernel would drop."""
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise RuntimeError(_FORWARD)
