"""The command `coat`, as users call it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import coat_ds
from coat_ds import CoatConfig, cli
from coat_ds.doctor import PROBLEM, packages
from coat_ds.plan import advice, find_gpu
from coat_ds.plan.command import _bytes, configured
from coat_ds.plan.deepspeed_json import deepspeed_json
from coat_ds.plan.layout import Layout
from coat_ds.plan.read import from_values
from coat_ds.plan.systems import all_systems
from coat_ds.watch.readings import FILE, Reading
from tests.families import FAMILIES

ROOT = Path(__file__).parents[2]
SHAPE = ["configs/model_llama2_7b.json", "--vocabulary", "32000"]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def said(capsys, *words: str, code: int = 0) -> str:
    assert cli.main(list(words)) == code, capsys.readouterr()
    out, error = capsys.readouterr()
    return error if code == 2 else out


def plain(capsys, *words: str, code: int = 0) -> dict:
    return json.loads(said(capsys, *words, "--json", code=code))


def test_coat_command_prints_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("coat ")


def test_coat_plan_of_every_system(capsys):
    found = plain(capsys, "plan", *SHAPE, "--gpus", "2", "--micro-batch", "4", "--gpu", "h200")
    systems = {system["system"]: system for system in found["systems"]}
    # without DeepSpeed only one GPU is planned
    assert systems.keys() == {name for name, system in all_systems().items() if not system.release}
    assert found["model"]["parameters"] == 6_738_415_616
    for system in systems.values():
        assert sum(system["roles"].values()) == pytest.approx(system["peak_bytes"], abs=20)
        assert system["moments"][system["peak_moment"]] == max(system["moments"].values())
    # measured (train_7b_2gpu.csv; there buckets are of 1e8 elements)
    assert systems["COAT"]["peak_bytes"] - 8e8 == pytest.approx(58.617e9, rel=0.01)
    smaller = (
        "COAT",
        "COAT, 8-bit attention",
        "COAT, recomputed attention",
        "COAT, smallest, recomputed attention",
    )
    peaks = [systems[name]["peak_bytes"] for name in ("BF16", *smaller)]
    assert peaks == sorted(peaks, reverse=True)
    assert systems["COAT, offload"]["host_bytes"] == pytest.approx((4 + 4 + 2.07) * 6.738e9 / 2, rel=0.001)
    assert systems["COAT, recompute"]["roles"]["saved"] < systems["COAT"]["roles"]["saved"]


def test_coat_plan_finds_the_largest_micro_batch_that_was_measured():
    """Of llama2-7b on two H200s within 80 GB (train_7b_2gpu.csv): 8 under ZeRO-2, 22 under TP 2."""
    model = from_values(json.loads((ROOT / SHAPE[0]).read_text()), 32000)
    for layout, largest in (
        (Layout(gpus=2, stage=2, reduce_bucket=10**8), 8),
        (Layout(gpus=2, stage=1, tensor=2, reduce_bucket=10**8), 22),
    ):
        assert advice.largest_micro_batch(model, layout, all_systems()["COAT"], 80e9) == largest
    assert advice.largest_micro_batch(model, layout, all_systems()["BF16"], 10e9) == 0
    assert advice.largest_micro_batch(model, layout, all_systems()["BF16"], 1e18) == advice.MOST


def test_coat_plan_recommendation_fits_and_can_be_pasted(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = plain(capsys, "plan", str(path), "--gpus", "8", "--sequence", "4096", "--fit", "80GB")
    best = found["recommended"]
    assert best["peak_bytes"] <= 80e9
    pasted = json.loads(best["paste"])
    assert pasted["train_micro_batch_size_per_gpu"] == best["micro_batch"]
    assert pasted["zero_optimization"]["stage"] == best["stage"]
    assert CoatConfig.from_dict(pasted["coat"]).enabled
    # one sequence more does not fit
    (tmp_path / "ds.json").write_text(json.dumps(pasted))
    words = ["plan", str(path), "--gpus", "8", "--sequence", "4096", "--deepspeed", str(tmp_path / "ds.json")]
    again = plain(capsys, *words, "--fit", "80")["systems"][-1]
    assert again["system"] == "as the JSON says" and again["peak_bytes"] == best["peak_bytes"]
    assert again["largest_micro_batch"] == best["micro_batch"]
    # the JSON's stage stays
    other = 1 if best["stage"] > 1 else 3
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": other}}))
    assert plain(capsys, *words, "--fit", "80GB")["recommended"]["stage"] == other


def test_coat_plan_keeps_the_rest_of_a_json():
    model = from_values(CONFIG, None)
    systems = [all_systems()["COAT, offload"], all_systems()["COAT, smallest, recomputed attention"]]
    base = {
        "gradient_clipping": 1.0,
        # DeepSpeed's old name
        "bfloat16": {"enabled": True, "check_grad_overflow": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 10**8},
        "coat": {"enabled": True, "require": True},
        "train_batch_size": 512,
        "gradient_accumulation_steps": 2,
    }
    made = [
        deepspeed_json(choice.system, choice.layout, base)
        for choice in advice.compare(
            model, Layout(gpus=8, stage=2, accumulation=4), systems, find_gpu("h100")
        )
    ]
    assert made[0]["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 10**8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert made[1]["bfloat16"]["bf16_master_weights_and_grads"] and made[1]["gradient_clipping"] == 1.0
    for config in made:
        assert config["bfloat16"]["check_grad_overflow"] and "bf16" not in config
        assert config["gradient_accumulation_steps"] == 4
        assert "train_batch_size" not in config and config["coat"]["require"]
        assert CoatConfig.from_dict(config["coat"]).activations.attention_format == "recompute"
    assert base["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    "base",
    [
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {"fp16": {"enabled": True}},
        {"optimizer": {"type": "CoatAdamW", "params": {"lr": 2e-5}}},
    ],
    ids=lambda base: next(iter(base)),
)
def test_coat_plan_json_is_of_the_system_that_was_chosen(base):
    """Whatever the base asks for; and DeepSpeed reads it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    names = "BF16", "COAT", "COAT, smallest, recomputed attention"
    systems, layout = [all_systems()[name] for name in names], Layout(gpus=8, stage=2)
    for choice in advice.compare(from_values(CONFIG, None), layout, systems, find_gpu("h100")):
        made = deepspeed_json(choice.system, choice.layout, base)
        found, wanted = configured(made), choice.system
        assert (found.layers, found.optimizer) == (wanted.layers, wanted.optimizer)
        read = DeepSpeedConfig(made)
        assert read.bfloat16_config.bf16_master_weights_and_grads == wanted.bf16_masters
        # no optimizer that the user did not configure
        assert read.optimizer_params == base.get("optimizer", {}).get("params")


def test_coat_plan_memory_has_its_units():
    for text, size in (("2GiB", 2**31), ("2gb", 2e9), ("2", 2e9), ("79.5 GB", 79.5e9)):
        assert _bytes(text) == size


def test_coat_plan_proposes_states_in_host_memory_with_their_bytes_and_seconds(capsys):
    words = ["plan", *SHAPE, "--gpus", "1", "--fit", "40GB"]
    text, best = said(capsys, *words), plain(capsys, *words)["recommended"]
    seconds = best["milliseconds"]["optimizer"] / 1e3
    assert f"host memory: {best['host_bytes'] / 1e9:.1f} GB. Of a step, {seconds:.2f} s" in text
    pasted = [line for line in text.splitlines() if "coat_ds." in line]
    scope = {"coat_ds": coat_ds, "model": FAMILIES["llama"].build()}
    exec("\n".join(pasted), scope)
    assert scope["optimizer"].defaults["lr"] == 2e-5 and coat_ds.conversion_of(scope["model"])


def test_coat_plan_gives_megatrons_arguments_and_block(capsys):
    words = ["plan", *SHAPE, "--megatron", "--gpus", "8", "--sequence", "8192", "--micro-batch", "1"]
    text = said(capsys, *words, "--fit", "50GB")
    rows = {line.removeprefix("> ").partition("  ")[0]: line for line in text.splitlines()}
    assert " !" in rows["BF16"] and " !" not in rows["COAT, recompute"] and "COAT, offload" not in rows
    assert "6.74B parameters, 8 x H100, Megatron, micro-batch 1 x 8192 tokens" in text
    assert "recompute: with gradient checkpointing of whole layers" in text
    assert "fastest within 50.0 GB (>): COAT, recompute, micro-batch 1," in text
    pasted = text.partition("--micro-batch-size 1 ")[2]
    assert pasted.startswith(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    assert "--spec megatron_ext.spec coat_layer_spec" in pasted
    assert json.loads(pasted[pasted.index("{") :])["coat"]["fp8_activation_checkpointing"] is True
    more = said(capsys, *words, "--tensor", "2", "--pipeline", "2")
    assert "8 x H100, Megatron, tensor 2, pipeline 2, micro-batch" in more
    wrong = said(capsys, "plan", *SHAPE, "--megatron", "--gpus", "64", "--tensor", "64", code=2)
    assert "--tensor: 64 does not divide the 32 heads. Change it." in wrong


@pytest.mark.parametrize(
    "batches, micro_batch, total",
    [
        ({"train_batch_size": 160}, 10, 160),
        # as long as they are its factors
        (
            {"train_batch_size": 160, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 20},
            10,
            160,
        ),
        ({"gradient_accumulation_steps": 20}, 12, None),
    ],
    ids=["alone", "and its factors", "none"],
)
def test_fit_keeps_deepspeeds_global_batch(capsys, tmp_path, monkeypatch, batches, micro_batch, total):
    """Learning rates are of one. Of 20 sequences for each GPU 12 at once would fit."""
    from deepspeed.runtime import config

    (tmp_path / "ds.json").write_text(json.dumps({**batches, "zero_optimization": {"stage": 2}}))
    words = ["plan", *SHAPE, "--gpus", "8", "--deepspeed", str(tmp_path / "ds.json"), "--fit", "80GB"]
    best = plain(capsys, *words)["recommended"]
    pasted = json.loads(best["paste"])
    assert best["micro_batch"] == micro_batch == pasted["train_micro_batch_size_per_gpu"]
    assert pasted.get("train_batch_size") == total
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 8)
    assert config.DeepSpeedConfig(pasted).train_batch_size == (total or 8 * 12 * 20)
    # a number of micro-batches on the command line goes before it
    pasted = json.loads(plain(capsys, *words, "--accumulation", "4")["recommended"]["paste"])
    assert pasted["gradient_accumulation_steps"] == 4 and "train_batch_size" not in pasted


OPTIONAL = ["accelerate", "deepspeed", "matplotlib", "megatron", "tokenizers", "tqdm", "transformers"]
# a process that plans, and in which packages are not installed afterwards; each command in a fork of its own
WITHOUT = """
import json, os, sys
from coat_ds.cli import main
cases, folder = json.loads(sys.argv[1]), sys.argv[2]
main(cases["plan"][1])
print("IMPORTED", json.dumps([*sys.modules]), flush=True)
del os.environ["RANK"]
missing = {package for packages, _ in cases.values() for package in packages}
class Finder:
    def __init__(self, inner):
        self.inner = inner
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in missing else self.inner.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.inner, name)
sys.meta_path[:] = map(Finder, sys.meta_path)
# what every fork would import, and imports none of the packages
import torch._dynamo, triton.language
for name, (missing, words) in cases.items():
    if not (child := os.fork()):
        for stream in (1, 2):
            os.dup2(os.open(f"{folder}/{name}.{stream}", os.O_CREAT | os.O_WRONLY), stream)
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        # a usual end would take apart everything that was imported
        os._exit(code or 0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
PLAIN = {
    "plan": ["plan", *SHAPE],
    "patches": ["patches"],
    "doctor": ["doctor"],
    "help": ["train", "--help"],
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The exit code, the output and the errors of commands without some packages."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gemma"}))
    (folder / FILE).write_text(json.dumps(Reading(2, {})._asdict()) + "\n")
    cases = {name: (OPTIONAL, words) for name, words in PLAIN.items()}
    cases["gemma"] = ["transformers"], ["plan", str(folder / "config.json")]
    for package in ("megatron", "deepspeed"):
        cases[package] = [package], ["train", "--steps=1", f"--output={folder}/run"]
    cases["table"] = ["matplotlib"], ["watch", str(folder)]
    cases["pictures"] = ["matplotlib"], ["watch", str(folder), "--pictures", str(folder)]
    words = [sys.executable, "-c", WITHOUT, json.dumps(cases), folder]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "RANK": "1"})
    assert done.returncode == 0, done.stderr
    planned, rest = done.stdout.split("IMPORTED ")
    imported, *lines = rest.splitlines()
    codes = dict(line.split() for line in lines)
    found = {
        name: (int(codes[name]), *((folder / f"{name}.{stream}").read_text() for stream in (1, 2)))
        for name in cases
    }
    return found | {"by itself": (planned, done.stderr, {*json.loads(imported)})}


def test_coat_command_in_a_process_of_its_own(ends):
    """Without a message of torch's or DeepSpeed's on the way, and without importing either host, nor torch's
    module that builds extensions, which warns where there is a compiler and no GPU."""
    planned, error, imported = ends["by itself"]
    assert planned.startswith("6.74B parameters, 1 x H100, ZeRO-2, micro-batch 1 x 2048 tokens")
    assert error == ""
    assert not {"deepspeed", "megatron", "transformers", "torch.utils.cpp_extension"} & imported


HEALTHY = all(finding.state != PROBLEM for finding in packages.check())
healthy = pytest.mark.skipif(not HEALTHY, reason="versions with a known failure")


@pytest.mark.parametrize("name", PLAIN)
def test_coat_commands_need_no_optional_package(ends, name):
    code, said, error = ends[name]
    assert said and "Traceback" not in error, error
    assert code == (name == "doctor" and not HEALTHY)


def test_coat_plan_of_a_published_config_needs_transformers(ends):
    """A table of model types in its place would plan another model."""
    code, *said = ends["gemma"]
    assert code == 2 and "pip install transformers" in "".join(said)


@pytest.mark.parametrize("package", ["megatron", "deepspeed"])
def test_coat_train_names_the_package_that_is_missing(ends, package):
    code, _, error = ends[package]
    (line,) = error.splitlines()
    assert code == 1 and re.search(rf'pip install "coat-train\[(\w+,)?{package}', line), line


def test_coat_watch_without_matplotlib_prints_the_table(ends):
    code, said, error = ends["table"]
    (line,) = error.splitlines()
    assert code == 0 and said and "matplotlib" in line
    # pictures named on the command line are part of the result
    assert ends["pictures"][0] == 2


@healthy
def test_coat_doctor_fails_by_what_is_wrong_and_not_by_what_is_missing(capsys, monkeypatch):
    found = plain(capsys, "doctor")
    assert found["healthy"] and found["problems"] == 0
    page = said(capsys, "doctor")
    assert page.splitlines()[-1].startswith("healthy: ") and "PROBLEM" not in page
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    page = said(capsys, "doctor", code=1)
    assert "PROBLEM" in page and "not healthy" in page.splitlines()[-1]
