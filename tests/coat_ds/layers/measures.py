"""What tests of converted models measure, and the bounds that FP8 explains."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from coat_ds.layers.modules.decoder_layer import Fp8DecoderLayer
from tests.families import FAMILIES
from tests.kernels.agreement import E4M3_RMS, E5M2_RMS
from tests.util import saved_tensors

# those that together have every kind of layer that is converted; make test-all runs the others too
_KINDS = ("llama", "gpt2", "mixtral", "qwen3_moe_grouped", "llava", "bert")
_REST = pytest.mark.long("the same kinds of layers in other families")
OF_EACH_KIND = pytest.mark.parametrize(
    "name", [name if name in _KINDS else pytest.param(name, marks=_REST) for name in FAMILIES]
)


def placed(batch: dict, device: torch.device | str) -> dict:
    """A batch whose tensors are on `device`."""
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}


def padded(batch: dict, tokens: int, left: bool = False) -> dict:
    """The batch, the last `tokens` of whose second sequence are padding without labels, or the first ones."""
    where = slice(None, tokens) if left else slice(batch["input_ids"].shape[1] - tokens, None)
    mask, labels = torch.ones_like(batch["input_ids"]), batch["labels"].clone()
    mask[1, where], labels[1, where] = 0, -100
    return batch | ({"attention_mask": mask, "labels": labels} if tokens else {})


def run(model, batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and every gradient, FP32."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model, batch) -> int:
    """Bytes of storages that autograd keeps of a forward, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    with saved_tensors() as tensors:
        loss = model(**batch).loss
    assert loss.requires_grad
    kept = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(size for place, size in kept.items() if place not in own)


def fused_calls(monkeypatch) -> list:
    """Grows by one with each layer that runs as fused blocks."""
    taken, run_fused = [], Fp8DecoderLayer.run_fused
    monkeypatch.setattr(Fp8DecoderLayer, "run_fused", lambda *a: taken.append(1) or run_fused(*a))
    return taken


def bytes_left_behind(model, batch) -> int:
    """Bytes that a forward still holds where hooks around it have taken copies of all that it saves, as
    offloading does, without what it was given."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *batch.values())}
    saved = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage._cdata not in own:
            saved[StorageWeakRef(storage)] = storage.nbytes()
        return x.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**batch).loss
    assert loss.requires_grad and saved
    return sum(size for storage, size in saved.items() if not storage.expired())


def fp8_bound(products: int) -> float:
    """Bound of the relative error of a gradient after at most `products` FP8 linear layers.

    A forward product rounds both operands to E4M3: errors of both, in quadrature, relative to its output. A
    backward product rounds a gradient to E5M2 and the other operand to E4M3. Errors of different products are
    independent, so squares add up; a network that is normed, or adds branches to a residual, passes what came
    before on with a gain of at most one. The last product is that of the weight's gradient. What is saved
    for backward in 8 bits adds less than a tenth of one of these.
    """
    backward = E4M3_RMS**2 + E5M2_RMS**2
    return (fp8_forward_bound(products) ** 2 + (products + 1) * backward) ** 0.5


def fp8_forward_bound(products: int) -> float:
    """`fp8_bound` of what the forward computes."""
    return (2 * products) ** 0.5 * E4M3_RMS


def relative(found: dict, expected: dict) -> float:
    """The error of all gradients together, as one vector, over its length."""
    assert found.keys() == expected.keys()
    error = sum((found[n] - e).square().sum() for n, e in expected.items())
    return (error / sum(e.square().sum() for e in expected.values())).sqrt().item()


def same(found, expected):
    """Losses and gradients, of `run`, are equal to the bit."""
    assert found[0] == expected[0] and found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert found[1][name].equal(gradient), name
