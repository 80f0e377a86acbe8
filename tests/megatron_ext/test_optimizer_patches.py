"""Installation of the FP8 optimizer in Megatron's optimizers: its arguments, and refused options."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from coat_ds.config import CoatConfigError
from coat_ds.optim.layouts import Fragment
from coat_ds.optim.moment import Moment
from coat_ds.watch.states import StateSampler, figures
from coat_kernels.adamw import join_master
from megatron_ext.layer_specs import sdpa_layer_spec
from megatron_ext.model import ModelShape, build_gpt
from megatron_ext.optimizer import patches
from megatron_ext.optimizer.adamw import MegatronAdamW
from tests.megatron_ext.trainer import FFN, MODES, H, S, Trainer, installed
from tests.util import Made, default_dtype, rel_rms


def test_optimizer_patches_are_applied_and_removed(megatron):
    patches.uninstall()

    def places():
        owners = [
            megatron_optimizer,
            megatron_optimizer.OptimizerConfig,
            DistributedOptimizer,
            megatron_optimizer.ChainedOptimizer,
        ]
        return {(i, k): v for i, owner in enumerate(owners) for k, v in vars(owner).items()}

    def changed():
        return {key for key, value in places().items() if value is not before[key]}

    before, build = places(), (0, "_get_megatron_optimizer_based_on_param_groups")
    for _ in range(2):
        patches.watch()
        assert changed() == {build, (3, "__init__")} and not patches.installed()
    patches.install()
    during = places()
    patches.install()
    patches.watch()
    assert places() == during and patches.installed()
    assert changed() == {
        build,
        (3, "__init__"),
        (1, "__post_init__"),
        (2, "_get_main_param_and_optimizer_states"),
        (2, "_set_main_param_and_optimizer_states"),
        (2, "sharded_state_dict"),
        (2, "load_state_dict"),
    }
    patches.uninstall()
    assert places() == before and not patches.installed()


def test_optimizer_patches_refuse_an_unknown_megatron_first(megatron, monkeypatch):
    name = "_set_main_param_and_optimizer_states"
    monkeypatch.setattr(DistributedOptimizer, name, lambda self, param, tensors: None)
    with pytest.raises(RuntimeError, match=rf"DistributedOptimizer\.{name}: expected .*model_param.*found"):
        patches.install()
    assert not patches.installed()
    monkeypatch.delattr(DistributedOptimizer, name)
    with pytest.raises(RuntimeError, match=rf"{name}: .*found nothing in megatron-core"):
        patches.install()
    assert not patches.installed()
    monkeypatch.undo()
    # read, and not patched
    monkeypatch.setattr(DistributedOptimizer, "_get_model_param_range_map", lambda self: None)
    with pytest.raises(RuntimeError, match="_get_model_param_range_map: expected .*param"):
        patches.install()
    assert not patches.installed()


@pytest.mark.parametrize(
    "mode, bf16",
    [*((mode, True) for mode in MODES), ("plain", False), ("fp32", False)],
    ids=lambda value: value if isinstance(value, str) else "bf16" if value else "fp32 parameters",
)
def test_keep_fp32_patterns_match_names_of_the_model(megatron, caplog, mode, bf16):
    """Patterns match names of the model, not names inside of Megatron's wrappers; readings of the watch use
    the same names."""
    block = {"keep_fp32": ["decoder.layers.1.mlp.*"], "min_numel": 1}
    with installed(optimizer=block), mock.patch.dict(MODES, fp32={"bf16": False}):
        states = Trainer(mode, bf16=bf16).inner.state.values()
    kept = {s["exp_avg"].numel() for s in states if s["exp_avg"].pieces[0].codec.name == "fp32"}
    assert kept == {H * FFN, 2 * H * FFN}
    assert not [line for line in caplog.messages if "matches no parameter" in line]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"optimizer": "sgd", "use_precision_aware_optimizer": False}, "--optimizer sgd"),
        ({"decoupled_weight_decay": False}, "weight-decay"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({"exp_avg_dtype": torch.bfloat16}, "--exp-avg-dtype"),
        ({"main_params_dtype": torch.float16}, "--main-params-dtype"),
        (
            {"use_megatron_fsdp": True},
            "8-bit optimizer states: --use-megatron-fsdp is not supported. Remove it, or write",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_arguments_of_the_optimizer_are_refused(megatron, options, named):
    options = dict(options)
    model = build_gpt(ModelShape(1, 32, 48, 2, 2), sdpa_layer_spec, seq_length=S, vocab_size=16)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with installed(), pytest.raises(CoatConfigError, match=named):
        wrapped = DistributedDataParallel(model.config, settings, model)
        # Megatron's FSDP itself needs a GPU; the optimizer only checks this flag
        settings.use_megatron_fsdp = options.pop("use_megatron_fsdp", False)
        common = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
        config = OptimizerConfig(**({"optimizer": "adam", "lr": 1e-3, "bf16": True} | common | options))
        get_megatron_optimizer(config, [wrapped])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["deepcopy", "pickle"]
)
def test_megatron_adamw_copies_step_alike(copied):
    p = torch.nn.Parameter(torch.randn(20, 130).bfloat16())
    optimizer = MegatronAdamW([p], use_decoupled_grad=True, counts_in_groups=True, min_numel=0)
    optimizer.link([(0, p, Fragment(0, p.numel(), 0, False))], distributed=True)
    steps = [torch.randn(p.shape) for _ in range(2)]
    p.decoupled_grad = steps[0]
    optimizer.step()
    again = copied(optimizer)
    (q,) = again.param_groups[0]["params"]
    for held in (p, q):
        held.decoupled_grad = steps[1]
    optimizer.step()
    again.step()
    assert q is not p and torch.equal(q, p)
    ours, theirs = optimizer.state_dict(), again.state_dict()
    # the count is where FusedAdam has it, and moments are as they are stored
    assert theirs["param_groups"] == ours["param_groups"] and theirs["param_groups"][0]["step"] == 2
    for name in ("exp_avg", "exp_avg_sq"):
        assert isinstance(theirs["state"][0][name], Moment)
        assert torch.equal(theirs["state"][0][name].decode(), ours["state"][0][name].decode())


def test_megatron_adamw_decoupled_gradients_are_watched():
    """Megatron's precision-aware optimizer uses decoupled gradients only."""
    p = torch.nn.Parameter(torch.ones(16, 128, dtype=torch.bfloat16))
    optimizer = MegatronAdamW([p], use_decoupled_grad=True, min_numel=0)
    sampler = StateSampler(optimizer, {p: 0}, 1)
    p.decoupled_grad = torch.ones(p.shape)
    optimizer.step()
    sampler.open()
    optimizer.step()
    (sums,) = sampler.close().tolist()
    assert 0 < figures(sums)["update_error"] < 0.1


def test_megatron_adamw_reads_and_writes_masters_in_parts(monkeypatch):
    """Joined on its device, the masters of an embedding take several times its FP32 size."""
    generator = torch.Generator().manual_seed(0)
    p, again = (torch.nn.Parameter(torch.randn(20, 130, generator=generator).bfloat16()) for _ in range(2))
    optimizer = MegatronAdamW([p, again], use_decoupled_grad=True, min_numel=0)
    for x in (p, again):
        x.decoupled_grad = torch.randn(x.shape, generator=generator)
    optimizer.step()
    # Megatron frees the gradients that it has a reference to
    assert p.grad is None and again.grad is None
    monkeypatch.setattr("coat_kernels.codecs.codec.AT_ONCE", 256)
    monkeypatch.setattr("coat_ds.optim.moment.AT_ONCE", 256)
    whole = join_master(p, optimizer.state[p]["remainder"])
    # whatever the default dtype of the model's construction
    with default_dtype(torch.bfloat16), Made() as made:
        tensors = optimizer.tensors_of(p)
    assert made.over(512) == {torch.float32: 3} and torch.equal(tensors["param"], whole)
    with Made() as made:
        optimizer.take_tensors(again, optimizer.param_groups[0], tensors)
    assert made.over(512) == {torch.uint8: 1, torch.int8: 1}
    for name, value in optimizer.tensors_of(again).items():
        assert torch.equal(value, tensors[name])
    assert torch.equal(again, p)
    # a write to the second moment keeps the first moment's value, although it is stored relative to the
    # second
    state = optimizer.state[again]
    state["exp_avg_sq"].mul_(4)
    assert rel_rms(state["exp_avg"].decode(), tensors["exp_avg"]) < 0.05


def two_parameters(**options):
    """An optimizer of two BF16 parameters, each in its own group; the first parameter has made two steps."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(16, 128).bfloat16()) for _ in range(2)]
    groups = [{"params": [p]} for p in params]
    optimizer = MegatronAdamW(groups, use_decoupled_grad=True, min_numel=0, **options)
    placed = [(i, p, Fragment(0, p.numel(), 0, False, p)) for i, p in enumerate(params)]
    optimizer.link(placed, distributed=True)
    for _ in range(2):
        params[0].decoupled_grad = torch.randn(params[0].shape)
        assert optimizer.step(lambda: 3.0) == 3.0
    return optimizer, *params


def test_megatron_adamw_tensors_are_fp32():
    optimizer, p, _ = two_parameters(bf16_params="stochastic")
    tensors = optimizer.tensors_of(p)
    assert "remainder" not in optimizer.state[p]
    assert {(t.dtype, t.device.type) for t in tensors.values()} == {(torch.float32, "cpu")}
    again, q, _ = two_parameters(bf16_params="stochastic")
    with torch.no_grad():
        q.zero_()
    again.take_tensors(q, again.param_groups[0], tensors)
    assert q.equal(p)


def test_megatron_adamw_counts_steps_as_fused_adam():
    """The step count of a group whose parameters have made different numbers of steps."""
    p, q = (torch.nn.Parameter(torch.ones(16, 128)) for _ in range(2))
    optimizer = MegatronAdamW([p, q], counts_in_groups=True, min_numel=0)
    optimizer.link([(0, x, Fragment(0, x.numel(), 0, False)) for x in (p, q)], distributed=True)
    for _ in range(2):
        p.grad = torch.randn(p.shape)
        optimizer.step()
    before = optimizer.state[p]["exp_avg"].decode()
    packed = optimizer.state_dict()
    # FusedAdam reads both
    assert packed["param_groups"][0]["step"] == 2 and packed["param_groups"][0]["bias_correction"] is True
    # Megatron does this before it reads a checkpoint
    optimizer.load_state_dict(packed)
    assert [optimizer.state[x]["step"] for x in (p, q)] == [2, 2]
    assert optimizer.state[p]["exp_avg"].decode().equal(before)
