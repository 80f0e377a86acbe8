"""Without a GPU the Triton kernels run in Triton's interpreter, chosen before they are defined."""

import os

import pytest
import torch

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items):
    if not GPU:
        skip = pytest.mark.skip(reason="needs a CUDA GPU of compute capability 8.9 or newer")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the GPU if there is one, else the CPU through the interpreter."""
    return torch.device("cuda" if GPU else "cpu")
