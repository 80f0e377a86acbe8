"""Checks GPUs, links, memory and disks with small workloads."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from coat_ds.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding, reason
from coat_kernels.fp8 import E4M3
from coat_kernels.groups import quantize_groups, quantize_groups_reference
from coat_kernels.linear import scaled_matmul, scaled_matmul_reference

FP8_CAPABILITY = (8, 9)
NO_GPU = "cannot be checked: there is no GPU here"
# bytes of a parameter in a checkpoint: BF16 weight, FP32 master, moments; two checkpoints, since a new one is
# complete before the old one is deleted
CHECKPOINT_BYTES, CHECKPOINTS = 2 + 4 + 8, 2
# error of an FP8 GEMM: rounding of its result to BF16, and Hopper's accumulation with about 14 bits
TOLERANCE = 2**-7
# bytes a second; every link of GPUs for training is faster
SLOW_LINK, SLOW_HOST = 15e9, 5e9
MOVED = 256 * 2**20
# minutes; every extension compiles in less
LONGEST_BUILD = 20
KINDS_OF_GPUS = "TORCH_CUDA_ARCH_LIST"


def gpus() -> list[list]:
    """For each GPU its name and both numbers of the compute capability."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [[torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)] for i in range(count)]


def without_fp8(name: str, *capability: int) -> str | None:
    """Why a GPU cannot run FP8 GEMMs, with the fix; None if it can."""
    if tuple(capability) >= FP8_CAPABILITY:
        return None
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}, FP8 needs 8.9. Set "
        "coat.activations.enabled to false in the DeepSpeed JSON"
    )


def free_bytes(folder: str | Path) -> int:
    """Free bytes on the disk of a folder, which need not exist."""
    path = Path(folder).absolute()
    standing = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(standing).free


def too_little_room(folder: str | Path, free: int, parameters: int) -> str | None:
    """Why a folder with `free` bytes cannot hold the checkpoints of a model; None if it can."""
    needed = CHECKPOINTS * CHECKPOINT_BYTES * parameters
    if free >= needed:
        return None
    return f"{free / 2**30:.1f} GiB are free in {folder}, two checkpoints take {needed / 2**30:.1f}"


def check(folder: str | None, parameters: int | None) -> list[Finding]:
    """All checks of this machine. parameters: those of a model whose checkpoints `folder` has to hold."""
    return [
        *check_gpus(),
        check_product(),
        check_compiler(),
        check_builds(),
        *check_kinds_of_gpus(),
        check_triton(),
        check_libraries(),
        *check_links(),
        check_pinned_memory(),
        check_disk(folder or ".", parameters),
    ]


def check_gpus() -> list[Finding]:
    found = gpus()
    if not found:
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees none"
        return [Finding("GPUs", UNKNOWN, f"none: {why}. FP8 runs in its reference arithmetic, slowly")]
    driver = _driver()
    out = []
    for index, (name, *capability) in enumerate(found):
        memory = torch.cuda.get_device_properties(index).total_memory
        details = {"name": name, "capability": capability, "bytes": memory, "driver": driver}
        if (why := without_fp8(name, *capability)) is not None:
            out.append(Finding(f"GPU {index}", PROBLEM, why, details))
        else:
            text = (
                f"{name}, {memory / 1e9:.1f} GB, capability {capability[0]}.{capability[1]}, driver {driver}"
            )
            out.append(Finding(f"GPU {index}", OK, text, details))
    if len({name for name, *_ in found}) > 1:
        out.append(Finding("GPUs", WARNING, "of several kinds: every step waits for the slowest"))
    return out


def check_product(device: str = "cuda") -> Finding:
    """Compares a small FP8 GEMM with the same GEMM in FP32."""
    name = "FP8 GEMM"
    if device == "cuda" and not torch.cuda.is_available():
        return Finding(name, UNKNOWN, NO_GPU)
    if device == "cuda" and without_fp8(*gpus()[0]):
        return Finding(name, UNKNOWN, "cannot be checked: the GPU has no FP8")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 256, generator=generator).to(device, E4M3.dtype) for n in (128, 64))
    scales = torch.tensor([0.5], device=device), torch.tensor([2.0], device=device)
    try:
        y = scaled_matmul(a, b, *scales, None, torch.bfloat16, False)
    except RuntimeError as error:
        return Finding(name, PROBLEM, f"fails: {reason(error)}. Update the driver, or torch and its cuBLAS")
    expected = scaled_matmul_reference(a, b, *scales, torch.float32)
    error = ((y.float() - expected).norm() / expected.norm()).item()
    # `not` and `<`, so that NaN is a problem
    if not error < TOLERANCE:
        return Finding(
            name,
            PROBLEM,
            f"relative error {error:.2g}; rounding explains {TOLERANCE:.2g}. Update torch and its cuBLAS",
            {"error": error},
        )
    return Finding(name, OK, f"right: relative error {error:.1g}, within rounding", {"error": error})


def check_compiler() -> Finding:
    """Triton needs a C++ compiler, and so does DeepSpeed on a CPU, for collectives."""
    name = "C++ compiler"
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if found is None:
        text = "none on PATH. Triton and DeepSpeed compile when they are first used: install g++"
        return Finding(name, WARNING, text)
    return Finding(name, OK, found, {"path": found})


def _build_root() -> Path:
    """The folder in which this Python and torch build extensions, as torch chooses it."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    versions = {"rocm": torch.version.hip, "cu": torch.version.cuda}
    found = (f"{kind}{version.replace('.', '')}" for kind, version in versions.items() if version)
    # imported here: with CUDA's compiler and no GPU, as on a login node, the import logs a warning, which
    # `coat plan` should not show
    from torch.utils.cpp_extension import get_default_build_root

    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return Path(get_default_build_root(), f"{python}_{next(found, 'cpu')}")


def check_builds() -> Finding:
    """Checks for lock files of builds of C++ extensions, such as DeepSpeed's. Processes that need an
    extension wait until its lock file is deleted. A killed build does not delete the file."""
    name = "extensions"
    root = _build_root()
    minutes: dict[Path, float] = {}
    for lock in root.glob("*/lock"):
        # a build that ends now deletes its lock file
        with contextlib.suppress(FileNotFoundError):
            minutes[lock] = (time.time() - lock.stat().st_mtime) / 60
    if not minutes:
        return Finding(name, OK, f"none is being built in {root}")
    oldest = max(minutes, key=lambda lock: minutes[lock])
    text = (
        f"{oldest} is {minutes[oldest]:.0f} minutes old: either an extension is being built, or a build was "
        "killed and jobs wait for ever without a message. Delete the file if nothing compiles"
    )
    state = WARNING if minutes[oldest] < LONGEST_BUILD else PROBLEM
    return Finding(name, state, text, {"locks": list(map(str, minutes))})


def check_kinds_of_gpus() -> list[Finding]:
    """A finding if DeepSpeed cannot read the list of GPU architectures for which it builds extensions."""
    kinds = os.environ.get(KINDS_OF_GPUS, "")
    if re.search(r"\d[a-z]", kinds) is None:
        return []
    text = (
        f"{kinds}: DeepSpeed reads no letters there and builds no extension for GPUs, such as FusedAdam "
        "(CoatAdamW needs none). Unset it, or leave the letters out (DeepSpeed #8619)"
    )
    return [Finding(KINDS_OF_GPUS, WARNING, text)]


def check_triton() -> Finding:
    """Compiles and runs one of the kernels and compares it with its reference."""
    name = "Triton"
    if not torch.cuda.is_available():
        return Finding(name, UNKNOWN, NO_GPU)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    start = time.perf_counter()
    # Triton raises errors of many types, from the compiler, ptxas and the driver
    try:
        found = quantize_groups(x, 16)
        torch.cuda.synchronize()
    except Exception as error:
        return Finding(
            name,
            PROBLEM,
            f"cannot compile: {reason(error)}. It needs a C compiler on PATH and the driver's libcuda; "
            "remove ~/.triton/cache if it is of another version",
        )
    expected = quantize_groups_reference(x.cpu(), 16)
    if not all(torch.equal(a.cpu(), b) for a, b in zip(found[:2], expected[:2], strict=True)):
        return Finding(name, PROBLEM, "computes something else than the reference. Install triton again")
    return Finding(name, OK, f"compiles and computes what it should ({time.perf_counter() - start:.1f} s)")


# attention makes cuDNN load its sub-libraries; Transformer Engine may have loaded another version of them
_MAP_LIBRARIES = """
import contextlib, json, torch
with contextlib.suppress(ImportError):
    import transformer_engine.pytorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from coat_kernels import libraries
q = torch.ones(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
with contextlib.suppress(RuntimeError), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
q[0, 0] @ q[0, 0].T
versions = {k: sorted({libraries.version_of(p) for p in v}) for k, v in libraries.mapped().items()}
print(json.dumps([versions, libraries.conflicts()]))
"""


def check_libraries() -> Finding:
    """Whether a process that imports Transformer Engine loads only one version of cuDNN, cuBLAS and NCCL."""
    name = "CUDA libraries"
    if not torch.cuda.is_available():
        return Finding(name, UNKNOWN, NO_GPU)
    run = subprocess.run([sys.executable, "-c", _MAP_LIBRARIES], capture_output=True, text=True)
    if run.returncode:
        return Finding(name, WARNING, f"not checked: {(run.stderr.splitlines() or ['no output'])[-1][:160]}")
    versions, mixed = json.loads(run.stdout.splitlines()[-1])
    if mixed:
        return Finding(name, PROBLEM, "; ".join(mixed), {"versions": versions})
    text = ", ".join(f"{library} {' and '.join(found)}" for library, found in versions.items())
    return Finding(name, OK, text, {"versions": versions})


def check_links() -> list[Finding]:
    """Checks NCCL, and the bandwidth between the first GPU and each other GPU."""
    if not torch.cuda.is_available():
        return [Finding("NCCL", UNKNOWN, NO_GPU)]
    if not torch.distributed.is_nccl_available():
        return [Finding("NCCL", PROBLEM, "torch is built without it. Install torch from its own index")]
    version = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count()
    if count == 1:
        return [Finding("NCCL", OK, f"{version}; there is one GPU, so no link to try", {"version": version})]
    try:
        summed = [torch.full((1024,), float(i), device=f"cuda:{i}") for i in range(count)]
        torch.cuda.nccl.all_reduce(summed)
        right = all(bool((t == count * (count - 1) / 2).all()) for t in summed)
    except RuntimeError as error:
        text = f"{version} fails: {reason(error)}. NCCL_DEBUG=INFO says more"
        return [Finding("NCCL", PROBLEM, text, {"version": version})]
    text = f"{version}, sums over {count} GPUs " + (
        "are right" if right else "are wrong. Install torch again"
    )
    out = [Finding("NCCL", OK if right else PROBLEM, text, {"version": version})]
    rates = {f"0-{i}": _rate("cuda:0", f"cuda:{i}") for i in range(1, count)}
    slowest = min(rates, key=rates.get)
    text = f"slowest link {slowest}: {rates[slowest] / 1e9:.0f} GB/s"
    if slow := rates[slowest] < SLOW_LINK:
        text += ". These GPUs have no NVLink: prefer ZeRO-1 and larger micro-batches to ZeRO-3"
    return [*out, Finding("links", WARNING if slow else OK, text, {"bytes_per_second": rates})]


def check_pinned_memory() -> Finding:
    """Checks pinned memory, which offload needs."""
    name = "pinned memory"
    if not torch.cuda.is_available():
        return Finding(name, UNKNOWN, NO_GPU)
    try:
        host = torch.empty(MOVED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Finding(
            name, PROBLEM, f"none: {reason(error)}. Raise `ulimit -l`, or set pin_memory of offloads to false"
        )
    rate = _rate(host, "cuda:0")
    state = WARNING if rate < SLOW_HOST else OK
    return Finding(name, state, f"to the GPU {rate / 1e9:.0f} GB/s", {"bytes_per_second": rate})


def check_disk(folder: str, parameters: int | None) -> Finding:
    free = free_bytes(folder)
    details = {"folder": str(folder), "free_bytes": free}
    if parameters is None:
        text = f"{free / 2**30:.1f} GiB are free in {folder}; give a --model that can be built to compare"
        return Finding("disk", OK, text, details)
    if (why := too_little_room(folder, free, parameters)) is not None:
        return Finding("disk", PROBLEM, f"{why}. Make room, or give another --folder", details)
    return Finding(
        "disk", OK, f"{free / 2**30:.1f} GiB are free in {folder}, enough for checkpoints", details
    )


def _rate(source: str | torch.Tensor, target: str) -> float:
    """Bytes a second from a device, or from a CPU tensor, to another device."""
    if isinstance(source, str):
        source = torch.empty(MOVED, dtype=torch.uint8, device=source)
    to = torch.empty(MOVED, dtype=torch.uint8, device=target)
    # the first copy sets up the connection
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize(to.device)
        seconds = time.perf_counter() - start
    return MOVED / seconds


def _driver() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.split() or ["unknown"])[0]
