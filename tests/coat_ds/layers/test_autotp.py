"""DeepSpeed's tensor parallelism for models of transformers (AutoTP), in two processes."""

import warnings

import pytest
import torch
import torch.distributed as dist

import coat_ds
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.layers.parallel.autotp import is_autotp
from tests.coat_ds.engines import adamw, engine_of
from tests.coat_ds.layers.parts import Net, in_two_parts, tokens
from tests.families import FAMILIES
from tests.util import on_gpus, rel_rms, run_distributed

LLAMA = FAMILIES["llama"]


def products():
    """Output, gradients of the input and of this rank's parameters; what is left of layers of other kinds."""
    from deepspeed import init_distributed
    from deepspeed.module_inject import layers

    init_distributed("gloo", verbose=False)
    layers.set_autotp_mode(training=True)
    group, found = dist.group.WORLD, []
    for bias in (True, False):
        net = Net(bias=bias)
        net.up = layers.LinearLayer(net.up, mp_group=group)
        net.down = layers.LinearAllreduce(net.down, mp_group=group)
        coat_ds.convert(net)
        x = tokens().requires_grad_()
        y = net(x)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), x.grad, {n: p.grad for n, p in net.named_parameters()}))
    net = Net()
    net.up = layers.LinearLayer(net.up, mp_group=group, gather_output=True)
    # DeepSpeed 0.18.9 has no such layers
    gathers = getattr(net.up, "gather_output", False)
    gathered = gathers, coat_ds.conversion_of(coat_ds.convert(net)).left
    layers.LinearLayer.tp_overlap_comm = True
    net = Net()
    net.up = layers.LinearLayer(net.up, mp_group=group)
    return found, gathered, coat_ds.conversion_of(coat_ds.convert(net)).left


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(products, 2)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
def test_autotp_rank_multiplies_its_part_in_fp8(ranks, bias):
    net, expected, input_grad = in_two_parts(bias)
    parts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for rank, (found, *_) in enumerate(ranks):
        y, gradient, gradients = found[not bias]
        assert torch.equal(y, expected)
        # sums of two, rounded once
        assert rel_rms(gradient, input_grad) < 2**-8
        for name, p in net.named_parameters():
            grad = p.grad.chunk(2, parts[name])[rank] if name in parts else p.grad
            assert rel_rms(gradients[name], grad) < 2**-8, name


def test_autotp_layers_that_exchange_more_stay(ranks):
    for _, gathered, overlapped in ranks:
        assert gathered in ((True, {"up": "AutoTP gathers its output"}), (False, {}))
        assert overlapped == {"up": "tensor_parallel.tp_overlap_comm multiplies by itself"}


def train(coat, watch=False, model=None, steps=4, **block):
    """Losses, FP8 layers, which layers of AutoTP are converted, those that are when the engine is gone, and
    what was watched."""
    block = {"enabled": coat, "optimizer": {"min_numel": 0}, "watch": watch, **block}
    engine = engine_of(
        model or LLAMA.build(), 1, block, optimizer=adamw(4e-3), tensor_parallel={"autotp_size": 2},
        train_micro_batch_size_per_gpu=2,
    )  # fmt: skip
    losses, readings = [], []
    if watch:
        engine.coat.watch.add(readings.append)
    for step in range(steps):
        batch = LLAMA.batch(seed=step, tokens=32)
        loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    layers = engine.coat.layers.count("linear") if coat else None
    split = [converted_forward(m) is not None for m in engine.module.modules() if is_autotp(m)]
    engine.destroy()
    seen = (losses, readings[-1]) if readings else None
    left = [m for m in engine.module.modules() if converted_forward(m)]
    return losses, layers, split, left, seen


def of_engines():
    warnings.simplefilter("ignore")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # the project may be importable without being installed; what pip's installation adds: test_autoload.py
    coat_ds.install()
    return train(False), train(True), train(True, activations=False, steps=1)


def check(ranks):
    for (expected, *_), (losses, layers, split, left, _), states_alone in ranks:
        # to the bit before the first step
        assert states_alone[0] == expected[:1] and not any(states_alone[2])
        # the head is of a class of its own
        assert layers == (14, 15) and sum(split) == 14 and not left
        # FP8's noise of a loss: less than a percent
        assert losses != expected
        for found, loss in zip(losses, expected, strict=True):
            assert abs(found - loss) < 2**-7 * loss


def test_autotp_needs_the_json_alone():
    check(run_distributed(of_engines, 2))


@on_gpus(2)
def test_autotp_needs_the_json_alone_on_two_gpus():
    check(run_distributed(of_engines, 2, gpus=True))
