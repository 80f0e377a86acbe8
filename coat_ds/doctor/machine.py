"""Checks GPUs, one FP8 GEMM, and that Triton compiles."""

import torch

from coat_ds.doctor import OK, PROBLEM, UNKNOWN, Finding, reason
from coat_kernels.fp8 import E4M3
from coat_kernels.groups import quantize_groups, quantize_groups_reference
from coat_kernels.linear import scaled_matmul, scaled_matmul_reference

FP8_CAPABILITY = (8, 9)
NO_GPU = "cannot be checked: there is no GPU here"
# error of an FP8 GEMM: rounding of its result to BF16, and Hopper's accumulation with about 14 bits
TOLERANCE = 2**-7


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


def check() -> list[Finding]:
    """All checks of this machine."""
    return [*check_gpus(), check_product(), check_triton()]


def check_gpus() -> list[Finding]:
    found = gpus()
    if not found:
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees none"
        return [Finding("GPUs", UNKNOWN, f"none: {why}. FP8 runs in its reference arithmetic, slowly")]
    out = []
    for index, (name, *capability) in enumerate(found):
        memory = torch.cuda.get_device_properties(index).total_memory
        details = {"name": name, "capability": capability, "bytes": memory}
        why = without_fp8(name, *capability)
        text = why or f"{name}, {memory / 1e9:.1f} GB, capability {capability[0]}.{capability[1]}"
        out.append(Finding(f"GPU {index}", PROBLEM if why else OK, text, details))
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
        text = f"relative error {error:.2g}; rounding explains {TOLERANCE:.2g}. Update torch and its cuBLAS"
        return Finding(name, PROBLEM, text, {"error": error})
    return Finding(name, OK, f"right: relative error {error:.1g}, within rounding", {"error": error})


def check_triton() -> Finding:
    """Compiles and runs one of the kernels and compares it with its reference."""
    name = "Triton"
    if not torch.cuda.is_available():
        return Finding(name, UNKNOWN, NO_GPU)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
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
    return Finding(name, OK, "compiles and computes what it should")
