"""Launchers as operators that `torch.compile` can trace.

Eager calls run the function directly. While a model is compiled, calls go through an equivalent
`torch.library` operator, whose fake implementation returns the shapes.
"""

import functools
from collections.abc import Callable

import torch

NAMESPACE = "coat"


def compilable(
    fake: Callable, mutates: tuple[str, ...] = (), unread: int | None = None
) -> Callable[[Callable], Callable]:
    """Creates an operator `coat::<name>` from a function of tensors and plain numbers that returns new
    tensors. The function may return None for some of several results; the operator returns empty tensors for
    them.

    fake: has the same arguments and returns empty tensors of the right shapes, dtypes and devices, or None.
    mutates: names of arguments that are written. unread: index of a result that compiled code never reads,
    such as maxima, which are noted on tensors; the operator returns an empty tensor for it. Types are
    annotated as `torch.library.custom_op` requires. The operator itself is `function.op`, for
    `torch.library.opcheck`.
    """

    def without_none(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args):
            found = function(*args)
            if not isinstance(found, tuple):
                return found
            return tuple(
                args[0].new_empty(0, dtype=torch.float32) if t is None or i == unread else t
                for i, t in enumerate(found)
            )

        return run

    def decorate(function: Callable) -> Callable:
        op = torch.library.custom_op(
            f"{NAMESPACE}::{function.__name__}", without_none(function), mutates_args=mutates
        )
        op.register_fake(without_none(fake))

        @functools.wraps(function)
        def call(*args):
            return op(*args) if torch.compiler.is_compiling() else function(*args)

        call.op = op
        return call

    return decorate
