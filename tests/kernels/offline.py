"""Compiles kernels for a GPU that need not be there, and prints one line for each as JSON: its name, how
threads hold the rows that it sums, and the bytes of shared memory of a block.

They are those of a training step of converted models, and the others by themselves. Nothing is launched:
results are whatever was in memory. To be run without triton's interpreter, whose kernels are not compiled.
`make test` compiles to LLVM's language, by which layouts and shared memory are known, and not to the GPU's.

    TRITON_INTERPRET=0 python -m tests.kernels.offline [CAPABILITY SHARED_MEMORY]
"""

import functools
import json
import re
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import JITFunction, driver

from coat_kernels import device

# set before other modules import it by name
device.uses_kernels = lambda x, fp8=True: True
if len(sys.argv) > 2:
    device.shared_memory = lambda device: int(sys.argv[2])

import coat_ds  # noqa: E402
from coat_kernels import experts, groups, linear, norm, rope, tensorwise  # noqa: E402
from coat_kernels.adamw import AdamWOptions, storing  # noqa: E402
from coat_kernels.codecs.codec import decode_kernel_launch, encode_kernel_launch  # noqa: E402
from coat_kernels.fp8 import E4M3  # noqa: E402
from tests.families import FAMILIES  # noqa: E402
from tests.hosts import TEST_ALL  # noqa: E402
from tests.kernels.steps import OPTIONS, states  # noqa: E402

# compute capability of Hopper
CAPABILITY = 90
# RMSNorm with and without norms of heads, and LayerNorm
MODELS = "llama", "qwen3", "gpt2"
SUM = re.compile(r"\(tensor<\d+x\d+xf32, (#\w+)>\) -> tensor<\d+xf32")
LAYOUT = re.compile(r"^(#\w+) = (#ttg\.blocked<.*>)$", re.MULTILINE)


class Driver:
    """The methods of a driver that triton calls while it compiles."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compile_only(capability: int) -> None:
    """Makes every later launch compile its kernel and print a line, without running the kernel."""
    driver.set_active(Driver(capability))
    if not TEST_ALL:
        CUDABackend.make_ptx = lambda self, source, metadata, *_: metadata.setdefault("name", "")
        CUDABackend.make_cubin = lambda *_: b""
    launch = JITFunction.run

    def run(self, *args, **how):
        compiled = launch(self, *args, **(how | {"warmup": True}))
        text = compiled.asm["ttgir"]
        layouts = dict(LAYOUT.findall(text))
        sums = [layouts[name] for name in SUM.findall(text)]
        print(json.dumps([self.fn.__name__, sums, compiled.metadata.shared]))
        return compiled

    JITFunction.run = run


def train(name: str) -> None:
    """A step of a model in BF16 with exact masters; then one of FP32 parameters, as ZeRO has them."""
    model = coat_ds.convert(FAMILIES[name].build())
    model(**FAMILIES[name].batch()).loss.backward()
    coat_ds.CoatAdamW(model.named_parameters(), lr=1e-3).step()
    flat = torch.nn.Parameter(torch.empty(2**16))
    flat.grad = torch.empty_like(flat)
    coat_ds.CoatAdamW([flat], lr=1e-3).step()


def norms() -> None:
    """Norms with trained and with frozen weights, and with FP8 output."""
    x, weight = torch.empty(256, 128, dtype=torch.bfloat16), torch.ones(128, requires_grad=True)
    scale = tensorwise.PredictedScale(E4M3)
    for layer_norm in (False, True):
        options = norm.op.NormOptions(1e-5, layer_norm, False, "sqrt8")
        norm.op.norm_operands(x, weight.detach(), None, options, scale)
        norm.normalize(x, weight, None, options)
        with torch.no_grad():
            norm.normalize(x, weight, None, options)
    # rows as wide as in the largest models: these need the most shared memory
    for dtype, h in ((torch.bfloat16, 8192), (torch.bfloat16, 16384), (torch.float32, 8192)):
        wide = torch.empty(64, h, dtype=dtype)
        q = groups.kernels.quantize_groups_triton(wide, 16)
        rstd, gamma = torch.ones(64), torch.ones(h, dtype=dtype)
        for residual in (None, wide):
            norm.kernels.norm_backward_triton(wide, residual, q, rstd, gamma, False, False)


def others() -> None:
    """Kernels that converted models do not call."""
    x = torch.empty(256, 512, dtype=torch.bfloat16)
    amax = tensorwise.scale.amax_triton(tensorwise.scale.maxima_triton(x))
    codes = tensorwise.quantize.quantize_tensor_triton(x, amax, E4M3).rows
    tensorwise.transpose.transpose_codes_triton(codes)
    prediction = tensorwise.PredictedScale(E4M3)
    tensorwise.together.rows_together([x] * 3, [prediction] * 3, E4M3)
    tensorwise.together.columns_together([x] * 3, [amax] * 3, E4M3)
    kept = groups.kernels.quantize_groups_triton(x, 16)
    groups.kernels.dequantize_groups_triton(kept, 16)
    out, one = torch.empty(256, 256), torch.ones(1)
    if driver.active.get_current_target().arch == CAPABILITY:
        # only the kernel of Hopper adds to the output itself (`accumulate_matmul`)
        linear.kernels.accumulate_matmul_triton(codes, codes, one, one, out)
    linear.kernels.add_triton(out, out)
    q = torch.empty(8, 2, 4, 64, dtype=torch.bfloat16)
    table = torch.empty(8, 64)
    rope.kernels.rotate_qkv_backward_triton(q, q, q, table, table)
    codecs, pair = states("ratio8", "log8", 1280, "cpu")
    for codec in (codecs["exp_avg_codec"], codecs["exp_avg_sq_codec"]):
        decode_kernel_launch(codec, encode_kernel_launch(codec, torch.empty(1280)))
    moments, grad = storing.Moments(*pair), torch.empty(10, 128)
    storing.storing_sums_triton(moments, moments, grad, torch.ones(10), AdamWOptions(**codecs, **OPTIONS))


def experts_layer() -> None:
    """Experts whose weights and router are trained, frozen ones, GPT-OSS's with biases, and rows in order."""
    ones = functools.partial(torch.ones, dtype=torch.bfloat16)
    gpt_oss = experts.KernelGate("quick_gelu", limit=7.0, offset=1.0, interleaved=True)
    # whether rows come in order: in `make test` one of both for each layer
    for trained, gate, biased, in_order in (
        (True, experts.KernelGate("silu"), False, False),
        (False, experts.KernelGate("silu"), False, True),
        (True, experts.KernelGate("silu", gated=False), False, True),
        (True, gpt_oss, True, False),
    ):
        x = ones(256, 128, requires_grad=True)
        weights = torch.ones(256, 2, requires_grad=trained)
        gate_up = ones(4, (1 + gate.gated) * 256, 128, requires_grad=trained)
        down = ones(4, 128, 256, requires_grad=trained)
        biases = {}
        if biased:
            biases = {"gate_up_bias": ones(4, 512, requires_grad=True), "down_bias": ones(4, 128)}
        chosen = torch.zeros(256, 2, dtype=torch.int64)
        layer = gate_up, down, gate
        if TEST_ALL or not in_order:
            experts.grouped_experts(x, chosen, weights, *layer, **biases).sum().backward()
        if TEST_ALL or in_order:
            rows = torch.full((4,), 64), weights[:, 0]
            experts.permuted_experts(x, *rows, *layer, **biases).sum().backward()
    scale = torch.ones(1)
    experts.kernels.repeat_scales(scale, 256, scale, 128)


if __name__ == "__main__":
    compile_only(int(sys.argv[1]) if len(sys.argv) > 1 else CAPABILITY)
    for name in MODELS:
        train(name)
    norms()
    others()
    experts_layer()
