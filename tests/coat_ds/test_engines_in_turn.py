"""Several engines of one model in a process: the model is what the last of them has made of it."""

import functools
import inspect

import pytest
import torch

import coat_ds
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.zero.recompute import compress_inputs, stop_compressing_inputs
from tests.coat_ds.engines import engine_of
from tests.util import run_distributed

COMPRESSES = {"fp8_activation_checkpointing": True}


def model():
    nn = torch.nn
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def made(net) -> tuple[int, bool]:
    """How many forwards are exchanged, and whether a forward keeps inputs of regions in FP8."""
    compresses = "forward" in vars(net) and converted_forward(net) is None
    return sum(converted_forward(m) is not None for m in net.modules()), compresses


def step(engine) -> None:
    engine.backward(engine(torch.ones(1, 32, dtype=torch.bfloat16)).float().square().mean())
    engine.step()


def in_turn(stage):
    """What the model is after each step of its life."""
    net, found = model(), []
    first = engine_of(net, stage, COMPRESSES)
    step(first)
    found.append(made(net))
    second = engine_of(net, stage)
    found.append(made(net))
    first.destroy()
    found.append(made(net))
    step(second)
    second.destroy()
    found.append(made(net))
    second.destroy()
    return [*found, made(net)]


def told_by_the_script():
    """A model that the script has converted stays converted; of the engines each has its own inputs."""
    net, found = coat_ds.convert(model().bfloat16()), []
    engines = [engine_of(net), engine_of(net, block=COMPRESSES)]
    for engine in engines:
        engine.destroy()
        found.append(made(net))
    return found


def failed():
    """What is left of an engine that could not be built."""
    net, found = model(), []
    for kind in (OSError, KeyboardInterrupt):

        def fails(parameters, kind=kind):
            raise kind("no room")

        with pytest.raises(kind, match="no room"):
            engine_of(net, given={"optimizer": fails, "model_parameters": net.parameters()}, optimizer=None)
        found.append(made(net))
    # and the way on is not barred
    engine = engine_of(net)
    found.append(made(net))
    engine.destroy()
    return [*found, made(net)]


def failed_units():
    """What a layer is to ZeRO-3 that was to be a unit of an engine that could not be built."""

    def fails(parameters):
        raise OSError("no room")

    layer = Unit(*model())
    with pytest.raises(OSError, match="no room"):
        engine_of(
            layer, 3, given={"optimizer": fails, "model_parameters": layer.parameters()}, optimizer=None
        )
    return layer.zero3_unit, layer._z3_leaf


def refused():
    """The linear layers are too small, the norm is converted, and "require" asks for the former."""
    nn = torch.nn
    net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    with pytest.raises(coat_ds.CoatConfigError, match="require"):
        engine_of(net, block={"require": True})
    return made(net)


class Unit(torch.nn.Sequential):
    zero3_unit = False


def units():
    """What a layer is to ZeRO-3 while engines gather it whole, in turn, and afterwards."""
    layer, found = Unit(*model()), []

    def look():
        leaf = getattr(layer, "_z3_leaf", False)
        external = len(getattr(layer, "_external_params", ()))
        found.append((layer.zero3_unit, leaf, external, len(layer._forward_pre_hooks)))

    engine = engine_of(torch.nn.Sequential(layer), 3)
    step(engine)
    look()
    other = engine_of(engine.module, 3)
    look()
    engine.destroy()
    look()
    step(other)
    said = [str(other.coat)]
    other.destroy()
    look()
    return found, [*said, str(other.coat)]


def work():
    import deepspeed

    deepspeed.init_distributed("gloo")
    coat_ds.install()
    found = {f"stage {stage}": in_turn(stage) for stage in (0, 2)}
    return found | {
        "script": told_by_the_script(),
        "failed": failed(),
        "failed units": failed_units(),
        "refused": refused(),
        "units": units(),
    }


@pytest.fixture(scope="module")
def found():
    return run_distributed(work, 1)[0]


@pytest.mark.parametrize("stage", [0, 2])
def test_last_engine_of_a_model_decides_its_layers(found, stage):
    compressing, converted, stock = (3, True), (3, False), (0, False)
    assert found[f"stage {stage}"] == [compressing, converted, converted, stock, stock]


def test_engine_keeps_layers_that_the_script_converted(found):
    assert found["script"] == [(3, True), (3, False)]


def test_engine_that_fails_leaves_the_model_unchanged(found):
    assert found["failed"] == [(0, False), (0, False), (3, False), (0, False)]
    assert found["failed units"] == (False, False)
    assert found["refused"] == (0, False)


def test_zero3_units_end_with_their_engine(found):
    (*during, after), said = found["units"]
    for unit in during:
        # three modules' weights and biases; the hook is one of several
        assert unit[:3] == (True, False, 6) and unit[3]
    assert after == (False, False, 0, 0)
    assert ["ZeRO-3 gathers 1 of 1 layers whole" in line for line in said] == [True, False]


def test_stop_compressing_inputs_leaves_other_forwards_alone():
    net = model()
    for own in (lambda x: x, functools.partial(torch.add, 1)):
        net.forward = own
        stop_compressing_inputs(net)
        assert net.forward is own


def test_compress_inputs_keeps_the_signature():
    """Hugging Face's Trainer leaves out columns that it does not name."""
    net = model()
    own = inspect.signature(net.forward)
    compress_inputs(net)
    assert inspect.signature(net.forward) == own and list(own.parameters) == ["input"]
