"""Freshly allocated memory is poisoned, so that an element no kernel writes is seen."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            t = allocate(*args, **kwargs)
            if t.numel():
                # all bits set is NaN in every floating type used here, and an absurd exponent
                t.as_strided((t.numel(),), (1,)).view(torch.uint8).fill_(0xFF)
            return t

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(42)


@pytest.fixture(params=[False, True], ids=["reference", "kernels"])
def takes_kernels(request, device):
    """Whether a test goes through the kernels, which a GPU always does; the test makes its modules do so."""
    if not request.param and device.type == "cuda":
        pytest.skip("a GPU takes the kernels")
    return request.param
