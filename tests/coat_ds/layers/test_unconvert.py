"""When unconvert leaves a model as it is: what others put over COAT's forwards later on is theirs to undo."""

import types

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import coat_ds
from coat_ds.layers.modules.replaced import replaced
from tests.coat_ds.layers.parts import plain, rewritten


@pytest.mark.parametrize("name", ["up", "norm", "act"])
def test_unconvert_does_not_undo_what_others_did_later(name):
    model = coat_ds.convert(plain())
    module = getattr(model[0], name)
    module.forward = types.MethodType(rewritten, module)
    with pytest.raises(RuntimeError, match=rf"unconvert: 0\.{name}: .*Undo what replaced it first"):
        coat_ds.unconvert(model)
    assert replaced(model[0].down) and coat_ds.conversion_of(model)


@pytest.mark.parametrize("wrap", ["checkpoint", "adapter"])
def test_unconvert_looks_into_what_was_put_around_a_module(wrap):
    model = coat_ds.convert(plain())
    up = model[0].up
    if wrap == "checkpoint":
        model[0].up = checkpoint_wrapper(up)
    else:
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(r=16, target_modules=["up"]), model)
    assert model[0].up is not up
    up.forward = types.MethodType(rewritten, up)
    with pytest.raises(RuntimeError, match=r"unconvert: 0\.up: .*Undo what replaced it first"):
        coat_ds.unconvert(model)
