"""Launchers as operators that `torch.compile` can trace.

Eager calls run the function directly. While a model is compiled, calls go through an equivalent
`torch.library` operator, whose fake implementation returns the shapes.
"""

import functools
from collections.abc import Callable

import torch

NAMESPACE = "coat"


def compilable(fake: Callable, mutates: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Creates an operator `coat::<name>` from a function of tensors and plain numbers that returns new
    tensors.

    fake: has the same arguments and returns empty tensors of the right shapes, dtypes and devices. mutates:
    names of arguments that are written. Types are annotated as `torch.library.custom_op` requires. The
    operator itself is `function.op`, for `torch.library.opcheck`; the function is `function.eager`, for
    callers that are never compiled.
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


def without_none(*tensors: torch.Tensor | None, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, with an empty one on the device of `like` in place of each None, which an operator cannot
    return."""
    return tuple(torch.empty(0, dtype=torch.float32, device=like.device) if t is None else t for t in tensors)
