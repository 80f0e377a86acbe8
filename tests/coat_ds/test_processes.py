"""Processes find the same bits from the same numbers. Runs that resume to the bit need that.

All meet the same shapes in the same order, on which the last bits of cuDNN's attention may depend
(docs/optimizer.md).
"""

import hashlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_ds import CoatAdamW, convert
from coat_kernels.fp8 import E4M3
from coat_kernels.linear.matmul import scaled_matmul
from coat_kernels.tensorwise import largest_magnitude, quantize_tensor
from tests.hosts import TEST_ALL
from tests.util import run_distributed

# on a GPU kernels are chosen for sizes that fill it
LARGE = {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "vocab_size": 32000}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def numbers(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(device, torch.bfloat16)


def product(device: torch.device, h: int, f: int, fast: bool) -> str:
    operands = []
    for rows in (2 * h, f):
        x = numbers(rows, h, device=device)
        operands.append(quantize_tensor(x, largest_magnitude(x), E4M3))
    a, b = operands
    return digest(scaled_matmul(a.rows, b.rows, a.scale, b.scale, None, torch.bfloat16, fast))


def attention(device: torch.device, h: int, heads: int, backend: SDPBackend) -> tuple[str, str]:
    """Forward and backward."""
    shape = 4, heads, h // 2, h // heads
    q, k, v = (numbers(*shape, device=device).requires_grad_() for _ in range(3))
    with sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(y, (q, k, v), numbers(*shape, device=device))
    return digest(y), digest(*grads)


def trained(device: torch.device, sizes: dict, ours: bool) -> tuple[str, str, str]:
    """The first loss, its gradients, and the loss after a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    if ours:
        convert(model, {"cuda_graphs": False})
    make = CoatAdamW if ours else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-4)
    tokens = torch.randint(sizes["vocab_size"], (4, sizes["hidden_size"] // 2)).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = digest(*(p.grad for p in model.parameters()))
    optimizer.step()
    return digest(loss), gradients, digest(model(input_ids=tokens, labels=tokens).loss)


def bits(name: str, seed: int = 0) -> dict[str, str]:
    """What a process finds, by what it did."""
    device = torch.device(name)
    torch.manual_seed(seed)
    random = digest(torch.randn(4))
    sizes = LARGE if device.type == "cuda" else SMALL
    h, f, heads = (sizes[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    found = {f"product, fast {fast}": product(device, h, f, fast) for fast in (False, True)}
    backends = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        backends.append(SDPBackend.CUDNN_ATTENTION)
    for backend in backends:
        forward, backward = attention(device, h, heads, backend)
        found |= {f"{backend.name}, forward": forward, f"{backend.name}, backward": backward}
    for system, ours in (("stock", False), ("COAT", True)):
        loss, gradients, following = trained(device, sizes, ours)
        found |= {f"{system}, loss": loss, f"{system}, gradients": gradients}
        found[f"{system}, next loss"] = following
    # after a model
    return found | {"random numbers": random, "random numbers, later": digest(torch.randn(4))}


def test_processes_find_the_same_bits(device):
    """What differs is printed, and how many processes found each."""
    on_gpu = device.type == "cuda"
    # one after the other: what they find must not depend on what was compiled before, either
    found = [
        run_distributed(bits, 1, str(device), gpus=on_gpu, fresh=TEST_ALL)[0]
        for _ in range(8 if on_gpu else 2)
    ]
    differ = {}
    for what in found[0]:
        seen = [each[what] for each in found]
        if len(set(seen)) > 1:
            differ[what] = sorted(map(seen.count, set(seen)))
    print(differ)
    # GPUs add up attention's gradients in any order, in stock layers too
    behind = ("backward", "gradients", "next loss") if on_gpu else ()
    assert not [what for what in differ if not what.endswith(behind)]


def test_other_numbers_are_seen():
    """The digests tell."""
    first, second = (bits("cpu", seed) for seed in (0, 1))
    assert not [what for what in first if first[what] == second[what]]
