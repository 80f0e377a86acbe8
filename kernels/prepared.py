"""Launches kernels with little CPU time, because a layer launches dozens.

Triton's own launch binds arguments to the kernel's signature, computes specializations and looks up the
compiled kernel: 15 to 29 us for 3 to 20 arguments. A `PreparedKernel` does this once per signature. From then
on it calls the compiled kernel directly.
"""

import contextlib
import functools

import torch
import triton

# a * b + c is rounded once, in every release of triton. Without this option, triton 3.10 and later round
# twice, and 3.9 warns
FUSED = {"enable_fp_fusion": True}
_NOTHING = contextlib.nullcontext()
_knobs = triton.knobs.runtime


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; `triton.cdiv` takes 3 us."""
    return -(-a // b)


@functools.lru_cache(maxsize=1024)
def tiling(rows: int, columns: int, m: int, n: int) -> tuple[int, int]:
    """The numbers of tiles of m x n elements along the rows and along the columns of [rows, columns]; at
    least one each, because an empty tensor also has a scale."""
    return max(cdiv(rows, m), 1), max(cdiv(columns, n), 1)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 1 for 0. `triton.next_power_of_2` takes 2 us."""
    return 1 << max(n - 1, 0).bit_length()


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """`torch.cuda.device_of(x)`, without its cost if x is on the current device."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device_of(x)


def signature_of(args: tuple) -> tuple[list, list]:
    """The key that selects the compiled kernel for `args`, and the values that the kernel is called with; for
    tensors, their addresses.

    args: None, booleans, numbers and tensors. The key is at least as fine as triton's specialization. For a
        tensor it contains the dtype, the device and whether the address is a multiple of 16; for an integer,
        whether it is 1 or a multiple of 16, and beyond 32 bits its value; for a float, only the type.
    """
    key, values = [], []
    for a in args:
        kind = type(a)
        if kind is int:
            if -(2**31) <= a < 2**31:
                key.append("1" if a == 1 else "int" if a & 15 else "16")
            else:
                key.append(a)
        elif a is None or kind is bool:
            key.append(a)
        elif kind is float:
            key.append(kind)
        else:
            address = a.data_ptr()
            key += a.dtype, a.get_device(), address & 15 == 0
            a = address
        values.append(a)
    return key, values


class PreparedKernel:
    """A triton kernel, launched as `kernel[grid](*args, **constants)`. Arguments are given by position, as in
    `signature_of`; the first is a tensor, and the kernel runs on its device. Constexprs and options are given
    by name.

    The first launch with a signature is triton's own, which compiles. So is every launch in the interpreter,
    on GPUs of other vendors than NVIDIA, and while a profiler or other code has hooks on launches. Later
    changes of triton's settings do not affect signatures that were launched before.
    """

    def __init__(self, function):
        self.function = function
        self._is_compiled = isinstance(function, triton.runtime.JITFunction)
        self._compiled: dict[tuple, tuple] = {}
        self._names: tuple[str, ...] | None = None
        functools.update_wrapper(self, function.fn)

    def __getitem__(self, grid: tuple[int, ...]):
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args, **constants) -> None:
        device = args[0].get_device()
        if device < 0 or not self._is_compiled:
            self.function[grid](*args, **constants, **FUSED)
            return
        # avoids torch.cuda.current_device(), which first checks that CUDA exists
        if device != torch.accelerator.current_device_index():
            with torch.cuda.device(device):
                self._launch(grid, *args, **constants)
            return
        key, values = signature_of(args)
        key = (device, *key, *constants.values())
        prepared = self._compiled.get(key)
        if prepared is None or _has_hooks():
            compiled = self.function[grid](*args, **constants, **FUSED)
            if torch.version.cuda is not None:
                self._compiled[key] = self._prepare(compiled, len(args), constants)
            return
        run, stream_of, function, metadata, rest = prepared
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *values, *rest)

    def _prepare(self, compiled, count: int, constants: dict) -> tuple:
        """The callable, metadata and trailing values of a launch of `compiled` with `count` arguments.
        `constants` must always have the same order, because only their values are compared."""
        names = self._names = self._names or tuple(constants)
        if tuple(constants) != names:
            raise TypeError(
                f"{self.__name__}: expected constants in the order {names}, found {(*constants,)}"
            )
        rest = tuple(constants[name] for name in self.function.arg_names[count:])
        stream_of = triton.runtime.driver.active.get_current_stream
        return compiled.run, stream_of, compiled.function, compiled.packed_metadata, rest


def _has_hooks() -> bool:
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    # None, a chain of hooks, or, in older releases, a function
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )
