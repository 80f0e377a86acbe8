"""What the project exchanges in frameworks: found, checked, undone, against the real packages."""

import copy
import importlib.util
import logging

import deepspeed
import pytest
import torch

from coat_ds import cli, patches
from coat_ds.patches import RECORDS, Patch, PatchError, _declared
from tests.coat_ds.engines import STATES, adamw, engine_of
from tests.util import run_distributed

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
NORM = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_grad_norm_direct"


@pytest.fixture
def declare():
    """Makes patches that are in no table when the test is over, nor in place."""
    before = dict(_declared)

    def make(target, **options):
        return Patch("test", target, "for the test", **options)

    yield make
    for key in _declared.keys() - before.keys():
        _declared.pop(key).remove()


class Other:
    def extra_repr(self, more):
        return more


def doubling(original):
    return lambda *args: 2 * original(*args)


beside_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron is not installed"
)


@beside_megatron
def test_patches_fit_the_installed_frameworks():
    rows = patches.table()
    assert len({(row.name, row.target) for row in rows}) == len(rows) > 50
    for row in rows:
        assert row.target and "expected" not in row.why and "cannot be imported" not in row.why, row


@beside_megatron
def test_patches_are_listed_by_the_command(capsys):
    assert cli.main(["patches"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["patch", "of", "framework", "applied", "why"]
    assert any(line.startswith("switch") and "DeepSpeedEngine.__init__" in line for line in lines)
    assert any("megatron.core.optimizer.Adam" in line for line in lines)


def test_patch_is_applied_once_and_removed(declare, caplog):
    from deepspeed.runtime import utils

    original = utils.ensure_directory_exists
    patch = declare("deepspeed.runtime.utils:ensure_directory_exists", parameters=("filename",))
    with caplog.at_level(logging.DEBUG, "coat_ds"):
        for _ in range(2):
            assert patch.apply(lambda found: lambda filename: found)
            assert not patch.apply(lambda found: None), "made a second time"
            assert patch.is_applied() and patch.original() is original
            assert utils.ensure_directory_exists("") is original
            assert any(r.applied for r in patches.table() if r.name == "test")
            assert patch.remove() and not patch.remove()
            assert utils.ensure_directory_exists is original and not patch.is_applied()
    (record,) = [r for r in caplog.records if r.name == "coat_ds"]
    said = record.getMessage()
    assert "deepspeed.runtime.utils.ensure_directory_exists" in said and "for the test" in said


@pytest.mark.parametrize(
    ("target", "options", "found"),
    [
        (NORM, {"parameters": ("gradients", "params")}, "(gradients, params, norm_type)"),
        (NORM, {"parameters": ("params", "...")}, "(gradients, params, norm_type)"),
        (NORM, {"parameters": ("...", "scale", "...")}, "(gradients, params, norm_type)"),
        (f"{ENGINE}.there_is_no_such_method", {}, "nothing"),
        ("deepspeed.runtime.engine:NoEngine.step", {}, "nothing"),
        (f"{ENGINE}.step", {"used_by": "split_half_float_double_sparse"}, "does not look it up"),
        (f"{ENGINE}.there_is_no_such_name", {"instance": True}, "does not use it"),
    ],
    ids=str,
)
def test_patch_refuses_an_unexpected_framework(declare, target, options, found):
    patch = declare(target, **options, remedy="or do without")
    with pytest.raises(PatchError) as error:
        patch.apply(lambda original: pytest.fail("made"))
    said = str(error.value)
    for part in (target.replace(":", "."), "expected", found, deepspeed.__version__, "or do without"):
        assert part in said, said
    assert not patch.is_applied() and (RuntimeError in type(error.value).__mro__)
    # the table says the same
    (row,) = (r for r in patches.table() if r.name == "test")
    assert row.why == said and not row.applied
    with pytest.raises(PatchError):
        patches.require(NORM, ("params",))
    assert len([r for r in patches.table() if r.target == NORM.replace(":", ".")]) <= 2


def test_patch_of_an_inherited_method_and_of_a_value(declare):
    from deepspeed.runtime.pipe.engine import PipelineEngine

    patch = declare("deepspeed.runtime.pipe.engine:PipelineEngine.zero_grad")
    assert "zero_grad" not in vars(PipelineEngine)
    with patch.applied(lambda original: lambda self: None):
        assert "zero_grad" in vars(PipelineEngine)
    assert "zero_grad" not in vars(PipelineEngine)
    switch, was = torch._dynamo.config, torch._dynamo.config.disable
    with declare("torch._dynamo.config:disable").applied(lambda was: not was):
        assert switch.disable is not was
    assert switch.disable is was


def test_patch_outlasts_a_context(declare):
    patch = declare("deepspeed.runtime.utils:ensure_directory_exists")
    patch.apply(doubling)
    with patch.applied(doubling):
        pass
    assert patch.is_applied()


def test_patch_under_another_one_is_not_removed(declare):
    import functools

    from deepspeed.runtime import utils

    patch = declare("deepspeed.runtime.utils:ensure_directory_exists")
    patch.apply(lambda original: functools.wraps(original)(lambda filename: original(filename)))
    ours = utils.ensure_directory_exists
    utils.ensure_directory_exists = functools.wraps(ours)(lambda filename: ours(filename))
    assert patch.is_applied() and not patch.apply(lambda original: None)
    with pytest.raises(RuntimeError, match="ensure_directory_exists: was exchanged again"):
        patch.remove()
    utils.ensure_directory_exists = ours
    assert patch.remove()
    # what has taken the place of ours altogether stays
    original = utils.ensure_directory_exists
    patch.apply(lambda original: lambda filename: None)
    utils.ensure_directory_exists = other = lambda filename: 1
    assert not patch.is_applied() and not patch.remove() and utils.ensure_directory_exists is other
    utils.ensure_directory_exists = original


def test_patch_of_an_object_and_its_copy(declare):
    patch = declare(f"{ENGINE}.extra_repr", parameters=())
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = set(vars(one))
    assert patch.apply(lambda original: lambda: "ours", on=one) and not patch.apply(None, on=one)
    assert one.extra_repr() == "ours" and other.extra_repr() != "ours"
    assert patch.is_applied(one) and not patch.is_applied(other) and not patch.is_applied()
    assert copy.deepcopy(one).extra_repr() == "ours" and patch.is_applied(copy.deepcopy(one))
    assert patch.remove(one)
    assert one.extra_repr() == other.extra_repr() and set(vars(one)) == before
    # what an object itself had comes back, and a patch does not keep its object
    one.extra_repr = mine = lambda: "mine"
    patch.apply(doubling, on=one)
    assert one.extra_repr() == "minemine" and patch.remove(one) and one.extra_repr is mine
    with pytest.raises(PatchError, match="expected"):
        patch.apply(doubling, on=Other())


def build():
    """One engine of stage 1: what is patched, and what is left when that is undone."""

    deepspeed.init_distributed("gloo")
    stock = engine_of(torch.nn.Linear(64, 64), coat=None, optimizer=adamw(1e-3))
    engine = engine_of(torch.nn.Linear(64, 64), block=STATES)
    found = sorted(p.attribute for on in (engine, engine.optimizer) for p in vars(on)[RECORDS])
    table = sorted({row.target for row in patches.table() if row.applied})
    for on in (engine, engine.optimizer):
        for patch in reversed(list(vars(on)[RECORDS])):
            patch.remove(on)
    same = [
        vars(on).get(name) is None
        for on, name in ((engine, "load_checkpoint"), (engine.optimizer, "get_grad_norm_direct"))
    ]
    left = RECORDS in vars(engine) or RECORDS in vars(engine.optimizer) or RECORDS in vars(stock)
    after = sorted({row.target for row in patches.table() if row.applied})
    return found, table, same, left, after


def test_patches_of_an_engine_are_its_own():
    found, table, same, left, after = run_distributed(build, 1)[0]
    assert {"destroy", "load_checkpoint", "save_checkpoint", "get_grad_norm_direct"} <= set(found)
    assert {"offload_states", "reload_states", "has_overflow_partitioned_grads_serial"} <= set(found)
    assert any(target.endswith("DeepSpeedZeroOptimizer.offload_states") for target in table)
    assert not any("stage3" in target for target in table)
    assert all(same) and not left and not any("DeepSpeedZero" in target for target in after)
