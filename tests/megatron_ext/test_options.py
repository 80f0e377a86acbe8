"""Options for users of Megatron's own scripts, and the log lines and errors about them."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from coat_ds.config import ActivationsConfig, CoatConfig, CoatConfigError
from megatron_ext import cpu, installing, options
from tests.megatron_ext.layers import build


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes the file that COAT_CONFIG names."""

    def write(content):
        path = tmp_path / "coat.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv("COAT_CONFIG", str(path))
        options._read.cache_clear()
        return path

    monkeypatch.delenv("COAT_CONFIG", raising=False)
    yield write
    options._read.cache_clear()


def test_defaults_without_a_file(file):
    assert options.coat_config() == CoatConfig(enabled=True)


def test_a_file_is_the_block_of_deepspeed(file):
    block = {"enabled": True, "activations": {"group_size": 32}, "optimizer": {"group_size": 64}}
    file({"coat": block})
    assert options.coat_config() == CoatConfig.from_dict(block)
    assert options.activations().group_size == 32


@pytest.mark.parametrize(
    "content, said",
    [
        ([], 'the key "coat" alone, found'),
        ("[" * 100_000, 'expected a JSON file with a "coat" block'),
        ({"coat": {"enabled": True, "activations": {"group_size": 7}}}, "coat.activations.group_size"),
        ({"coat": {"enabled": False}}, "coat.enabled: expected true"),
        ({"coat": {"enabled": True, "report": True}}, "coat.report: found True, but the key was removed"),
        (
            {"coat": {"enabled": True, "optimizer": {"checkpoint_layout": "compressed"}}},
            'coat.optimizer.checkpoint_layout: expected "stock"',
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_errors_name_file_and_key(file, content, said):
    """More common mistakes: tests/test_mistakes.py."""
    path = file(content)
    with pytest.raises(CoatConfigError) as error:
        options.coat_config()
    assert f"COAT_CONFIG={path}: " in str(error.value) and said in str(error.value)


def test_an_empty_variable_is_an_error(file, monkeypatch):
    monkeypatch.setenv("COAT_CONFIG", "")
    with pytest.raises(CoatConfigError, match="COAT_CONFIG=: .*found an empty path"):
        options.coat_config()


def test_what_the_module_of_the_spec_does_not_bring_is_an_error(file):
    file({"coat": {"enabled": True, "optimizer": {"enabled": False}}})
    with pytest.raises(CoatConfigError, match="coat.optimizer.enabled.*with_optimizer"):
        installing.install(optimizer=True)


GPT = ["coat_layer_spec", "sdpa_layer_spec"]
HYBRID = ["coat_hybrid_stack_spec", "sdpa_hybrid_stack_spec"]
# the specs of a module, and whether it brings the optimizer and compressed recompute
WANTED = {
    "megatron_ext.layer_specs": (GPT, False, False),
    "megatron_ext.hybrid_specs": (HYBRID, False, False),
    "megatron_ext.with_optimizer": (GPT + HYBRID, True, False),
    "megatron_ext.with_checkpoints": (GPT + HYBRID, False, True),
}
IMPORTS = f"""
import importlib, sys
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron_ext.optimizer import seam as optimizer
from megatron_ext.layers import recompute
for name, (specs, *wanted) in {WANTED!r}.items():
    for spec in specs:
        # as Megatron does
        assert isinstance(import_module([name, spec]), ModuleSpec)
    assert [optimizer.installed(), recompute.installed()] == wanted, name
    optimizer.uninstall(), recompute.uninstall()
"""


def test_modules_of_specs_bring_what_they_are_named_for():
    # importing the module has effects
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=300)


def test_compressed_recompute_comes_with_the_optimizer_if_the_file_says_so(file):
    from megatron_ext.layers import recompute
    from megatron_ext.optimizer import seam as optimizer

    for compress in (False, True):
        file({"coat": {"enabled": True, "fp8_activation_checkpointing": compress}})
        try:
            installing.install(optimizer=True)
            assert optimizer.installed() and recompute.installed() == compress
            assert options.activations().enabled
        finally:
            recompute.uninstall()
            optimizer.uninstall()


def test_keys_of_what_the_spec_does_not_bring_are_named(megatron, file, caplog):
    from coat_ds.layers import log
    from megatron_ext.layer_specs import sdpa_layer_spec
    from megatron_ext.optimizer import seam as optimizer
    from tests.megatron_ext.test_optimizer import Trainer

    optimizer.uninstall()
    log.say_anew()
    block = {"enabled": True}
    path = file({"coat": block | {"activations": {"group_size": 32}, "optimizer": {"group_size": 64}}})
    for layers in ("sdpa", "coat"):
        caplog.clear()
        with cpu.no_cuda():
            Trainer("plain", layers)
        found = [line for line in caplog.messages if "of no effect" in line]
        wanted = [("activations", 32)] * (layers == "sdpa") + [("optimizer", 64)]
        for line, (part, size) in zip(found, wanted, strict=True):
            assert f"COAT_CONFIG={path}: coat.{part}.group_size: found {size}, of no effect" in line
    file({"coat": block | {"fp8_activation_checkpointing": True}})
    with pytest.raises(CoatConfigError, match="coat.fp8_activation_checkpointing: found true, but nothing"):
        build(sdpa_layer_spec)


def _precision(content, **matchers):
    from megatron.core.quantization.quant_config import RecipeConfig

    entries = {
        key: {"type": "glob", "pattern": pattern, "config": key, "enabled": True}
        for key, pattern in matchers.items()
    }
    return RecipeConfig.from_config_dict({"configs": content, "matchers": entries})


def test_single_layers_follow_the_precision_file(megatron):
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
    assert second.mlp.linear_fc2._formats.backward.name == "e4m3"
    assert second.mlp.linear_fc1._formats.backward.name == "e5m2"
    # the layers next to a layer in BF16 pass it its input
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 16, dtype=torch.long, device=device)
    model(tokens, torch.arange(16, device=device)[None], None, labels=tokens).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_single_layers_keep_the_rest_of_the_block():
    base = ActivationsConfig(group_size=32, evaluation="stock")
    wanted = {"enabled": False, "backward_format": "e4m3", "weight_cache": "fp8", "fast_accumulation": "none"}
    place = SimpleNamespace(module_path="decoder.layers.0.mlp.linear_fc1")
    found = SimpleNamespace(config={"coat": wanted}, config_key="mine", match_input=place)
    assert options.layer_activations(found, base) == dataclasses.replace(base, **wanted)


@pytest.mark.parametrize(
    "block, said",
    [
        ({"group_size": 32}, "found 'group_size', expected an object with keys among enabled"),
        ("e4m3", "found 'e4m3', expected an object"),
        ({"backward_format": "e3m4"}, "coat.activations.backward_format"),
    ],
    ids=["key", "no-object", "value"],
)
def test_errors_of_the_precision_file_name_layer_and_key(block, said):
    place = SimpleNamespace(module_path="decoder.layers.0.mlp.linear_fc1")
    found = SimpleNamespace(config={"coat": block}, config_key="mine", match_input=place)
    with pytest.raises(CoatConfigError) as error:
        options.layer_activations(found, ActivationsConfig())
    assert f"configs.mine.coat, for {place.module_path}" in str(error.value) and said in str(error.value)


def test_other_blocks_of_the_precision_file_are_not_ours():
    found = SimpleNamespace(config={"kitchen_config_type": "QLinearParams"}, config_key="x", match_input=None)
    base = ActivationsConfig()
    assert options.layer_activations(found, base) is base and options.layer_activations(None, base) is base
