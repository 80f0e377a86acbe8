"""Kernels as a GPU would run them, compiled without one."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys

import pytest
import triton

import coat_kernels
from coat_kernels.prepared import PreparedKernel

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, list[str]]]:
    """Names of kernels, and the layouts of the rows that they sum."""
    # a process without the interpreter
    command = [sys.executable, "-m", "tests.kernels.offline"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def kernels() -> set[str]:
    """All of the package: those of functions that triton knows whose names say so."""
    kinds = (PreparedKernel, triton.runtime.JITFunction, triton.runtime.interpreter.InterpretedFunction)
    modules = pkgutil.walk_packages(coat_kernels.__path__, "coat_kernels.")
    named = [item for module in modules for item in vars(importlib.import_module(module.name)).items()]
    return {name for name, value in named if isinstance(value, kinds) and name.endswith("_kernel")}


def test_every_kernel_compiles(compiled):
    assert len(kernels()) > 25 and {name for name, _ in compiled} == kernels()


def test_norms_sum_a_row_in_one_order(compiled):
    """However the output is asked for. The order follows from how threads hold the row: beside stores of
    bytes otherwise than beside those of BF16 alone."""
    for name in ("norm_forward_kernel", "head_norm_forward_kernel"):
        found = [layouts for compiled_name, layouts in compiled if compiled_name == name]
        assert len(found) >= 4 and len({layout for layouts in found for layout in layouts}) == 1
    # RMSNorm has one sum, LayerNorm two
    assert {len(layouts) for name, layouts in compiled if name == "norm_forward_kernel"} == {1, 2}
