"""The GPUs on which kernels run, and the GPUs that are refused."""

import pytest
import torch

from coat_kernels import device as devices

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("found", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_device_without_fp8_is_refused(found, monkeypatch):
    monkeypatch.setattr(devices, "capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert devices.has_fp8_gemm(GPU) == (found >= (8, 9))
    devices.require_fp8(torch.device("cpu"))
    if found >= (8, 9):
        devices.require_fp8(GPU)
    else:
        with pytest.raises(
            RuntimeError, match=rf"8.9 or newer, found a GPU with 8.{found[1]}.*8-bit states alone"
        ):
            devices.require_fp8(GPU)


def test_device_emulation_is_logged_once_and_not_of_the_meta_device(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RANK", "0")
    devices._log_emulation.cache_clear()
    x = torch.ones(16, 64)
    devices.uses_kernels(x.to("meta"))
    assert "no GPU" not in caplog.text
    for _ in range(2):
        devices.uses_kernels(x)
    assert caplog.text.count("no GPU") == 1


def test_device_of_the_cpu_takes_the_references():
    x = torch.zeros(1)
    assert not devices.uses_kernels(x) and not devices.uses_kernels(x, fp8=False)


@pytest.mark.gpu
def test_device_with_fp8_takes_the_kernels_that_need_it(device, monkeypatch):
    x = torch.zeros(1, device=device)
    assert devices.uses_kernels(x) and devices.uses_kernels(x, fp8=False)
    monkeypatch.setattr(devices, "_has_fp8", lambda index: False)
    assert not devices.uses_kernels(x) and devices.uses_kernels(x, fp8=False)
