"""Kernels compiled for a GPU on a machine without one."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton

import coat_kernels
from coat_kernels.prepared import PreparedKernel
from tests.hosts import TEST_ALL

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[2]

# bytes of shared memory of a block (CUDA C++ Programming Guide, by compute capability): Ada, Hopper,
# Blackwell of data centres and of workstations
SHARED = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# other GPUs have no kernel that accumulates a GEMM into its output
HOPPER_ALONE = {"accumulate_kernel"}


def compile_for(capability: int) -> list[tuple[str, list[str], int]]:
    """Names of kernels, the layouts of the rows that they sum, and the shared memory of a block."""
    # in a process without triton's interpreter
    command = [sys.executable, "-m", "tests.kernels.offline", str(capability), str(SHARED[capability])]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    if not TEST_ALL:
        # what is not compiled to the end may not be launched by others
        environment["TRITON_CACHE_DIR"] = str(ROOT / ".pytest_cache/triton")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, list[str], int]]:
    return compile_for(90)


def kernels() -> set[str]:
    """All kernels of the package: functions of triton's type whose names end in `_kernel`."""
    kinds = (PreparedKernel, triton.runtime.JITFunction, triton.runtime.interpreter.InterpretedFunction)
    modules = pkgutil.walk_packages(coat_kernels.__path__, "coat_kernels.")
    named = [item for module in modules for item in vars(importlib.import_module(module.name)).items()]
    return {name for name, value in named if isinstance(value, kinds) and name.endswith("_kernel")}


def test_every_kernel_compiles(compiled):
    assert len(kernels()) > 25 and {name for name, *_ in compiled} == kernels()
    assert max(shared for *_, shared in compiled) <= SHARED[90]


@pytest.mark.long("compiles all kernels once more for each GPU")
@pytest.mark.parametrize("capability", [89, 100, 120])
def test_every_kernel_compiles_for_other_gpus(capability):
    found = compile_for(capability)
    assert {name for name, *_ in found} == kernels() - HOPPER_ALONE
    assert max(shared for *_, shared in found) <= SHARED[capability]


def test_norms_sum_a_row_in_one_order(compiled):
    """For every kind of output. The order follows from the layout of the row in threads, which differs
    between kernels that store bytes and kernels that store BF16 only."""
    for name in ("norm_forward_kernel", "head_norm_forward_kernel"):
        found = [layouts for compiled_name, layouts, _ in compiled if compiled_name == name]
        assert len(found) >= 4 and len({layout for layouts in found for layout in layouts}) == 1
    # RMSNorm has one sum, LayerNorm two
    assert {len(layouts) for name, layouts, _ in compiled if name == "norm_forward_kernel"} == {1, 2}
