"""The COAT layer with sequences split over two ranks: rotary positions, losses and gradients equal those of
one rank."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron_ext import cpu, layer_specs, unsupported
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext.layers import assert_close, random_tokens, without_rounding
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

S, B, VOCAB, LAYERS = 256, 2, 64, 2
H, FFN, HEADS, GROUPS = 256, 352, 4, 2


def _own_positions():
    """Megatron's split: each rank has one part from the first half of the sequence and one from the second
    half, so that causal attention is equal work on both ranks."""
    rank, ranks = (
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
    )
    if ranks == 1:
        return torch.arange(S)
    parts = torch.arange(S).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])


class _Gather(torch.autograd.Function):
    """Concatenates the parts of all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(torch.nn.Module):
    """Attention over the keys and values of all ranks, for machines that cannot run Transformer Engine."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, pg_collection, **_):
        super().__init__()
        self.group = pg_collection.cp

    def forward(self, query, key, value, attention_mask=None, **_):
        own = _own_positions()
        mask = own[:, None] >= _Gather.apply(own, self.group)[None, :]
        k, v = (_Gather.apply(x, self.group) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return y.permute(2, 0, 1, 3).flatten(2)


def _run(exact):
    """Mean loss and gradients of the COAT model over all tokens, at context-parallel sizes 1 and 2."""
    if not torch.cuda.is_available():
        unsupported.HAVE_TE, chosen = True, layer_specs.core_attention_of
        layer_specs.core_attention_of = lambda config, own: (
            chosen(config, own) if config.context_parallel_size == 1 else GatheredAttention
        )
    tokens = random_tokens(B, S, VOCAB)
    results = {}
    for size in (1, 2):
        device = join(context_parallel_size=size)
        with without_rounding() if exact else contextlib.nullcontext():
            model = build_gpt(
                ModelShape(LAYERS, H, FFN, HEADS, GROUPS),
                layer_specs.coat_layer_spec,
                seq_length=S,
                vocab_size=VOCAB,
                bf16=not exact,
            )
            own = _own_positions()
            part, positions = tokens[:, own].to(device), own.expand(B, -1).to(device)
            with cpu.no_cuda():
                loss = model(part, positions, None, labels=part).mean()
            loss.backward()
            values = {"loss": loss.detach(), **{name: p.grad.float() for name, p in model.named_parameters()}}
            for value in values.values():
                # at size 1 both data-parallel ranks saw the same tokens, so the mean equals each value
                dist.all_reduce(value)
            results[size] = {name: (value / 2).cpu() for name, value in values.items()}
        parallel_state.destroy_model_parallel()
    return results


def test_context_parallel_ranks_give_the_gradients_of_one():
    for rank in run_distributed(_run, 2, True):
        one, two = rank[1], rank[2]
        assert abs(two["loss"] - one["loss"]) < 1e-5 * one["loss"]
        # FP32 sums of at most FFN terms, in another order
        assert_close(two, one, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_context_parallel_ranks_give_the_gradients_of_one_with_transformer_engine():
    pytest.importorskip("transformer_engine.pytorch")
    for rank in run_distributed(_run, 2, False, gpus=True):
        one, two = rank[1], rank[2]
        # each rank has the scales of its own part, so every rounding differs. As counted in test_layer.py, a
        # gradient has up to 21 roundings to E4M3, 0.026 each, and 4 to E5M2, 0.053 each, in each layer, and
        # in two runs
        bound = (2 * LAYERS * (21 * 0.026**2 + 4 * 0.053**2)) ** 0.5
        assert abs(two["loss"] - one["loss"]) < 3e-3 * one["loss"]
        assert_close(two, one, bound)
