"""The ledger's byte counts equal counts by hand."""

import ctypes

import torch

from megatron_ext.saved_bytes import SavedStorages, saved_bytes

S, B, H = 6, 2, 8


class Layer(torch.nn.Module):
    """Multiplies x by `keep(x)` and by its weight, and saves both factors."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.weight = torch.nn.Parameter(torch.ones(H))

    def forward(self, hidden_states):
        return hidden_states * self.weight * self.keep(hidden_states)


def count(*layers: Layer):
    def run():
        x = torch.ones(S, B, H)
        for layer in layers:
            x = layer(hidden_states=x)
        return x

    return saved_bytes(layers, run)


def test_saved_bytes_counts_storages_once_and_whole():
    # a layer saves its input and the factor; the product with the weight is not saved
    own = S * B * H * 4
    found = count(*(Layer(lambda x: torch.ones(S, B, H)) for _ in range(3)))
    assert found.total == 3 * (own + own)
    assert (found.layers, found.tokens) == (3, S * B)
    assert found.per_token_and_layer == 2 * 4 * H

    table = torch.ones(S, 1, H)
    found = count(*(Layer(lambda x: table) for _ in range(3)))
    assert found.total == 3 * own + table.nbytes

    # a view keeps its whole storage
    found = count(Layer(lambda x: torch.ones(10, S, B, H)[0]))
    assert found.total == own + 10 * own


def test_saved_bytes_leaves_out_parameters_and_buffers():
    buffered = Layer(lambda x: buffered.table)
    buffered.register_buffer("table", torch.ones(S, 1, H))
    assert count(buffered).total == S * B * H * 4
    layer = Layer(lambda x: torch.ones((), device=x.device))
    large = torch.ones(1000, requires_grad=True)

    def run():
        return layer(large.exp()[: S * B * H].view(S, B, H))

    # the input is a view of the 1000 results of exp, which exp saves anyway
    assert saved_bytes([layer], run).total == 1000 * 4 + 4
    large.grad = None


class Keeps(torch.autograd.Function):
    """Saves `kept` and does not read it."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()


def test_saved_storages_counts_a_reused_address():
    saved, factor = SavedStorages(lambda address: False), torch.ones((), requires_grad=True)
    first = torch.empty(64)
    second = torch.frombuffer((ctypes.c_float * 32).from_address(first.data_ptr()), dtype=torch.float32)
    with saved.counting():
        Keeps.apply(factor, first)
        assert saved.nbytes == first.nbytes
        # Megatron's recompute does this with tensors that it recomputes in backward
        first.untyped_storage().resize_(0)
        Keeps.apply(factor, second)
    assert saved.nbytes == second.nbytes
