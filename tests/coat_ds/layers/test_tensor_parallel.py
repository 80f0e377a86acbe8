"""Converted models under torch's tensor parallelism, of two ranks, and with FSDP2 of four."""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import coat_ds
from coat_ds.layers.modules.converted_forward import is_plain
from coat_ds.layers.modules.linear import Fp8Linear
from tests.coat_ds.layers.measures import fp8_bound, relative, run
from tests.coat_ds.layers.parts import Net, check_watched, in_two_parts, tokens, watched, whole
from tests.families import FAMILIES
from tests.util import on_gpus, rel_rms, run_distributed, saved_tensors

LLAMA = FAMILIES["llama"]
ROWS, COLUMNS = ColwiseParallel, RowwiseParallel
STYLES = {name: ROWS for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
STYLES |= {name: COLUMNS for name in ("o_proj", "down_proj")}


def split(model, mesh):
    for layer in model.model.layers:
        names = [name for name, _ in layer.named_modules()]
        styles = {name: STYLES.get(name.rpartition(".")[2]) for name in names}
        parallelize_module(layer, mesh, {name: style() for name, style in styles.items() if style})
    return model


def kept_bytes(model, batch):
    """Bytes that autograd keeps of a forward on this rank, without parameters."""

    def held(x):
        return x._local_tensor if isinstance(x, DTensor) else x

    own = {id(held(p)) for p in model.parameters()}
    with saved_tensors() as tensors:
        model(**batch)
    kept = [held(x) for x in tensors if id(held(x)) not in own and not x.is_leaf]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())


def llama(device):
    """Loss, gradients and kept bytes: stock and alone, and in two parts stock and converted."""
    mesh = init_device_mesh(device, (2,))
    batch = {name: value.to(device) for name, value in LLAMA.batch().items()}
    found = {"alone": run(LLAMA.build().to(device), batch)}
    for name in ("stock", "converted", "split first"):
        model = LLAMA.build().to(device)
        if name == "converted":
            coat_ds.convert(model)
        split(model, mesh)
        if name == "split first":
            coat_ds.convert(model)
        kept = kept_bytes(model, batch)
        loss, gradients = run(model, batch)
        found[name] = loss, whole(gradients), kept
    return found


def check(ranks, exact):
    for found in ranks:
        (loss, expected), (_, _, stock), (other, gradients, kept) = list(found.values())[:3]
        assert abs(other - loss) < 2**-8 * loss
        assert 2**-6 < relative(gradients, expected) < fp8_bound(14)
        assert found["split first"][0] == other and found["split first"][2] == kept
        # attention's gradients need not be the same bits twice on GPUs
        bound = 0 if exact else 2**-8
        assert relative(found["split first"][1], gradients) <= bound
        # norms, and GEMMs after them, keep one code for what BF16 keeps three or four times
        assert kept < 0.6 * stock


def test_tensor_parallel_model_in_two_parts(two):
    check([rank["llama"] for rank in two], exact=True)


def on_two_gpus():
    dist.init_process_group("nccl")
    return llama("cuda")


@on_gpus(2)
def test_tensor_parallel_model_on_two_gpus():
    check(run_distributed(on_two_gpus, 2, gpus=True), exact=False)


def products():
    """Output, gradients of the input and of the parameters; under autocast, their dtypes."""
    found, mesh = [], init_device_mesh("cpu", (2,))
    for bias in (True, False):
        net = parallelize_module(coat_ds.convert(Net(bias=bias)), mesh, {"up": ROWS(), "down": COLUMNS()})
        x = tokens().requires_grad_()
        y = net(x)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), x.grad, whole({n: p.grad for n, p in net.named_parameters()})))
    net = parallelize_module(coat_ds.convert(Net().float()), mesh, {"up": ROWS(), "down": COLUMNS()})
    with torch.autocast("cpu", torch.bfloat16):
        y = net(tokens().float())
    y.sum().backward()
    return *found, [y.dtype, *(p.grad.dtype for p in net.parameters())]


@pytest.mark.parametrize("bias", [0, 1], ids=["bias", "none"])
def test_tensor_parallel_rank_multiplies_its_part_in_fp8(two, bias):
    """As if the parts were layers of one process, whose outputs are joined, or summed in BF16."""
    net, expected, input_grad = in_two_parts(not bias)
    for found in (rank["products"] for rank in two):
        y, gradient, gradients = found[bias]
        # half of the second bias is added to each part, and rounded
        assert rel_rms(y, expected) < 2**-8 if not bias else torch.equal(y, expected)
        # of either rank's part of the output; sums of two are rounded once
        assert rel_rms(gradient, input_grad) < 2**-8
        for name, p in net.named_parameters():
            assert rel_rms(gradients[name], p.grad) < 2**-8, name
        # of FP32 parameters, as stock layers give
        assert found[2] == [torch.bfloat16, *4 * [torch.float32]]


NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


def sequence_parallel():
    """Of each norm in one process and in two, with the tokens of each rank: output, gradients, and the dtypes
    that are kept. What is multiplied is gathered meanwhile, and has to be there before a kernel reads it."""
    found, mesh, rank = {}, init_device_mesh("cpu", (2,)), dist.get_rank()
    for name, norm in NORMS.items():
        for parts in (1, 2):
            net, x = coat_ds.convert(Net(norm(64))), tokens()
            if parts == 2:
                styles = {
                    "norm": SequenceParallel(sequence_dim=0),
                    "up": ColwiseParallel(input_layouts=Shard(0)),
                    "down": RowwiseParallel(output_layouts=Shard(0)),
                }
                net = parallelize_module(net, mesh, styles)
                x = x.chunk(2)[rank].contiguous()
            x.requires_grad_()
            with saved_tensors() as tensors:
                y = net(x)
            y.backward(torch.ones_like(y))
            gradients = whole({n: p.grad for n, p in net.named_parameters()})
            found[name, parts] = y.detach(), x.grad, gradients, [t.dtype for t in tensors]
    return found


@pytest.mark.parametrize("name", NORMS)
def test_sequence_parallel_norms(two, name):
    y, gradient, gradients, _ = two[0]["sequence"][name, 1]
    found = [rank["sequence"][name, 2] for rank in two]
    # two products in parts, each with scales of its own, differ as two roundings to FP8 do
    bound = 2**0.5 * fp8_bound(2)
    assert rel_rms(torch.cat([f[0] for f in found]), y) < bound
    assert rel_rms(torch.cat([f[1] for f in found]), gradient) < bound
    for _, _, one, kinds in found:
        for parameter, expected in gradients.items():
            assert rel_rms(one[parameter], expected) < bound, parameter
        # the norm keeps its input in 8 bits, and no BF16 tensor
        assert torch.uint8 in kinds


def train(model, optimizer, batches):
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_fsdp():
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    losses = []
    for parts in (False, True):
        model = coat_ds.convert(LLAMA.build())
        if parts:
            split(model, mesh["tp"])
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        optimizer = coat_ds.CoatAdamW(model.named_parameters(), lr=4e-3, min_numel=0)
        losses.append(train(model, optimizer, [LLAMA.batch(seed=step, tokens=32) for step in range(4)]))
    return losses


@pytest.mark.long("four ranks; two ranks of either kind are in this file and in test_fsdp.py")
def test_tensor_parallel_beside_fsdp2():
    for alone, parts in run_distributed(with_fsdp, 4):
        assert alone[-1] < alone[0] - 0.1
        for found, expected in zip(parts, alone, strict=True):
            assert abs(found - expected) < 2**-6 * expected


def tied(folder):
    """A model whose embedding is its head: loss and gradients alone and in parts, a watched run alone and in
    parts, and of a run that is saved and resumed, the weights and losses of both."""
    mesh, batch = init_device_mesh("cpu", (2,)), LLAMA.batch()

    def build():
        return split(coat_ds.convert(LLAMA.build(tie_word_embeddings=True)), mesh)

    loss, gradients = run(model := build(), batch)
    found = [run(LLAMA.build(tie_word_embeddings=True), batch), (loss, whole(gradients))]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    alone = coat_ds.convert(LLAMA.build(tie_word_embeddings=True))
    watches = [watched(model, batch) for model in (alone, build())]
    runs = []
    for resumes in (False, True):
        model = build()
        optimizer = coat_ds.CoatAdamW(model.named_parameters(), lr=4e-3, min_numel=0)
        if not resumes:
            train(model, optimizer, [LLAMA.batch(seed=step) for step in range(2)])
        weights, states = get_state_dict(model, optimizer)
        (dcp.load if resumes else dcp.save)({"model": weights, "optimizer": states}, checkpoint_id=folder)
        if resumes:
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
            assert "to the bit" in optimizer.pop_load_summary()
        losses = train(model, optimizer, [LLAMA.batch(seed=step) for step in range(2, 4)])
        held = {n: p.detach() for n, p in model.named_parameters()}
        runs.append((losses, whole(held)))
    return found, watches, runs


def test_tensor_parallel_tied_model_is_watched_and_resumed(two):
    ranks = [rank["tied"] for rank in two]
    for ((loss, expected), (other, gradients)), (alone, parts), (on, again) in ranks:
        assert abs(other - loss) < 2**-8 * loss
        assert 2**-6 < relative(gradients, expected) < fp8_bound(14)
        assert parts[0] == pytest.approx(alone[0], rel=2**-8)
        assert on[0] == again[0] and all(torch.equal(p, again[1][n]) for n, p in on[1].items())
    check_watched([watches[1] for _, watches, _ in ranks])


def work(folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = {"llama": llama("cpu"), "products": products(), "tied": tied(folder)}
    multiply = Fp8Linear.multiply

    def plain(self, x, *rest):
        assert is_plain(x), type(x)
        return multiply(self, x, *rest)

    with mock.patch.object(Fp8Linear, "multiply", plain):
        return found | {"sequence": sequence_parallel()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_distributed(work, 2, str(tmp_path_factory.mktemp("checkpoint")))
