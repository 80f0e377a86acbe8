"""Launchers as operators that `torch.compile` can take in.

Eager calls go straight to the function; while a model is compiled they go through a `torch.library` operator
of the same meaning, whose fake implementation gives the shapes.
"""

import functools
from collections.abc import Callable

import torch

NAMESPACE = "coat"


def compilable(fake: Callable, mutates: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Makes an operator `coat::<name>` of a function of tensors and plain numbers that returns new tensors.

    fake: same arguments, empty tensors of the right shapes, dtypes and devices. mutates: names of arguments
    that are written. Types are annotated as `torch.library.custom_op` wants them. The operator itself is
    `function.op`, for `torch.library.opcheck`; the function, for callers that are never compiled,
    `function.eager`.
    """

    def decorate(function: Callable) -> Callable:
        name = function.__name__
        op = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=mutates)
        op.register_fake(fake)

        @functools.wraps(function)
        def call(*args):
            return op(*args) if torch.compiler.is_compiling() else function(*args)

        call.op, call.eager = op, function
        return call

    return decorate


def nothing(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns in the place of None, which it cannot return."""
    return torch.empty(0, dtype=torch.float32, device=like.device)
