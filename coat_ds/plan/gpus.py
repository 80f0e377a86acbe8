"""Rates of GPUs."""

from dataclasses import dataclass, replace

from coat_ds.plan.errors import PlanError

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What a GPU can do: operations and bytes a second."""

    name: str
    memory: float
    """Bytes that torch's allocator can have: all except what CUDA and NCCL take, 3 x 10^9."""
    bf16: float
    """Rate of BF16 GEMMs, two operations for each multiplication."""
    fp8: float
    """Rate of FP8 GEMMs with a scale per tensor; 0 without FP8."""
    attention: float
    """Rate of causal attention, forward and backward."""
    copy: float
    """Bytes that a copy reads and writes."""
    link: float
    """Bytes that a GPU sends to others of its node in messages that all take part in."""
    source: str
    """Where the rates are from."""


# GEMMs of a 7B layer, 8192 rows: BF16 660 to 790 TFLOP/s, FP8 1210 to 1380; attention of 4 x 32 heads x
# 2048 x 128, 4.81e11 operations, in 1.23 ms by cuDNN; a copy at 4.28 TB/s of the data sheet's 4.8
_H200 = Gpu(
    name="H200",
    memory=150.1 * GB - 3 * GB,
    bf16=725e12,
    fp8=1295e12,
    attention=4.81e11 / 1.23e-3,
    copy=4.28e12,
    link=368 * GB,
    source="measured on H200s (torch 2.11, CUDA 13.0); link: a copy between two, 368 GB/s",
)


_H100 = replace(
    _H200,
    name="H100",
    memory=85.0 * GB - 3 * GB,
    copy=3.03e12,
    source="a copy of 3.03 TB/s, measured on an H100; else as the H200, which has the same cores",
)
# of data sheets: GB of memory, dense TFLOP/s with FP32 sums in BF16 and FP8, GB/s of memory and of links
_OTHERS = {
    "A100": (85.0, 312, 0, 2039, 245),
    "B200": (192, 2250, 4500, 8000, 736),
    "L40S": (47.7, 362, 733, 864, 25),
    "RTX 4090": (25.3, 165, 330, 1008, 25),
    "RTX 5090": (33.7, 209, 419, 1792, 50),
}


def _of_data_sheet(name: str, memory: float, bf16: float, fp8: float, bandwidth: float, link: float) -> Gpu:
    """A GPU that was not measured, at the shares of its data sheet that an H200 reaches (of 989 and 1,979
    TFLOP/s, and 4,800 GB/s)."""
    return Gpu(
        name=name,
        memory=memory * GB - 3 * GB,
        bf16=bf16 / 989 * _H200.bf16,
        fp8=fp8 / 1979 * _H200.fp8,
        attention=bf16 / 989 * _H200.attention,
        copy=bandwidth / 4800 * _H200.copy,
        link=link * GB,
        source="its data sheet, at the share of theirs that H200s reach; nothing was measured on it",
    )


GPUS = {"h200": _H200, "h100": _H100} | {
    name.split()[-1].lower(): _of_data_sheet(name, *rates) for name, rates in _OTHERS.items()
}


def find_gpu(name: str) -> Gpu:
    """The GPU whose name is in `name`. Raises PlanError for one whose rates are not known."""
    for key, gpu in GPUS.items():
        if key in name.lower():
            return gpu
    raise PlanError(f"gpu: found {name!r}; expected one of {', '.join(GPUS)}.")
