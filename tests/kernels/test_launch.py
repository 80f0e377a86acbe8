"""Helpers of launches: the same as triton's and torch's."""

import pytest
import torch
import triton

from coat_kernels import tensorwise
from coat_kernels.launch import cdiv, next_power_of_2, on_device_of


def test_integers_are_tritons():
    for n in range(1, 70):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        for m in range(1, 20):
            assert cdiv(n, m) == triton.cdiv(n, m)
    assert cdiv(0, 16) == 0 and next_power_of_2(0) == 1


def test_a_cpu_tensor_needs_no_device():
    with on_device_of(torch.zeros(1)):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_kernels_run_where_their_tensors_are():
    x = torch.randn(40, 48, device="cuda:1")
    largest = tensorwise.largest_magnitude(x)
    assert torch.cuda.current_device() == 0 and largest.device == x.device and largest == x.abs().max()
    with on_device_of(x):
        assert torch.cuda.current_device() == 1
    with on_device_of(torch.zeros(1, device="cuda:0")):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 0
