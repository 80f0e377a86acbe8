"""The AdamW step for tensors on the CPU, to which DeepSpeed offloads optimizer states.

The step is C++ code, compiled at first use like DeepSpeed's own CPU optimizers. Without a compiler, steps run
in PyTorch, in pieces that fit into the cache.
"""

import ctypes
import functools
import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from coat_kernels.adamw.options import AdamWOptions
from coat_kernels.adamw.reference import LANE_KEY, STEP_KEY
from coat_kernels.codecs.codec import Storage

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
CPU_INFO = Path("/proc/cpuinfo")
# pairs of formats; their positions are the numbers in the C++ code
_EXPANDED = ("fp8_expanded", "fp8_expanded_e5m2")
COMPILED = (*((m, v) for v in _EXPANDED for m in _EXPANDED), ("ratio8", "log8"))


class Step(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "lr",
            "rate1",
            "beta2",
            "rate2",
            "eps",
            "weight_decay",
            "correction1",
            "root_correction2",
            "scale",
        )
    ] + [("turns", ctypes.c_uint32), ("lanes", ctypes.c_uint32), ("dither", ctypes.c_int)]


def build_name() -> str:
    """The library's name in torch's cache, which several machines may share. The name depends on the CPU,
    because the code is compiled for the CPU's instructions."""
    kinds = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else [platform.processor()]
    kind = sorted({line for line in lines if line.split("\t")[0].strip() in kinds}) or lines
    of = "\n".join([platform.machine(), *kind])
    return f"coat_adamw_cpu_{hashlib.sha256(of.encode()).hexdigest()[:12]}"


@functools.cache
def compiled_step() -> Callable | None:
    """The C function; None if it cannot be compiled, which is logged once."""
    from torch.utils.cpp_extension import load

    try:
        library = load(
            build_name(),
            [str(SOURCE)],
            extra_cflags=FLAGS,
            extra_ldflags=["-fopenmp"],
            is_python_module=False,
        )
    except (OSError, RuntimeError, ImportError) as error:
        log.warning("AdamW steps on the CPU run in PyTorch, slowly: %s", str(error).splitlines()[0])
        return None
    step = ctypes.CDLL(library).adamw_step
    step.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int64] * 2
    step.argtypes += [ctypes.c_int, ctypes.POINTER(Step), ctypes.c_int]
    step.restype = None
    return step


def compiled_can(param: torch.Tensor, grad: torch.Tensor, options: AdamWOptions) -> bool:
    """Whether the compiled step supports these types and options."""
    fp32 = param.dtype == grad.dtype == torch.float32 and param.device.type == "cpu"
    formats = options.exp_avg_codec.name, options.exp_avg_sq_codec.name
    # the compiled step cannot dither the expanded formats
    return fp32 and formats in COMPILED and not (options.dither and formats[1] in _EXPANDED)


def adamw_compiled(
    function: Callable,
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Storage,
    exp_avg_sq: Storage,
    step: float,
    options: AdamWOptions,
    grad_scale: torch.Tensor | None = None,
) -> None:
    """Updates one contiguous FP32 tensor with an FP32 gradient, on torch's number of threads."""
    scale = (1.0 if grad_scale is None else float(grad_scale)) * (-1 if options.maximize else 1)
    beta1, beta2 = options.beta1, options.beta2
    rates = options.lr, 1 - beta1, beta2, 1 - beta2, options.eps, options.weight_decay
    turns = int(step) * STEP_KEY.value & 0xFFFFFFFF
    numbers = Step(*rates, *options.bias_corrections(step), scale, turns, LANE_KEY.value, options.dither)
    function(
        *(t.data_ptr() for t in (param, grad, *exp_avg, *exp_avg_sq)),
        param.numel(),
        options.group_size,
        COMPILED.index((options.exp_avg_codec.name, options.exp_avg_sq_codec.name)),
        ctypes.byref(numbers),
        torch.get_num_threads(),
    )
