"""Launches: helpers return the same as triton's and torch's, and a prepared launch equals triton's own."""

import inspect

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from coat_kernels import tensorwise
from coat_kernels.prepared import PreparedKernel, on_device_of, signature_of
from tests.hosts import TEST_ALL


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_launch_is_where_the_tensors_are():
    x = torch.randn(40, 48, device="cuda:1")
    amax = tensorwise.tensor_amax(x)
    assert torch.cuda.current_device() == 0 and amax.device == x.device and amax == x.abs().max()
    with on_device_of(x):
        assert torch.cuda.current_device() == 1
    with on_device_of(torch.zeros(1, device="cuda:0")):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 0


class Specialization:
    """The properties of arguments by which triton specializes a kernel for NVIDIA GPUs."""

    def __init__(self, count: int):
        names = ", ".join(f"a{i}" for i in range(count))
        scope = {}
        exec(f"def many({names}): pass", scope)
        signature = inspect.signature(scope["many"])
        params = [
            triton.runtime.jit.KernelParam(i, p, False, False)
            for i, p in enumerate(signature.parameters.values())
        ]
        backend = CUDABackend(GPUTarget("cuda", 90, 32))
        self.bind = triton.runtime.jit.create_function_from_signature(signature, params, backend)

    def __call__(self, args) -> list:
        return self.bind(*args)[1]


@st.composite
def arguments(draw):
    """One argument of a launch. Tensors are CPU tensors: triton reads the same properties from them."""
    floats = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
    tensors = st.builds(lambda dtype, start: torch.zeros(64, dtype=dtype)[start:], floats, st.integers(0, 32))
    edges = st.sampled_from([0, 1, -1, 15, 16, 17, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63])
    numbers = st.one_of(edges, st.integers(-(2**63), 2**64 - 1))
    return draw(st.one_of(tensors, numbers, st.floats(), st.booleans(), st.none()))


@settings(max_examples=300 if TEST_ALL else 100, deadline=None)
@given(st.lists(st.tuples(arguments(), arguments()), min_size=1, max_size=4))
def test_launch_signature_means_one_compiled_kernel(pairs):
    """If triton would compile another kernel, the key of a prepared launch differs."""
    left, right = zip(*pairs, strict=True)
    specialized = Specialization(len(pairs))
    if specialized(left) != specialized(right):
        assert signature_of(left)[0] != signature_of(right)[0]


def test_launch_signature_holds_what_matters_and_nothing_else():
    x = torch.zeros(64)
    key, values = signature_of((x, None, 32, 1, 7, 2.0, True))
    assert values == [x.data_ptr(), None, 32, 1, 7, 2.0, True]
    # other memory, other multiples of 16, other odd numbers and other floats take the same kernel
    assert signature_of((torch.zeros(9), None, 48, 1, 9, 3.0, True))[0] == key
    for i, other in enumerate((x[1:], x, 33, 2, 16, 2, None)):
        args = [x, None, 32, 1, 7, 2.0, True]
        args[i] = other
        assert signature_of(tuple(args))[0] != key
    assert signature_of((x.bfloat16(), None, 32, 1, 7, 2.0, True))[0] != key


@PreparedKernel
@triton.jit
def add_if_there_kernel(p_x, p_y, p_out, n, step, factor, BLOCK: tl.constexpr):
    o_x = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x * step, mask=o_x < n, other=0.0).to(tl.float32) * factor
    if p_y is not None:
        b_x += tl.load(p_y + o_x, mask=o_x < n, other=0.0).to(tl.float32)
    tl.store(p_out + o_x, b_x, mask=o_x < n)


# values that differ between launches: offset of x, its dtype, whether there is y, n, step, factor
LAUNCHES = [
    (offset, dtype, has_y, n, step, factor)
    for offset, dtype in ((0, torch.float32), (1, torch.float32), (0, torch.bfloat16), (3, torch.bfloat16))
    for has_y in (True, False)
    for n, step, factor in ((16, 1, 1.0), (16, 2, 0.5), (13, 1, 2.0), (1, 16, -1.0))
]


def check_launches(device: torch.device) -> None:
    for offset, dtype, has_y, n, step, factor in LAUNCHES:
        x = torch.randn(16 * 16 + 3, device=device).to(dtype)[offset:]
        y, out = torch.randn(16, device=device), torch.full((16,), torch.nan, device=device)
        add_if_there_kernel[(1,)](x, y if has_y else None, out, n, step, factor, BLOCK=16)
        expected = x[::step][:n].float() * factor + (y[:n] if has_y else 0)
        torch.testing.assert_close(out[:n], expected)
        assert out[n:].isnan().all()


def test_launch_prepared_computes_what_the_first_does(device):
    # each signature occurs three times; the second and third launches are prepared launches
    for _ in range(3):
        check_launches(device)


@pytest.mark.gpu
def test_launch_signature_goes_through_triton_once(monkeypatch):
    met = []
    kernel = PreparedKernel(add_if_there_kernel.function)
    launch = kernel.function.run
    monkeypatch.setattr(kernel.function, "run", lambda *args, **rest: met.append(1) or launch(*args, **rest))
    x, out = torch.randn(32, device="cuda"), torch.empty(16, device="cuda")
    for factor in (1.0, 2.0, 3.0):
        kernel[(1,)](x, None, out, 16, 1, factor, BLOCK=16)
        torch.testing.assert_close(out, x[:16] * factor)
    assert len(met) == 1
    kernel[(1,)](x[1:], None, out, 16, 1, 1.0, BLOCK=16)
    assert len(met) == 2
    # a profiler records every launch
    seen = []
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        for _ in range(3):
            kernel[(1,)](x, None, out, 16, 1, 5.0, BLOCK=16)
    finally:
        hooks.remove(seen.append)
    assert len(seen) == 3 and len(met) == 5
    torch.testing.assert_close(out, x[:16] * 5)


@pytest.mark.gpu
def test_launch_prepared_refuses_what_triton_refuses():
    x, out = torch.randn(32), torch.empty(16, device="cuda")
    add_if_there_kernel[(1,)](out, None, out, 16, 1, 1.0, BLOCK=16)
    for _ in range(2):
        with pytest.raises(ValueError, match="cpu tensor"):
            add_if_there_kernel[(1,)](x, None, out, 16, 1, 1.0, BLOCK=16)


@pytest.mark.gpu
def test_launch_prepared_goes_to_the_current_stream_and_into_graphs():
    x, out = torch.ones(32, device="cuda"), torch.zeros(16, device="cuda")
    add_if_there_kernel[(1,)](x, None, out, 16, 1, 1.0, BLOCK=16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_if_there_kernel[(1,)](x, None, out, 16, 1, 3.0, BLOCK=16)
    x.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(out, torch.full_like(out, 6.0))
