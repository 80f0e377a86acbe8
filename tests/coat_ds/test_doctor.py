"""`coat doctor`: what it says of versions, of this machine, and of what a JSON would do to a model."""

import functools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils import _device, cpp_extension
from torch.utils.file_baton import FileBaton

from coat_ds import cli
from coat_ds.doctor import OK, PROBLEM, UNKNOWN, WARNING, dry_run, machine, packages, switches
from coat_ds.plan import PlanError, meta_model
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


def test_tested_versions_are_fine():
    found = by_check(packages.check(GOOD))
    for name in ("python", "torch", "triton", "deepspeed"):
        assert found[name].state == OK, found[name]
    assert found["megatron-core"].state == UNKNOWN
    # what is installed here is what tests run with, other versions with a failure that tests work around
    assert not [f for f in packages.check() if f.state == PROBLEM and f.check != "known failure"]


@pytest.mark.parametrize(
    "change, check, state, text",
    [
        ({"torch": "2.10.1"}, "torch", PROBLEM, r"2.10.1 found, >=2.11 is needed. pip install 'torch>=2.11'"),
        ({"torch": None}, "torch", PROBLEM, "not installed. pip install"),
        ({"torch": "2.16.0"}, "torch", WARNING, "2.16.0, not tested; tested: >=2.11,<2.16"),
        ({"deepspeed": "0.20.0"}, "deepspeed", PROBLEM, "<0.20 is needed"),
        ({"deepspeed": "0.19.1"}, "deepspeed", WARNING, "not tested; tested: ==0.18.9,==0.19.8"),
        (
            {"torch": "2.13.0"},
            "known failure",
            PROBLEM,
            "deepspeed 0.18.9 with torch 2.13.0: the step of ZeRO",
        ),
        ({"deepspeed": "0.19.8"}, "known failure", WARNING, "DeepSpeed #8148"),
        (
            {"deepspeed": "0.19.8", "transformers": "5.17.0"},
            "known failure",
            WARNING,
            "deepspeed 0.19.8 with transformers 5.17.0: Trainer without warm-up steps",
        ),
        (
            {"megatron-core": "0.16.1", "transformer-engine": "2.12.0"},
            "known failure",
            WARNING,
            "CUDA graphs of TransformerEngine's FP8 layers may give NaN",
        ),
        # a nightly build is not refused
        ({"torch": "2.12.0.dev20260301+cu130"}, "torch", OK, "2.12.0.dev20260301+cu130"),
        # the groups of `mpu` alone sum nothing
        (
            {"megatron-core": "0.16.1"},
            "known failure",
            WARNING,
            "Call megatron_ext.mpu.sum_shared_gradients(model) before",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_other_versions_are_named_with_the_way_out(change, check, state, text):
    found = [f for f in packages.check(GOOD | change) if f.check == check and f.state == state]
    assert any(text in f.text for f in found), found


def test_known_failures_are_of_the_versions_that_have_them():
    newer = {"deepspeed": "0.19.8", "torch": "2.13.0", "transformers": "5.18.0"}
    texts = " ".join(f.text for f in packages.check(GOOD | newer))
    assert "resume from a universal checkpoint" in texts
    assert "the step of ZeRO 1 and 2" not in texts and "warm-up" not in texts
    assert packages.versions(["no-such-package", "torch"]) == {
        "no-such-package": None,
        "torch": packages.versions(["torch"])["torch"],
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path):
    found = by_check(machine.check(str(tmp_path), None))
    for name in ("GPUs", "FP8 GEMM", "Triton", "NCCL", "pinned memory"):
        assert found[name].state == UNKNOWN, found[name]
    assert found["disk"].state == OK


def test_all_of_a_machine_is_looked_at(tmp_path, monkeypatch):
    lock = tmp_path / "extensions/fused_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    found = by_check(machine.check(str(tmp_path), 10**15))
    assert found["extensions"].state == found["TORCH_CUDA_ARCH_LIST"].state == WARNING
    assert found["disk"].state == PROBLEM and f"are free in {tmp_path}," in found["disk"].text


@pytest.mark.gpu
def test_a_gpu_with_fp8_is_healthy(tmp_path):
    found = machine.check(str(tmp_path), None)
    assert not [finding for finding in found if finding.state in (PROBLEM, UNKNOWN)], found
    assert by_check(found)["FP8 GEMM"].details["error"] > 0


def test_a_wrong_product_is_a_problem(monkeypatch):
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


def test_room_for_checkpoints(tmp_path, capsys):
    assert machine.check_disk(tmp_path / "to/come", 1000).state == OK
    found = machine.check_disk(tmp_path, 10**15)
    assert found.state == PROBLEM and "two checkpoints take" in found.text and "--folder" in found.text
    assert machine.too_little_room("x", 27, 1) and not machine.too_little_room("x", 28, 1)
    assert machine.too_little_room("x", 2**30, 2**30) == "1.0 GiB are free in x, two checkpoints take 28.0"
    cli.main(["doctor", "--folder", str(tmp_path), "--json"])
    disk = json.loads(capsys.readouterr().out)["machine"][-1]
    assert disk["check"] == "disk" and disk["details"]["folder"] == str(tmp_path)


@pytest.mark.parametrize("variable", [True, False])
def test_a_build_that_was_killed_is_named(variable, tmp_path, monkeypatch):
    """By the file for which torch waits without a word."""
    if variable:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        folder = tmp_path / "deepspeed_shm_comm"
    else:
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
        # of a torch that no job of this one waits for
        other = tmp_path / "py39_cu102" / "fused_adam"
        other.mkdir(parents=True)
        (other / "lock").touch()
        folder = Path(cpp_extension._get_build_directory("deepspeed_shm_comm", False))
    assert machine.check_builds().state == OK
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileBaton(str(folder / "lock"))
    assert lock.try_acquire()
    found = machine.check_builds()
    assert found.state == WARNING and str(folder / "lock") in found.text and "0 minutes" in found.text
    old = time.time() - 60 * machine.LONGEST_BUILD
    os.utime(folder / "lock", (old, old))
    # the oldest decides
    younger = folder.with_name("younger") / "lock"
    younger.parent.mkdir()
    younger.touch()
    assert machine.check_builds().state == PROBLEM
    younger.unlink()
    lock.release()
    assert machine.check_builds().state == OK


def test_what_a_machine_of_several_gpus_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=80e9))
    kinds = ["NVIDIA H100", 9, 0], ["NVIDIA H200", 9, 0], ["NVIDIA A100", 8, 0]
    for found, states in (
        (kinds[:1] * 2, {"GPU 0": OK, "GPU 1": OK}),
        (kinds[:2], {"GPU 0": OK, "GPU 1": OK, "GPUs": WARNING}),
        (kinds[2:], {"GPU 0": PROBLEM}),
    ):
        monkeypatch.setattr(machine, "gpus", lambda found=found: found)
        assert {finding.check: finding.state for finding in machine.check_gpus()} == states


def test_another_project_called_apex_is_named(monkeypatch, tmp_path):
    for name in ("nvidias", "others"):
        folder = tmp_path / name / "apex"
        for part in ("", "multi_tensor_apply", "optimizers") if name == "nvidias" else ("",):
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / "__init__.py").touch()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder.parent)
            found = by_check(packages.check(GOOD)).get("apex")
            assert (found is None) == (name == "nvidias")
        # the next one would be taken from there, whatever the path says
        for module in [module for module in sys.modules if module.partition(".")[0] == "apex"]:
            del sys.modules[module]
    assert found.state == WARNING and "pip uninstall apex" in found.text


@pytest.mark.parametrize("name, broken", [("coat_ds", True), ("another", False)])
def test_an_entry_point_that_cannot_be_loaded_is_named(name, broken, monkeypatch, tmp_path):
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


def test_switches(monkeypatch):
    assert switches.check().state in (OK, UNKNOWN)
    monkeypatch.setenv("COAT_DISABLE", "0")
    assert switches.check().state in (OK, UNKNOWN)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert switches.check().state == PROBLEM
    monkeypatch.setenv("COAT_DISABLE", "1")
    found = switches.check()
    assert found.state == WARNING and "COAT_DISABLE=1" in found.text


def dry(config: dict, **model) -> dict:
    return by_check(dry_run.check(config, meta_model.build(LLAMA | model), gpus=2, sequence=128))


def config(block: dict | None) -> dict:
    made = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 10**5}}
    return made if block is None else made | {"coat": block}


def test_a_dry_run_counts_layers_states_and_bytes():
    found = dry(config({"enabled": True}))
    assert {finding.state for finding in found.values()} == {OK}
    assert "14 of 15 linear layers in FP8" in found["layers"].text and "the head" in found["layers"].text
    kept = 5 * 256
    assert found["states"].details["kept_fp32"] == kept
    total = found["states"].details["parameters"]
    expected = ((2 + 9 / 128) * (total - kept) + 8 * kept) / total
    assert found["states"].details["bytes_per_parameter"] == pytest.approx(expected)
    assert found["peak"].details["after_bytes"] < found["peak"].details["before_bytes"]


def test_a_dry_run_names_weights_outside_of_fp8_by_their_share():
    """Experts of a form that is not converted are no linear layers that are counted."""
    model = meta_model.build(
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
    found = by_check(dry_run.check(config({"enabled": True}), model, 1, 128))["layers"]
    assert f"JetMoeParallelExperts {share:.1%}" in found.text


def test_a_model_is_built_without_memory_whatever_ran_before():
    # as in DeepSpeed's zero.Init, which exchanges constructors while torch lists them
    _device._device_constructors.cache_clear()
    with mock.patch.object(torch, "empty", functools.partial(torch.empty)), torch.device("meta"):
        assert torch.ones(1).is_meta
    # 4 TiB of embeddings
    model = meta_model.build(LLAMA | {"vocab_size": 2**32})
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_dry_run_leaves_the_model_as_it_was():
    model = meta_model.build(LLAMA)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    before = {name: type(module).forward for name, module in model.named_modules()}
    dry_run.check(config({"enabled": True}), model, 1, 128)
    assert before == {name: type(module).forward for name, module in model.named_modules()}
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    "block, model, check, state, text",
    [
        (None, {}, "dry run", WARNING, "no coat block"),
        ({"enabled": False}, {}, "dry run", WARNING, "coat.enabled is false"),
        ({"enabled": True, "activation": {}}, {}, "dry run", PROBLEM, "coat.activation: unknown key"),
        ({"enabled": True, "optimizer": {"enabled": False}}, {}, "states", WARNING, "8 bytes a parameter"),
        (
            {"enabled": True, "optimizer": {"keep_fp32": ["*"]}},
            {},
            "states",
            WARNING,
            "8.000 bytes a parameter in place of 8",
        ),
        (
            {"enabled": True, "optimizer": {"min_numel": 10**9}},
            {},
            "states",
            WARNING,
            "8.000 bytes a parameter in place of 8",
        ),
        (
            {"enabled": True},
            {"hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2},
            "layers",
            PROBLEM,
            "FP8 saves nothing: none of 15",
        ),
        (
            {"enabled": True, "activations": False, "optimizer": {"enabled": False}},
            {},
            "peak",
            WARNING,
            "That saves next to nothing: most bytes are buffers",
        ),
    ],
    ids=str,
)
def test_a_dry_run_says_why_nothing_is_saved(block, model, check, state, text):
    found = dry(config(block), **model)[check]
    assert found.state == state and text in found.text, found


def test_a_dry_run_reads_the_json_as_the_engine_would():
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    for wrong, text in (
        ({"COAT": {"enabled": True}}, "COAT: found a block there"),
        ({"coat": {"enabled": True}} | offload, "offload_optimizer.device: found 'nvme'"),
        ({"coat": {"enabled": True}, "optimizer": {"type": "Lamb"}}, "optimizer.type: "),
    ):
        found = dry(wrong)["dry run"]
        assert found.state == PROBLEM and text in found.text, found
    # what DeepSpeed cannot read, it refuses itself
    for wrong, text in (({"bf16": True}, "bf16: expected"), ({"zero_optimization": True}, "zero_opt")):
        found = dry(config({"enabled": True}) | wrong)["peak"]
        assert found.state == UNKNOWN and found.text.startswith(f"cannot be predicted: {text}"), found
    # what Trainer fills in
    trainer = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}
    for right in (config({"enabled": True}), config({"enabled": True}) | trainer):
        assert "dry run" not in dry(right)
        buckets = {"stage": 2, "reduce_bucket_size": "auto"}
        assert dry(right | {"zero_optimization": buckets})["peak"].details
    # the optimizer's name stands for the block
    assert dry(config(None) | {"optimizer": {"type": "CoatAdamW"}}) == dry(config({"enabled": True}))


def test_a_dry_run_knows_that_fp16_keeps_layers_as_they_are():
    fp16 = {"fp16": {"enabled": True}}
    found = dry(config({"enabled": True}) | fp16)
    assert found["layers"].state == PROBLEM and found["states"].state == OK
    assert "none of 15 linear layers would compute in it" in found["layers"].text
    assert "fp16.enabled is true, and converted layers compute in BF16 or FP32" in found["layers"].text
    # which the engine refuses where the block asks for them
    found = dry(config({"enabled": True, "activations": True}) | fp16)["dry run"]
    assert found.state == PROBLEM and "found True, but fp16.enabled is true" in found.text
    states_alone = config({"enabled": True, "activations": False})
    alone = dry(states_alone)["peak"].details
    assert dry(states_alone | fp16)["peak"].details == alone
    assert dry(config({"enabled": True}) | fp16)["peak"].details == alone


OTHERS = {
    "encoder and decoder": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "d_model": 64,
        "d_ff": 128,
        "num_layers": 1,
        "num_heads": 4,
        "d_kv": 16,
        "vocab_size": 512,
    },
    "pictures": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_planned_has_a_dry_run(name, tmp_path, capsys):
    """Layers and states are counted; only the peak of what is no decoder cannot be predicted."""
    (tmp_path / "config.json").write_text(json.dumps(OTHERS[name]))
    (tmp_path / "ds.json").write_text(json.dumps(config({"enabled": True})))
    files = [
        f"--{kind}={tmp_path / file}" for kind, file in (("deepspeed", "ds.json"), ("model", "config.json"))
    ]
    cli.main(["doctor", "--json", f"--folder={tmp_path}", *files])
    found = {f["check"]: f for f in json.loads(capsys.readouterr().out)["model"]}
    assert found["layers"]["state"] == found["states"]["state"] == OK
    assert found["layers"]["details"]["made"]["linear"] and found["peak"]["text"].startswith(
        "cannot be predicted"
    )


def page(tmp_path, capsys, ds: dict | str, model: dict = LLAMA, *words) -> tuple[int, dict]:
    """The exit code, and the findings by name, of the command on two files."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    path = Path(ds) if isinstance(ds, str) else tmp_path / "ds.json"
    if isinstance(ds, dict):
        path.write_text(json.dumps(ds))
    given = [f"--deepspeed={path}", f"--model={tmp_path / 'config.json'}", f"--folder={tmp_path}", "--json"]
    code = cli.main(["doctor", *given, *words])
    parts = json.loads(capsys.readouterr().out)
    return code, {f["check"]: f for part in parts.values() if isinstance(part, list) for f in part}


@pytest.mark.parametrize("block, state", [({"enabled": True}, None), ({"enable": True}, PROBLEM)])
def test_a_model_with_code_of_its_own_is_one_finding(block, state, tmp_path, capsys):
    """Machine, packages, and what needs no model, are checked."""
    remote = {"model_type": "no_model_of_transformers", "auto_map": {"AutoConfig": "configuration.Config"}}
    _, found = page(tmp_path, capsys, {**config(block), "train_batch_size": 2}, remote)
    assert found["model"]["state"] == UNKNOWN and "auto_map" in found["model"]["text"]
    assert found["DeepSpeed JSON"]["state"] == found["disk"]["state"] == found["torch"]["state"] == OK
    assert found.get("dry run", {}).get("state") == state
    # a wrong model_type is a mistake
    code, found = page(tmp_path, capsys, {**config(block), "train_batch_size": 2}, {"model_type": "lama"})
    assert code == 1 and found["model"]["state"] == PROBLEM and "disk" in found


AUTO = {f: "auto" for f in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")}


@pytest.mark.parametrize(
    "change, words, key",
    [
        ({"zero_optimization": 2}, (), "zero_optimization"),
        ({"zero_optimization": {"stage": 2, "reduce_buckets": 5}}, (), "zero_optimization"),
        ({"zero_optimization": {"stage": 4}}, (), "zero_optimization"),
        ({"elasticity": {"enabled": True}}, (), "elasticity"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, (), "mics_shard_size"),
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, ("--gpus=2",), "train_batch_size"),
        ({"fp16": {"enabled": True}}, (), "fp16"),
        ({"train_micro_batch_size_per_gpu": None}, (), "train_micro_batch_size_per_gpu"),
        # accepted
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, ("--gpus=2",), None),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 4}, (), None),
        (
            AUTO
            | {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}},
            (),
            None,
        ),
        (AUTO | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, (), None),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_what_deepspeed_refuses_is_a_problem(change, words, key, tmp_path, capsys):
    good = {**config({"enabled": True}), "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    _, found = page(tmp_path, capsys, good | change, LLAMA, *words)
    finding = found["DeepSpeed JSON"]
    assert finding["state"] == (OK if key is None else PROBLEM), finding
    assert (key or "accepted") in finding["text"] and "layers" in found


def test_a_key_that_is_there_twice_is_a_problem(tmp_path, capsys):
    """Trainer reads the last one in silence."""
    path = tmp_path / "twice.json"
    path.write_text('{"coat": {"enabled": true}, "train_batch_size": 1, "coat": {"enabled": false}}')
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = [f"--deepspeed={path}", f"--model={tmp_path / 'config.json'}", f"--folder={tmp_path}"]
    assert cli.main(["doctor", *words]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "more than once" in line]
    assert "PROBLEM" in line and "coat:" in line


def test_accelerates_yaml_is_read(tmp_path, capsys):
    """The JSON that it names; a block in the YAML itself has no effect, and is a problem."""
    (tmp_path / "inner.json").write_text(json.dumps({**config({"enabled": True}), "train_batch_size": 1}))
    path = tmp_path / "accelerate.yaml"
    named = (
        f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {tmp_path}/inner.json\n"
    )
    path.write_text(named)
    _, found = page(tmp_path, capsys, str(path))
    assert found["layers"]["state"] == found["DeepSpeed JSON"]["state"] == OK and "Accelerate" not in found
    for inline in (
        "deepspeed_config:\n  zero_stage: 2\n  coat:\n    enabled: true\n",
        f"{named}coat: true\n",
    ):
        path.write_text(inline)
        code, found = page(tmp_path, capsys, str(path))
        assert code == 1 and found["Accelerate"]["state"] == PROBLEM
        assert "deepspeed_config_file" in found["Accelerate"]["text"]
    path.write_text("deepspeed_config: {zero_stage: 3}")
    _, found = page(tmp_path, capsys, str(path))
    assert "no coat block" in found["dry run"]["text"] and found["DeepSpeed JSON"]["state"] == OK


def test_without_transformers_a_models_size_is_not_guessed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = cli.main(["doctor", "--json", f"--folder={tmp_path}", f"--model={tmp_path / 'config.json'}"])
    parts = json.loads(capsys.readouterr().out)
    (model,) = parts["model"]
    (disk,) = (f for f in parts["machine"] if f["check"] == "disk")
    assert code == 1 and model["state"] == PROBLEM and "transformers" in model["text"]
    assert "enough" not in disk["text"]


def test_models_that_cannot_be_built_are_named():
    with pytest.raises(PlanError, match="model: transformers cannot build it"):
        meta_model.build(LLAMA | {"model_type": "lama"})
    with pytest.raises(PlanError, match="transformers cannot build it .*hidden_size"):
        meta_model.build(LLAMA | {"hidden_size": "many"})
    json.dumps(
        [f._asdict() for f in dry_run.check(config({"enabled": True}), meta_model.build(LLAMA), 1, 128)]
    )
