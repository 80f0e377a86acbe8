"""Options for users of Megatron's own scripts, and the log lines and errors about them."""

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.spec_utils import import_module

from coat_ds.config import ActivationsConfig, CoatConfig, CoatConfigError
from megatron_ext import options
from tests.util import run_distributed


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes the file that COAT_CONFIG names."""

    def write(content):
        path = tmp_path / "coat.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv("COAT_CONFIG", str(path))
        return path

    monkeypatch.delenv("COAT_CONFIG", raising=False)
    return write


def test_coat_config_reads_the_block_of_deepspeed(file):
    block = {"enabled": True, "activations": {"saved_format": "e4m3"}, "optimizer": {"min_numel": 64}}
    file({"coat": block})
    assert options.coat_config() == CoatConfig.from_dict(block)


@pytest.mark.parametrize(
    "content, said",
    [
        ([], "expected a JSON object, found list"),
        ("[" * 100_000, "not a JSON file"),
        ({"coat": {"enabled": True, "activations": {"group_size": 32}}}, "coat.activations.group_size"),
        ({"coat": {"enabled": False}}, "coat.enabled: expected true"),
        ({"coat": {"enabled": True, "report": True}}, "coat.report: found True, but the key was removed"),
        (
            {"coat": {"enabled": True, "optimizer": {"checkpoint_layout": "compressed"}}},
            'coat.optimizer.checkpoint_layout: expected "stock"',
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_coat_config_errors_name_file_and_key(file, content, said):
    """More common mistakes: tests/test_mistakes.py."""
    path = file(content)
    with pytest.raises(CoatConfigError) as error:
        options.coat_config()
    assert f"COAT_CONFIG={path}: " in str(error.value) and said in str(error.value)


# a block, and whether layers are FP8, states have 8 bits and inputs of recompute are FP8
FEATURES = {
    "no file": (None, (True, True, False)),
    "defaults": ({}, (True, True, False)),
    "layers": (
        {"activations": {"saved_format": "e4m3"}, "optimizer": {"enabled": False}},
        (True, False, False),
    ),
    "states": ({"activations": False}, (False, True, False)),
    "everything": ({"fp8_activation_checkpointing": True}, (True, True, True)),
    "nothing": ({"activations": False, "optimizer": {"enabled": False}}, (False, False, False)),
}


def _import_specs(folder):
    """For each block: what the import of the spec installs, logs and gives to layers. Without
    it layers refuse the file."""
    from coat_ds import log
    from megatron_ext import hybrid_specs, layer_specs
    from megatron_ext.layers import recompute
    from megatron_ext.optimizer import patches

    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.logger.addHandler(handler)
    path, found = Path(folder, "coat.json"), {}
    for case, (block, _) in FEATURES.items():
        os.environ.pop("COAT_CONFIG", None)
        if block is not None:
            path.write_text(json.dumps({"coat": {"enabled": True, **block}}))
            os.environ["COAT_CONFIG"] = str(path)
        sys.modules.pop("megatron_ext.spec", None)
        if block is not None:
            with pytest.raises(CoatConfigError, match="Take coat_layer_spec from megatron_ext.spec"):
                options.check_unread()
        lines.clear(), log.forget_logged()
        # as Megatron does
        made = [
            import_module(["megatron_ext.spec", f"coat_{kind}_spec"]) for kind in ("layer", "hybrid_stack")
        ]
        fp8 = made != [layer_specs.sdpa_layer_spec, hybrid_specs.sdpa_hybrid_stack_spec]
        params = [made[0].params, made[1].submodules.attention_layer.params]
        given = [(each.get("activations"), each.get("source")) for each in params]
        found[case] = (fp8, patches.installed(), recompute.CHECKPOINT.is_applied()), list(lines), given
        patches.uninstall(), recompute.CHECKPOINT.remove()
    return found


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    # importing a spec has effects: in another process
    return run_distributed(_import_specs, 1, str(tmp_path_factory.mktemp("specs")))[0]


@pytest.mark.parametrize("case", FEATURES)
def test_spec_installs_what_the_block_enables(imported, case):
    block, wanted = FEATURES[case]
    installed, (line,), given = imported[case]
    assert installed == wanted
    layers, states, inputs = ("on" if on else "off" for on in wanted)
    assert f"FP8 layers {layers}, 8-bit optimizer states {states}, FP8 inputs of recompute {inputs}" in line
    assert ("defaults: COAT_CONFIG is not set" if block is None else "coat.json") in line
    activations = CoatConfig.from_dict({"enabled": True, **(block or {})}).activations
    settings = {activation for activation, _ in given}
    assert settings == ({activations} if activations.enabled else {None})
    assert not activations.enabled or all(bool(source) == (block is not None) for _, source in given)


def _precision(content, **matchers):
    from megatron.core.quantization.quant_config import RecipeConfig

    entries = {
        key: {"type": "glob", "pattern": pattern, "config": key, "enabled": True}
        for key, pattern in matchers.items()
    }
    return RecipeConfig.from_config_dict({"configs": content, "matchers": entries})


def test_precision_file_sets_options_of_single_layers(megatron):
    from megatron_ext.layer_specs import coat_layer_spec
    from megatron_ext.model import ModelShape, build_gpt

    recipe = _precision(
        {"plain": {"coat": {"enabled": False}}, "wide": {"coat": {"backward_format": "e4m3"}}},
        plain="*layers.0.mlp*",
        wide="*linear_fc2",
    )
    model = build_gpt(
        ModelShape(2, 32, 48, 2, 2), coat_layer_spec, seq_length=16, vocab_size=16, quant_recipe=recipe
    )
    first, second = model.decoder.layers
    in_fp8 = [first.mlp.linear_fc1._in_fp8, first.mlp.linear_fc2._in_fp8, second.mlp.linear_fc2._in_fp8]
    assert in_fp8 == [False, False, True]
    assert first.mlp.linear_fc1.coat_part().why == "--te-precision-config-file"
    assert second.mlp.linear_fc2._gemm.formats.backward.name == "e4m3"
    assert second.mlp.linear_fc1._gemm.formats.backward.name == "e5m2"
    # the layers next to a layer in BF16 pass it its input
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 16, dtype=torch.long, device=device)
    model(tokens, torch.arange(16, device=device)[None], None, labels=tokens).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_precision_file_leaves_other_options():
    base = ActivationsConfig(saved_format="e4m3", evaluation="stock")
    wanted = {"enabled": False, "backward_format": "e4m3", "weight_cache": "fp8", "fast_accumulation": "none"}
    place = SimpleNamespace(module_path="decoder.layers.0.mlp.linear_fc1")
    found = SimpleNamespace(config={"coat": wanted}, config_key="mine", match_input=place)
    assert options.layer_activations(found, base) == dataclasses.replace(base, **wanted)


@pytest.mark.parametrize(
    "block, said",
    [
        ({"saved_format": "e4m3"}, "found 'saved_format', expected an object with keys among enabled"),
        ("e4m3", "found 'e4m3', expected an object"),
        ({"backward_format": "e3m4"}, "coat.activations.backward_format"),
    ],
    ids=["key", "no-object", "value"],
)
def test_precision_file_errors_name_layer_and_key(block, said):
    place = SimpleNamespace(module_path="decoder.layers.0.mlp.linear_fc1")
    found = SimpleNamespace(config={"coat": block}, config_key="mine", match_input=place)
    with pytest.raises(CoatConfigError) as error:
        options.layer_activations(found, ActivationsConfig())
    assert f"configs.mine.coat, for {place.module_path}" in str(error.value) and said in str(error.value)


def test_precision_file_with_other_blocks_changes_nothing():
    found = SimpleNamespace(config={"kitchen_config_type": "QLinearParams"}, config_key="x", match_input=None)
    base = ActivationsConfig()
    assert options.layer_activations(found, base) is base and options.layer_activations(None, base) is base
