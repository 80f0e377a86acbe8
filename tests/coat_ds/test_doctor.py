"""`coat doctor`: what it says of versions, of this machine, and of what a JSON would do to a model."""

import functools
import json
from unittest import mock

import pytest
import torch
from torch.utils import _device

from coat_ds import cli
from coat_ds.doctor import OK, PROBLEM, UNKNOWN, WARNING, dry_run, machine, packages, switches
from coat_ds.plan.read import meta_model
from coat_kernels.linear import matmul

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
GOOD = {
    "python": "3.11.9",
    "coat-train": "0.1.0",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "deepspeed": "0.18.9",
    "megatron-core": None,
}


def by_check(findings) -> dict:
    return {finding.check: finding for finding in findings}


def test_doctor_finds_tested_versions_fine():
    found = by_check(packages.check(GOOD))
    for name in ("python", "torch", "triton", "deepspeed"):
        assert found[name].state == OK, found[name]
    assert found["megatron-core"].state == UNKNOWN
    # what is installed here is what tests run with, other versions with a failure that tests work around
    assert not [f for f in packages.check() if f.state == PROBLEM and f.check != "known failure"]


@pytest.mark.parametrize(
    "change, check, state, text",
    [
        ({"torch": None}, "torch", PROBLEM, "not installed. pip install"),
        ({"torch": "2.16.0"}, "torch", WARNING, "2.16.0, not tested; tested: >=2.11,<2.16"),
        ({"deepspeed": "0.20.0"}, "deepspeed", PROBLEM, "<0.20 is needed"),
        ({"deepspeed": "0.19.1"}, "deepspeed", WARNING, "not tested; tested: ==0.18.9,==0.19.8"),
        # a nightly build is not refused
        ({"torch": "2.12.0.dev20260301+cu130"}, "torch", OK, "2.12.0.dev20260301+cu130"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_doctor_names_other_versions_with_the_way_out(change, check, state, text):
    found = [f for f in packages.check(GOOD | change) if f.check == check and f.state == state]
    assert any(text in f.text for f in found), found


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_doctor_claims_nothing_without_a_gpu():
    assert {finding.state for finding in machine.check()} == {UNKNOWN}


@pytest.mark.gpu
def test_doctor_finds_a_gpu_with_fp8_healthy():
    found = machine.check()
    assert {finding.state for finding in found} == {OK}, found
    assert by_check(found)["FP8 GEMM"].details["error"] > 0


def test_doctor_finds_a_wrong_product(monkeypatch):
    assert machine.check_product("cpu").state == OK
    right = matmul.scaled_matmul
    for wrong in (
        lambda *a: right(*a) * 1.02,
        lambda *a: torch.full_like(right(*a), torch.nan),
        lambda *a: right(*a).flip(0),
    ):
        monkeypatch.setattr(machine, "scaled_matmul", wrong)
        found = machine.check_product("cpu")
        assert found.state == PROBLEM and "relative error" in found.text

    def fails(*_):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(machine, "scaled_matmul", fails)
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in machine.check_product("cpu").text


@pytest.mark.parametrize("name, broken", [("coat_ds", True), ("another", False)])
def test_doctor_names_an_entry_point_that_cannot_be_loaded(name, broken, monkeypatch, tmp_path):
    """Ours, not another package's."""
    before = switches.check()
    folder = tmp_path / f"{name}_broken-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_broken\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]\n{name} = no_such_module:start\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = switches.check()
    if broken:
        assert found.state == PROBLEM and "ModuleNotFoundError: No module named 'no_such" in found.text
    else:
        assert found == before


def test_doctor_names_switches(monkeypatch):
    assert switches.check().state in (OK, UNKNOWN)
    monkeypatch.setenv("COAT_DISABLE", "0")
    assert switches.check().state in (OK, UNKNOWN)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert switches.check().state == PROBLEM
    monkeypatch.setenv("COAT_DISABLE", "1")
    found = switches.check()
    assert found.state == WARNING and "COAT_DISABLE=1" in found.text


def dry(config: dict, **model) -> dict:
    return by_check(dry_run.check(config, meta_model(LLAMA | model)))


def config(block: dict | None) -> dict:
    made = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 10**5}}
    return made if block is None else made | {"coat": block}


def test_dry_run_names_weights_outside_of_fp8_by_their_share():
    """Experts of a form that is not converted are no linear layers that are counted."""
    model = meta_model(
        {
            "model_type": "jetmoe",
            "vocab_size": 64,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "kv_channels": 32,
            "intermediate_size": 128,
            "num_local_experts": 4,
        }
    )
    experts = sum(p.numel() for name, p in model.named_parameters() if "put_linear" in name)
    share = experts / sum(p.numel() for p in model.parameters())
    found = by_check(dry_run.check(config({"enabled": True}), model))["layers"]
    assert f"JetMoeParallelExperts {share:.1%}" in found.text


def test_dry_run_builds_a_model_without_memory_whatever_ran_before():
    # as in DeepSpeed's zero.Init, which exchanges constructors while torch lists them
    _device._device_constructors.cache_clear()
    with mock.patch.object(torch, "empty", functools.partial(torch.empty)), torch.device("meta"):
        assert torch.ones(1).is_meta
    # 4 TiB of embeddings
    model = meta_model(LLAMA | {"vocab_size": 2**32})
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "block, model, check, state, text",
    [
        (None, {}, "dry run", WARNING, "no coat block"),
        ({"enabled": False}, {}, "dry run", WARNING, "coat.enabled is false"),
        ({"enabled": True, "activation": {}}, {}, "dry run", PROBLEM, "coat.activation: unknown key"),
        (
            {"enabled": True},
            {"hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2},
            "layers",
            PROBLEM,
            "FP8 saves nothing: none of 15",
        ),
    ],
    ids=str,
)
def test_dry_run_names_why_nothing_is_saved(block, model, check, state, text):
    found = dry(config(block), **model)[check]
    assert found.state == state and text in found.text, found


def test_dry_run_reads_the_json_as_the_engine_would():
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    for wrong, text in (
        ({"COAT": {"enabled": True}}, "COAT: found a block there"),
        ({"coat": {"enabled": True}} | offload, "offload_optimizer.device: found 'nvme'"),
        ({"coat": {"enabled": True}, "optimizer": {"type": "Lamb"}}, "optimizer.type: "),
    ):
        found = dry(wrong)["dry run"]
        assert found.state == PROBLEM and text in found.text, found
    # what Trainer fills in
    trainer = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}
    for right in (config({"enabled": True}), config({"enabled": True}) | trainer):
        assert "dry run" not in dry(right)
    for precision, state in (({}, WARNING), ({"torch_autocast": {"enabled": True}}, None)):
        found = dry(config({"enabled": True}) | {"bf16": {"enabled": False}} | precision)
        assert getattr(found.get("dry run"), "state", None) == state, found
    # the optimizer's name stands for the block
    assert dry(config(None) | {"optimizer": {"type": "CoatAdamW"}}) == dry(config({"enabled": True}))


def test_dry_run_with_fp16_leaves_layers_as_they_are():
    fp16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
    found = dry(config({"enabled": True}) | fp16)
    assert found["layers"].state == PROBLEM
    assert "none of 15 linear layers would compute in it" in found["layers"].text
    assert "fp16.enabled is true, and converted layers compute in BF16 or FP32" in found["layers"].text
    # which the engine refuses where the block asks for them
    found = dry(config({"enabled": True, "activations": True}) | fp16)["dry run"]
    assert found.state == PROBLEM and "found True, but fp16.enabled is true" in found.text


def page(tmp_path, capsys, ds: dict, model: dict = LLAMA, *words) -> tuple[int, dict]:
    """The exit code, and the findings by name, of the command on two files."""
    for file, content in (("config.json", model), ("ds.json", ds)):
        (tmp_path / file).write_text(json.dumps(content))
    given = [f"--deepspeed={tmp_path / 'ds.json'}", f"--model={tmp_path / 'config.json'}", "--json"]
    code = cli.main(["doctor", *given, *words])
    parts = json.loads(capsys.readouterr().out)
    return code, {f["check"]: f for part in parts.values() if isinstance(part, list) for f in part}


@pytest.mark.parametrize("block, state", [({"enabled": True}, None), ({"enable": True}, PROBLEM)])
def test_dry_run_of_a_model_with_code_of_its_own_is_one_finding(block, state, tmp_path, capsys):
    """Machine, packages, and what needs no model, are checked."""
    remote = {"model_type": "no_model_of_transformers", "auto_map": {"AutoConfig": "configuration.Config"}}
    _, found = page(tmp_path, capsys, {**config(block), "train_batch_size": 2}, remote)
    assert found["model"]["state"] == UNKNOWN and "auto_map" in found["model"]["text"]
    assert found["torch"]["state"] == OK
    assert found.get("dry run", {}).get("state") == state
    # a wrong model_type is a mistake
    code, found = page(tmp_path, capsys, {**config(block), "train_batch_size": 2}, {"model_type": "lama"})
    assert code == 1 and found["model"]["state"] == PROBLEM and "torch" in found
