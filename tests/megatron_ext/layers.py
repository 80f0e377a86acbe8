"""Tiny models for the tests of layers, and the measures for their comparison."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from coat_kernels.groups import GROUP_FORMATS
from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear
from megatron_ext.model import ModelShape, build_gpt
from tests.util import EXACT, rel_rms

LINEARS = (CoatColumnParallelLinear, CoatRowParallelLinear)
S, B, VOCAB = 64, 2, 256
H, FFN, HEADS = 128, 352, 4
D = H // HEADS


def build(spec, groups=2, layers=1, **config):
    return build_gpt(
        ModelShape(layers, H, FFN, HEADS, groups), spec, seq_length=S, vocab_size=VOCAB, **config
    )


def batch(device):
    tokens = random_tokens(B, S, VOCAB).to(device)
    return tokens, torch.arange(S, device=device).expand(B, S), None


def cached_bytes(model) -> int:
    """Bytes that COAT's linear layers hold now in FP8 copies of weights."""
    return sum(getattr(module, "cached_bytes", 0) for module in model.modules())


def rounding_error(dtype: torch.dtype, device) -> float:
    """Relative RMS error of a Gaussian rounded to an FP8 format with one scale: 0.026 and 0.053."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(device)
    scale = x.abs().max() / torch.finfo(dtype).max
    return rel_rms((x / scale).to(dtype).float() * scale, x)


def random_tokens(b, s, vocab, seed=5):
    """Tokens [b, s] on the CPU, the same on every rank."""
    return torch.randint(0, vocab, (b, s), generator=torch.Generator().manual_seed(seed))


def loss_of(model, tokens):
    """The mean loss of a GPT, whose labels are its tokens [b, s]."""
    tokens = tokens.to(next(model.parameters()).device)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=tokens).mean()


def assert_close(found, expected, bound):
    """Each of the named tensors is off by less than `bound`, as relative RMS."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert rel_rms(found[name], value) < bound, name


def loss_and_grads(model, device):
    model.zero_grad()
    loss = loss_of(model, batch(device)[0])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def compared(models, x, grad, **arguments):
    """By name: the output and the gradients of each model's first layer, for an input `x` and a gradient
    `grad` of the output, both [S, B, H]; without the residual."""
    results = []
    for model in models:
        layer, inputs = model.decoder.layers[0], x.clone().requires_grad_()
        y, _ = layer(inputs, attention_mask=None, **{name: f(model) for name, f in arguments.items()})
        y.backward(grad)
        results.append(
            {"y": y - x, "dx": inputs.grad - grad, **{n: p.grad for n, p in layer.named_parameters()}}
        )
    assert all(result.keys() == results[0].keys() for result in results)
    return results


def shaken(model, other):
    """Gives norms and biases of the first layers of two models the same values, far from their first ones."""
    torch.manual_seed(0)
    for name, parameter in model.decoder.layers[0].named_parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
            other.decoder.layers[0].get_parameter(name).data.copy_(parameter)


def small_input(device):
    """An input that is small next to the outputs of the branches, so that BF16's errors of the residual do
    not hide theirs; and a gradient of the output."""
    return (0.01 * torch.randn(S, B, H)).bfloat16().to(device), torch.randn(S, B, H).bfloat16().to(device)


def config(kind=TransformerConfig, **overrides) -> TransformerConfig:
    settings = dict(
        num_layers=1,
        hidden_size=H,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
    )
    return kind(**(settings | overrides))


GPT = {
    "normalization": "LayerNorm",
    "activation_func": F.gelu,
    "gated_linear_unit": False,
    "add_bias_linear": True,
}


@contextlib.contextmanager
def without_rounding():
    """Makes FP8 codes and saved groups FP32 numbers: only the arithmetic of the layers remains."""
    from coat_kernels import fp8

    formats = [(fmt, fmt.dtype) for fmt in (fp8.E4M3, fp8.E5M2)]
    for fmt, _ in formats:
        object.__setattr__(fmt, "dtype", torch.float32)
    try:
        with mock.patch.dict(GROUP_FORMATS, dict.fromkeys(GROUP_FORMATS, EXACT)):
            yield
    finally:
        for fmt, dtype in formats:
            object.__setattr__(fmt, "dtype", dtype)


def whole(parameter, value):
    """The gradient of the whole parameter from the gradients of its shards, on every rank."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not getattr(parameter, "tensor_model_parallel", False):
        return value
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    # a rank's part of a gated projection is its part of the gate and its part of up
    strides = [part.chunk(parameter.partition_stride, parameter.partition_dim) for part in parts]
    return torch.cat(
        [part for stride in zip(*strides, strict=True) for part in stride], parameter.partition_dim
    )


Q, KV, WIDTH, POSITIONS = 64, 48, 32, 16
# as in DeepSeek-V3: value heads narrower than query heads, and YaRN's softmax scale
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": Q,
    "kv_lora_rank": KV,
    "qk_head_dim": WIDTH,
    "qk_pos_emb_head_dim": POSITIONS,
    "v_head_dim": WIDTH,
    "rope_type": "yarn",
    "mscale_all_dim": 1.0,
    "qk_layernorm": True,
}
