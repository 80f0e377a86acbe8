"""Triton's interpreter, at about a third of its time."""

import dataclasses
import functools
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def quicken_interpreter() -> None:
    """Leaves out what the interpreter does again and again to the same end. An interpreter that works in
    another way is left alone."""
    builder = getattr(interpreter, "interpreter_builder", None)
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    # it computes whether integers overflow, and asserts that they do not where `debug` is set alone
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _once_for_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    tl.core.tensor.__init__ = _tensors_by_type(tl.core.tensor.__init__)
    tl.core.block_type.__init__ = _types_by_shape(tl.core.block_type.__init__)


def _once_for_a_launch(exchange):
    """The functions of `triton.language` are exchanged again for every call of a function within a kernel,
    tens of thousands of times in a test."""
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

    return exchange_once


def _by_name(dtype_of):
    """A table of all types is built for every look into it."""
    known = {}

    @functools.wraps(dtype_of)
    def look_up(triton_type):
        if triton_type.name not in known:
            known[triton_type.name] = dtype_of(triton_type)
        return known[triton_type.name]

    return look_up


def _tensors_by_type(init):
    """What a tensor holds beside its values follows from its type."""
    known = {}

    @functools.wraps(init)
    def make(tensor, handle, type):
        if type.name in known:
            vars(tensor).update(known[type.name], handle=handle)
        else:
            init(tensor, handle, type)
            known[type.name] = dict(vars(tensor))

    return make


def _types_by_shape(init):
    known = {}

    @functools.wraps(init)
    def make(block_type, element_ty, shape):
        element, *sizes = (x.value if isinstance(x, tl.constexpr) else x for x in (element_ty, *shape))
        key = (element.name, *sizes)
        if key in known:
            vars(block_type).update(known[key])
        else:
            init(block_type, element_ty, shape)
            known[key] = dict(vars(block_type))

    return make
