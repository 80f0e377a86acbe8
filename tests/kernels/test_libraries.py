"""Libraries of a process, parsed from the text of its /proc/PID/maps."""

from pathlib import Path

import pytest
import torch

from coat_kernels import libraries

TORCH = Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib"
SYSTEM = Path("/usr/lib/x86_64-linux-gnu")


def maps(*paths):
    return "\n".join(f"7f00-7f01 r-xp 00000000 fe:00 42                     {path}" for path in paths)


ONE = [TORCH / "libcudnn.so.9", TORCH / "libcudnn_graph.so.9", TORCH / "libcudnn_ops.so.9"]
MIXED = [TORCH / "libcudnn.so.9", SYSTEM / "libcudnn_graph.so.9.14.0", SYSTEM / "libcudnn_ops.so.9.14.0"]
CASES = {
    "none": ([], ()),
    "one cuDNN": (ONE, ()),
    # another package's entry library is mapped; it finds the sub-libraries of torch's
    "two entries": ([*ONE, SYSTEM / "libcudnn.so.9.14.0"], ()),
    "system's alone": ([SYSTEM / f"libcudnn{part}.so.9.14.0" for part in ("", "_graph", "_ops")], ()),
    "mixed": (MIXED, ("cudnn",)),
    "mixed, two entries": ([*MIXED, SYSTEM / "libcudnn.so.9.14.0"], ("cudnn",)),
    "sub-libraries of two": ([*ONE, SYSTEM / "libcudnn_adv.so.9.14.0"], ("cudnn",)),
    "two of NCCL": ([TORCH / "libnccl.so.2", SYSTEM / "libnccl.so.2.27.3"], ("nccl",)),
    "two of cuBLAS": ([SYSTEM / "libcublas.so.13.0.1", TORCH / "libcublasLt.so.13"], ("cublas",)),
    "cuBLASMp": ([TORCH / "libcublas.so.13", SYSTEM / "libcublasmp.so.0"], ()),
    "copies of NCCL": ([TORCH.parent / "libnccl.so.2.27.3", SYSTEM / "libnccl.so.2.27.3"], ()),
    "others": ([SYSTEM / "libc.so.6", SYSTEM / "libcudart.so.13"], ()),
}


@pytest.mark.parametrize("case", CASES)
def test_libraries_in_two_versions_are_named_with_the_fix(case):
    paths, expected = CASES[case]
    found = libraries.conflicts(libraries.mapped(maps(*paths)))
    assert len(found) == len(expected)
    for sentence, library in zip(found, expected, strict=True):
        assert library in sentence and "LD_LIBRARY_PATH=" in sentence
    if case == "mixed":
        assert f"LD_LIBRARY_PATH={TORCH}" in found[0] and "9.14.0" in found[0]


def test_libraries_of_this_process_are_read():
    assert isinstance(libraries.mapped(), dict)
    assert libraries.conflicts() == [] or torch.cuda.is_available()
