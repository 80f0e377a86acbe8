"""Kernels in Triton's interpreter: where they run, in about a third of the interpreter's usual time."""

import dataclasses
import functools
import inspect
import sys
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

# FP8 GEMMs are not Triton's, and the optimizer's kernels have tests of their own
_ELSEWHERE = ("adamw", "codecs", "linear.matmul", "linear.op")


def take_kernels(monkeypatch) -> None:
    """Replaces the references of all operations by their kernels, which a GPU runs anyway."""
    for name, module in list(sys.modules.items()):
        package, _, inner = name.partition(".")
        if package == "coat_kernels" and hasattr(module, "uses_kernels") and not inner.startswith(_ELSEWHERE):
            monkeypatch.setattr(module, "uses_kernels", lambda x: True)


def quicken_interpreter() -> None:
    """Removes repeated work with the same result from the interpreter. An interpreter that works differently
    is unchanged."""
    builder = getattr(interpreter, "interpreter_builder", None)
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    # the interpreter computes integer overflow checks, but asserts them only if `debug` is set
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _once_for_a_launch(interpreter._patch_lang)
    interpreter._patch_builtin = _found_once
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    tl.core.tensor.__init__ = _tensors_by_type(tl.core.tensor.__init__)
    tl.core.block_type.__init__ = _types_by_shape(tl.core.block_type.__init__)


def _once_for_a_launch(exchange):
    """The interpreter replaces the functions of `triton.language` for every call of a function within a
    kernel, tens of thousands of times in a test. This replaces them once per launch."""
    # as kernels and Triton's own functions see it
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


@functools.cache
def _builtins_of(package):
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _found_once(package, builder, scope):
    """The interpreter looks through all names of a package for every launch."""
    for name, member in _builtins_of(package):
        scope.set_attr(package, name, _interpreted(getattr(member, "__wrapped__", member)))


@functools.cache
def _interpreted(function):
    def call(*args, _semantic=None, **options):
        return function(*args, **options, _semantic=interpreter.interpreter_semantic)

    return call


def _by_name(dtype_of):
    """The interpreter builds a table of all types for every lookup."""
    known = {}

    @functools.wraps(dtype_of)
    def look_up(triton_type):
        if triton_type.name not in known:
            known[triton_type.name] = dtype_of(triton_type)
        return known[triton_type.name]

    return look_up


def _tensors_by_type(init):
    """All fields of a tensor except its values follow from its type."""
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
