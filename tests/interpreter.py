"""Triton's interpreter, at about half its time."""

import functools
from types import SimpleNamespace

import triton.language as tl


def patch_language_once() -> None:
    """Has the interpreter exchange the functions of `triton.language` once for a launch.

    It goes through all of them again for every call of a function within a kernel, tens of thousands of
    times in a test. An interpreter that works in another way is left alone.
    """
    from triton.runtime import interpreter

    exchange = getattr(interpreter, "_patch_lang", None)
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(exchange, "__wrapped__"):
        return
    # as seen from kernels and from Triton's own functions
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    under_way = []

    @functools.wraps(exchange)
    def exchange_once(fn):
        if under_way:
            return under_way[0]
        scope = exchange(everything)
        restore = scope.restore

        def end():
            under_way.clear()
            restore()

        scope.restore = end
        under_way.append(scope)
        return scope

    interpreter._patch_lang = exchange_once
