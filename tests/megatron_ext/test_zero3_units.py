"""Layers as units of ZeRO-3, in 2 and 4 processes: the losses, gradients and saved bytes of ZeRO-1."""

from types import SimpleNamespace

import pytest
from torch import nn

from coat_ds.zero.layer_units import LayerUnits
from tests.hosts import TEST_ALL
from tests.megatron_ext.units import CASES, LAYERS, Case, engine_of, forward_backward, gpt, start, train
from tests.util import run_distributed

pytestmark = pytest.mark.early

FOUR_RANKS = ["small buckets"]
# other cases have their kinds of layers, of attention and of recompute
LEFT_OUT = (
    "reentrant",
    "experts",
    "Megatron's",
    "secondary partitions",
    "8-bit attention, module by module",
    "module by module",
    "DeepSpeed's checkpoint",
    "two forwards",
    "Qwen3-MoE of 24 experts, converted",
)
TWO_RANKS = [name for name in CASES if TEST_ALL or name not in LEFT_OUT]


def _gathered() -> dict[str, list[str]]:
    """Names of the parameters of a deep model that are gathered while its fifth layer runs."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    case = Case(lambda: gpt(layers=8), zero={"stage3_max_reuse_distance": 30000})
    engine, found = engine_of(case, 3, None), {}

    def look(when):
        named = engine.module.named_parameters()
        gathered = [name for name, p in named if p.ds_status == ZeroParamStatus.AVAILABLE]
        found[when] = [name for name in gathered if "norm" not in name]

    def behind(module, args, output):
        look("forward")
        output[0].register_hook(lambda _: look("backward"))

    engine.module.decoder.layers[4].mlp.register_forward_hook(behind)
    for step in range(3):
        forward_backward(engine, case, step)
        engine.step()
    engine.destroy()
    return found


def _resumed(folder: str) -> list[list[float]]:
    """Losses of two steps after two saved steps: with units on, off, on."""
    out = []
    for saved in (True, False):
        engine = engine_of(CASES["sqrt8"], 3, None if saved else False)
        for step in range(2):
            forward_backward(engine, CASES["sqrt8"], step)
            engine.step()
        engine.save_checkpoint(folder, tag=str(saved))
        engines = [engine, engine_of(CASES["sqrt8"], 3, False if saved else None)]
        engines[1].load_checkpoint(folder, tag=str(saved))
        for engine in engines:
            out.append([])
            for step in (2, 3):
                out[-1].append(forward_backward(engine, CASES["sqrt8"], step)[0])
                engine.step()
            engine.destroy()
    return out


def work(backend: str, names: list[str], base: int | None, folder: str) -> dict:
    start(backend)
    out = {}
    for name in names:
        case = CASES[name]
        out[name] = train(case, 3, case.wanted), train(case, base or case.base, False)
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


@pytest.mark.long("four ranks; two ranks have the same case")
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
    model, zero = gpt(False), SimpleNamespace(stage=3)
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
