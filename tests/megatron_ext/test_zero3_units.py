"""Layers as units of ZeRO-3, in 2 and 4 processes: the losses, gradients and saved bytes of ZeRO-1."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from coat_ds.config import ActivationsConfig
from coat_ds.zero.layer_units import LayerUnits
from tests.families import FAMILIES
from tests.hosts import TEST_ALL
from tests.megatron_ext.layers import loss_of
from tests.megatron_ext.test_hybrid import EXPERTS, _hybrid
from tests.util import run_distributed

pytestmark = pytest.mark.early

S, B, VOCAB, LAYERS = 32, 2, 64, 2
# of these models, only norms stay gathered
GATHERED = {"stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 0}
ONE_FOR_ALL = {
    **{**EXPERTS, "moe_layer_freq": [0, 1]},
    **{"moe_router_topk": 1, "moe_router_pre_softmax": True},
}
GROUPED = ONE_FOR_ALL | {"moe_grouped_gemm": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _gpt(coat: bool = True, tied: bool = False, layers: int = LAYERS, **config) -> nn.Module:
    from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
    from megatron_ext.model import ModelShape, build_gpt

    spec = coat_layer_spec if coat else sdpa_layer_spec
    shape = ModelShape(layers, 64, 128, 4, 2, untie_embeddings_and_output_weights=not tied)
    return build_gpt(shape, spec, seq_length=S, vocab_size=VOCAB, **config)


def _stack() -> nn.Module:
    from megatron_ext.hybrid_specs import coat_hybrid_stack_spec

    return _hybrid("*-*E", _gpt(**EXPERTS), coat_hybrid_stack_spec)


class Checkpointed(nn.Module):
    """A layer that is called within `checkpoint(function, x)`."""

    def __init__(self, layer, checkpoint):
        super().__init__()
        self.layer, self.checkpoint = layer, checkpoint

    def forward(self, hidden_states, **kwargs):
        return self.checkpoint(lambda x: self.layer(hidden_states=x, **kwargs)[0], hidden_states), None


def _checkpointed(checkpoint) -> nn.Module:
    model = _gpt()
    for i, layer in enumerate(model.decoder.layers):
        model.decoder.layers[i] = Checkpointed(layer, checkpoint)
    return model


def _by_torch(function, x, use_reentrant=True):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, x, use_reentrant=use_reentrant)


def _by_deepspeed(function, x):
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

    return checkpoint(function, x)


def _freeze(model: nn.Module, part: str, trains: bool = False) -> nn.Module:
    model.get_submodule(part).requires_grad_(trains)
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCAB, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)).bfloat16()


def _tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randint(0, VOCAB, (B, S), generator=generator)


def _once(engine, step: int) -> torch.Tensor:
    return loss_of(engine, _tokens(step))


def _twice(engine, step: int) -> torch.Tensor:
    return loss_of(engine, _tokens(step)) + loss_of(engine, _tokens(step + 7))


def _one_token(engine, step: int) -> torch.Tensor:
    """Equal tokens go to the same expert; each rank has another token."""
    return loss_of(engine, torch.full((B, S), 7 + 5 * dist.get_rank()))


def _by_keyword(engine, step: int) -> torch.Tensor:
    tokens = _tokens(step).to(engine.device)
    return engine(input_ids=tokens, labels=tokens).loss


def _evaluate(engine, step: int) -> None:
    """Forward passes without a backward pass."""
    engine.eval()
    with torch.no_grad():
        _once(engine, 20)
    _once(engine, 21)
    engine.train()
    _once(engine, 22)


def _freeze_and_back(engine, step: int) -> None:
    for part in ("embedding", "decoder.layers.0.self_attention", "decoder.layers.1.mlp.linear_fc1"):
        _freeze(engine.module, part, trains=step == 1)


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    loss: Callable = _once
    units: int = LAYERS
    zero: dict = {}
    config: dict = {}
    coat: dict = {}
    after: Callable = lambda engine, step: None
    """Called behind each step."""
    wanted: bool | None = None
    base: int = 1
    """Stage of the engine to compare with; 3, without units, where stage 1 rounds otherwise."""
    steps: int = 2


COMPRESS = {"fp8_activation_checkpointing": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES = {
    "sqrt8": Case(lambda: _gpt(activations=ActivationsConfig(attention_format="sqrt8"))),
    "module by module": Case(_gpt, units=0, wanted=False),
    "8-bit attention, module by module": Case(
        lambda: _gpt(activations=ActivationsConfig(attention_format="sqrt8")), units=0, wanted=False
    ),
    "small buckets": Case(
        _gpt, zero={"reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 30000, "sub_group_size": 9000}
    ),
    "accumulation": Case(
        _gpt, base=3, steps=4, config={"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    ),
    "full recompute": Case(lambda: _gpt(**FULL), coat=COMPRESS),
    "reentrant": Case(lambda: _checkpointed(_by_torch), coat=COMPRESS),
    # the recompute ends within the layer, before DeepSpeed's hook that releases its weights
    "not reentrant": Case(lambda: _checkpointed(partial(_by_torch, use_reentrant=False)), coat=COMPRESS),
    "DeepSpeed's checkpoint": Case(lambda: _checkpointed(_by_deepspeed), coat=COMPRESS),
    "two forwards": Case(_gpt, _twice),
    "evaluation, tied": Case(lambda: _gpt(tied=True), after=_evaluate),
    "experts": Case(lambda: _gpt(**ONE_FOR_ALL), _one_token),
    "grouped experts": Case(lambda: _gpt(**GROUPED), _one_token),
    "hybrid": Case(_stack, units=4),
    "frozen part": Case(lambda: _freeze(_gpt(), "decoder.layers.0.mlp.linear_fc1"), units=1),
    # at stage 1 the border between ranks cuts a group of the moments
    "frozen later": Case(_gpt, after=_freeze_and_back, steps=4, base=3),
    "offload": Case(_gpt, zero=OFFLOAD, base=3),
    "secondary partitions": Case(_gpt, zero={"zero_hpz_partition_size": 2}),
    "Megatron's": Case(lambda: _gpt(False), wanted=True),
    "Hugging Face's, converted": Case(_llama, _by_keyword),
    "Qwen3-MoE of 24 experts, converted": Case(FAMILIES["qwen3_moe_grouped"].build, _by_keyword),
}  # fmt: skip
FOUR_RANKS = ["small buckets"]
# other cases have their kinds of layers, of attention and of recompute, or their buckets on four ranks
LEFT_OUT = (
    "reentrant",
    "experts",
    "secondary partitions",
    "8-bit attention, module by module",
    *FOUR_RANKS,
)
TWO_RANKS = [name for name in CASES if TEST_ALL or name not in LEFT_OUT]


def _engine(case: Case, stage: int, wanted: str | bool):
    import deepspeed

    from megatron_ext import mpu

    torch.manual_seed(0)
    model = case.build()
    config = {
        "train_micro_batch_size_per_gpu": B,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(GATHERED | case.zero if stage == 3 else {})},
        "coat": {"enabled": True, "zero3_layer_units": wanted} | case.coat,
        **case.config,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, mpu=mpu, config=config)[0]


def _step(engine, case: Case, step: int) -> tuple[float, int]:
    """The loss, and the bytes that the whole model saves for backward."""
    kept, parameters = {}, list(engine.module.parameters())

    def pack(x):
        # weights and their aliases do not count as saved: ZeRO-3 releases them
        weights = {p.untyped_storage().data_ptr() for p in parameters}
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x if x.is_leaf else x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = case.loss(engine, step)
    engine.backward(loss)
    return loss.item(), sum(storage.nbytes() for storage in kept.values())


def _train(case: Case, stage: int, wanted: str | bool) -> dict:
    from deepspeed.utils import safe_get_full_grad

    said = []
    with mock.patch("coat_ds.zero.engine.log_rank_0", lambda text, level=None: said.append(text)):
        engine = _engine(case, stage, wanted)
    found = {"losses": [], "kept": [], "grads": None, "said": "\n".join(said)}
    for step in range(case.steps):
        loss, kept = _step(engine, case, step)
        if found["grads"] is None and engine.is_gradient_accumulation_boundary():
            grads = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad}
            found["grads"] = {name: grad.float().clone() for name, grad in grads.items()}
        engine.step()
        case.after(engine, step)
        found["losses"].append(loss)
        found["kept"].append(kept)
    found["units"] = sum(getattr(module, "zero3_unit", False) for module in engine.module.modules())
    engine.destroy()
    found["units left"] = sum(getattr(module, "zero3_unit", False) for module in engine.module.modules())
    return found


def _start(backend: str) -> None:
    import deepspeed

    from megatron_ext import cpu, mpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    deepspeed.init_distributed(backend)
    initialize_model_parallel()
    deepspeed.checkpointing.configure(mpu)


def _gathered() -> dict[str, list[str]]:
    """Names of the parameters of a deep model that are gathered while its fifth layer runs."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    case = Case(lambda: _gpt(layers=8), zero={"stage3_max_reuse_distance": 30000})
    engine, found = _engine(case, 3, None), {}

    def look(when):
        named = engine.module.named_parameters()
        gathered = [name for name, p in named if p.ds_status == ZeroParamStatus.AVAILABLE]
        found[when] = [name for name in gathered if "norm" not in name]

    def behind(module, args, output):
        look("forward")
        output[0].register_hook(lambda _: look("backward"))

    engine.module.decoder.layers[4].mlp.register_forward_hook(behind)
    for step in range(3):
        _step(engine, case, step)
        engine.step()
    engine.destroy()
    return found


def _resumed(folder: str) -> list[list[float]]:
    """Losses of two steps after two saved steps: with units on, off, on."""
    out = []
    for saved in (True, False):
        engine = _engine(CASES["sqrt8"], 3, None if saved else False)
        for step in range(2):
            _step(engine, CASES["sqrt8"], step)
            engine.step()
        engine.save_checkpoint(folder, tag=str(saved))
        engines = [engine, _engine(CASES["sqrt8"], 3, False if saved else None)]
        engines[1].load_checkpoint(folder, tag=str(saved))
        for engine in engines:
            out.append([])
            for step in (2, 3):
                out[-1].append(_step(engine, CASES["sqrt8"], step)[0])
                engine.step()
            engine.destroy()
    return out


def work(backend: str, names: list[str], base: int | None, folder: str) -> dict:
    _start(backend)
    out = {}
    for name in names:
        case = CASES[name]
        out[name] = _train(case, 3, case.wanted), _train(case, base or case.base, False)
    if base is None:
        out |= {"gathered": _gathered(), "resumed": _resumed(folder)}
    return out


def check(name: str, units: dict, base: dict) -> None:
    assert units["losses"] == base["losses"]
    assert len(set(units["losses"])) == CASES[name].steps
    assert units["kept"] == base["kept"]
    assert units["grads"].keys() == base["grads"].keys()
    for parameter, grad in base["grads"].items():
        assert grad.equal(units["grads"][parameter]), parameter
    assert units["units"] == CASES[name].units and base["units"] == units["units left"] == 0


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_distributed(work, 2, "gloo", TWO_RANKS, None, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.fixture(scope="module")
def four():
    # BF16 sums of four ranks: stage 1 adds them in another order
    return run_distributed(work, 4, "gloo", FOUR_RANKS, 3, "")


@pytest.mark.parametrize("name", TWO_RANKS)
def test_layer_units_compute_what_stage_1_computes(two, name):
    """Equal to the bit: BF16 sums of two ranks have one order, and the mean of two is exact."""
    for rank in two:
        check(name, *rank[name])


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_layer_units_on_four_ranks(four, name):
    for rank in four:
        check(name, *rank[name])


def test_layer_units_in_the_log(two):
    said = {name: two[0][name][0]["said"] for name in TWO_RANKS}
    assert "ZeRO-3 gathers 2 of 2 layers whole" in said["sqrt8"]
    assert "module by module" not in said["sqrt8"]
    assert (
        "ZeRO-3 gathers 1 of 2 layers whole; module by module 1 (decoder.layers.0): frozen parameters"
        in said["frozen part"]
    )
    without = two[0]["accumulation"][1]["said"]
    assert "0 of 2 layers whole; module by module 2" in without
    assert "coat.zero3_layer_units is false" in without


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_layer_units_are_gathered_whole_and_released(two, when):
    """Embeddings too, which their own backward needs last."""
    parts = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    for rank in two:
        assert set(rank["gathered"][when]) == {f"decoder.layers.4.{part}.weight" for part in parts}


def test_layer_units_exchange_checkpoints_with_modules(two):
    for rank in two:
        assert all(losses == rank["resumed"][0] for losses in rank["resumed"][1:])


class _Layer(nn.Linear):
    zero3_unit = False

    def __init__(self):
        super().__init__(4, 4)


def test_layer_units_set_the_prefetch_bucket_size():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    class Layer(nn.Linear):
        zero3_unit = False

    model = nn.Sequential(Layer(8192, 8192, device="meta"), Layer(8, 8, device="meta"))
    for given, size in (
        ({}, 8192 * 8193),
        ({"stage3_prefetch_bucket_size": "auto"}, 8192 * 8193),
        ({"stage3_prefetch_bucket_size": 1000}, 1000),
    ):
        zero = DeepSpeedZeroConfig(stage=3, **given)
        with LayerUnits(model, None, zero).building():
            assert zero.prefetch_bucket_size == size
    zero, default = DeepSpeedZeroConfig(stage=3), DeepSpeedZeroConfig().prefetch_bucket_size
    with LayerUnits(model[1:], None, zero).building():
        assert zero.prefetch_bucket_size == default


def test_layer_units_of_megatrons_own_layers(megatron):
    model, zero = _gpt(False), SimpleNamespace(stage=3)
    layers = {f"decoder.layers.{i}" for i in range(LAYERS)}
    assert set(LayerUnits(model, True, zero).chosen) == layers
    units = LayerUnits(model, None, zero)
    assert not units.chosen and units.summary() is None


def test_layer_units_leave_out_shared_and_nested_modules():
    shared, plain, outer, empty = _Layer(), _Layer(), nn.Sequential(_Layer()), nn.Identity()
    # nothing to gather
    empty.zero3_unit = False
    model = nn.ModuleDict({"a": shared, "b": plain, "c": outer, "d": empty, "head": nn.Linear(4, 4)})
    model["head"].weight = shared.weight
    zero = SimpleNamespace(stage=3)
    units = LayerUnits(model, None, zero)
    assert set(units.chosen) == {"b", "c.0"}
    # no engine was built, so both count as inside of a leaf module of DeepSpeed
    units.complete(None)
    assert units.summary() == (
        "ZeRO-3 gathers 0 of 3 layers whole; module by module 1 (a): parameters shared with another module; "
        "module by module 2 (b, c.0): inside of a leaf_module of the config"
    )
    assert LayerUnits(model, True, SimpleNamespace(stage=2)).summary() is None
    assert not plain.zero3_unit
    # units do not nest; the model itself may be the outer unit
    whole = _Layer()
    whole.inner = _Layer()
    assert set(LayerUnits(whole, None, zero).chosen) == {""}
