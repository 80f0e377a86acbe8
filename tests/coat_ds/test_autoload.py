"""The ways by which a script comes to use the block. Scripts run in processes of their own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest

from coat_ds.patches import PatchError
from coat_ds.zero import autoload
from tests.util import free_port

ROOT = Path(__file__).resolve().parents[2]

# knows nothing of this project but the config
SCRIPT = """
import json, sys
import torch

before = sorted(name for name in sys.modules if name.startswith(("coat_", "deepspeed")))
import deepspeed
from deepspeed import initialize

# it would be compiled first
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
section = {"type": "AdamW", "params": {"lr": 1e-3}}
configs = {
    "block": {"coat": {"enabled": True}, "optimizer": section},
    "type": {"optimizer": {**section, "type": "CoatAdamW"}},
    "client": {"coat": {"enabled": True}},
    "none": {},
    "off": {"coat": {"enabled": False}},
}
out = {"imported": before}
for name in sys.argv[1:]:
    model = torch.nn.Linear(64, 64)
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, **configs[name]}
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters())
    config["zero_optimization"] = {"stage": 1}
    try:
        engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
        out[name] = [type(engine.basic_optimizer).__name__, hasattr(engine, "coat")]
    except AssertionError as error:
        out[name] = str(error)
    out["heavy"] = out.get("heavy", []) + ["coat_ds.zero.engine" in sys.modules]
print("RESULT " + json.dumps(out))
"""


def clone(source):
    files = ("setup.py", "pyproject.toml", "README.md", "coat_autoload.py")
    for name in (*files, "kernels", "coat_ds", "megatron_ext", "launch", "configs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    return str(source)


def pip_install(*args, python=sys.executable):
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", *args], check=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the project was installed by pip."""
    folder = tmp_path_factory.mktemp("site")
    pip_install("--target", str(folder), clone(tmp_path_factory.mktemp("source")))
    return folder


@pytest.fixture
def python(tmp_path):
    """The Python of an environment that sees torch and setuptools, and nothing of this project."""
    venv.create(tmp_path / "env")
    folder = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # a path that is named by such a file comes last, and the files in it are not read
    (tmp_path / "env/lib" / folder / "site-packages/outer.pth").write_text(sysconfig.get_path("purelib"))
    return str(tmp_path / "env/bin/python")


def run(site, code, *args, **env):
    env = {
        **os.environ,
        "PYTHONPATH": str(site),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *args], env=env, cwd=site, check=True, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_switch_in_an_unmodified_script(site):
    out = run(site, SCRIPT, "none", "off", "block", "type", "client")
    assert out["none"] == out["off"] == ["AdamW", False]
    assert out["block"] == out["type"] == out["client"] == ["CoatAdamW", True]
    # `import torch` brings the switch and nothing else; an engine without a block does not either
    switch = ["coat_ds.zero", "coat_ds.zero.autoload", "coat_ds.zero.block"]
    assert out["imported"] == ["coat_autoload", "coat_ds", "coat_ds.patches", "coat_ds.versions", *switch]
    assert out["heavy"] == [False, True, True, True, True]


def test_switch_loads_nothing_without_torch(site):
    code = (
        "import sys, json; print('RESULT ' + json.dumps([n for n in sys.modules if n.startswith('coat_')]))"
    )
    assert run(site, code) == []


IMPORT = """
import torch, sys
print([type(finder).__module__ for finder in sys.meta_path].count("coat_ds.zero.autoload"))
"""


def imports(python, cwd, **env):
    """What `import torch` says, and whether the switch waits for DeepSpeed."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "COAT_DISABLE")}
    done = subprocess.run(
        [python, "-c", IMPORT], cwd=cwd, env={**inherited, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, done.stdout.strip()


def test_switch_lets_torch_import_where_the_package_is_not_whole(site, python, tmp_path):
    shutil.copytree(site, tmp_path / "site")
    (tmp_path / "site/coat_ds/zero/autoload.py").write_text("def register(:")
    said, waiting = imports(python, tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert waiting == "0" and said.count("\n") == 1
    assert "COAT is off" in said and "SyntaxError" in said and "(installed from file://" in said
    assert imports(python, tmp_path, PYTHONPATH=str(tmp_path / "site"), RANK="1") == ("", "0")


def engine(model, optimizer=None, config_class=None):
    """In the place of the constructor of DeepSpeed's."""


@pytest.mark.parametrize("version, fits", [("0.17.0", False), ("0.20.1", False), ("0.19.2+abc", True)])
def test_switch_with_a_deepspeed_of_another_version(monkeypatch, version, fits):
    """It is an error that names both versions where there is a block, and not before."""
    monkeypatch.setattr(deepspeed, "__version__", version)
    autoload._init_with_coat_block(engine, None, None, SimpleNamespace(_param_dict={}))
    with pytest.raises(Exception) as error:  # noqa: B017
        autoload._init_with_coat_block(
            engine, None, None, SimpleNamespace(_param_dict={"coat": {"enabled": True}})
        )
    assert isinstance(error.value, PatchError) != fits
    assert (f"found {version}" in str(error.value) and ">=0.18.9,<0.20" in str(error.value)) != fits


BY_HAND = """
import json, sys
import coat_ds
from coat_ds.zero import autoload

def waiting():
    return sum(isinstance(finder, autoload._Finder) for finder in sys.meta_path)

out = {}
coat_ds.install()
coat_ds.install()
out["waiting"] = [waiting()]
coat_ds.uninstall()
out["waiting"].append(waiting())
coat_ds.install()
out["heavy"] = [name for name in ("torch", "deepspeed") if name in sys.modules]
# rooms are attributes, and import DeepSpeed as little
coat_ds.watch.Watch, coat_ds.plan.all_systems()
out["heavy"] += [name for name in ("deepspeed", "megatron") if name in sys.modules]
import torch
import deepspeed
from deepspeed import initialize
from deepspeed.runtime.engine import DeepSpeedEngine

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
out["waiting"].append(waiting())
out["applied"] = [autoload.ENGINE.is_applied(), deepspeed.runtime.engine.__spec__.loader is not None]
coat_ds.uninstall()
original = vars(DeepSpeedEngine)["__init__"]
out["applied"].append(autoload.ENGINE.is_applied())

def build(kind="AdamW", **more):
    model = torch.nn.Linear(64, 64)
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1}}
    optimizer = None
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        config["optimizer"] = {"type": kind, "params": {"lr": 1e-3}}
    try:
        engine, *_ = initialize(model=model, optimizer=optimizer, config=config | more)
        return type(engine.basic_optimizer).__name__
    except AssertionError as error:
        return str(error)

block = {"coat": {"enabled": True}}
out["off"] = [build(), build(**block), build("CoatAdamW")]
out["heavy"] += [name for name in ("coat_ds.zero.engine",) if name in sys.modules]
coat_ds.install()
coat_ds.install()
out["on"] = build(**block)
out["original"] = vars(DeepSpeedEngine)["__init__"].__wrapped__ is original
coat_ds.uninstall()
coat_ds.uninstall()
out["undone"] = [build(**block), vars(DeepSpeedEngine)["__init__"] is original]
print("RESULT " + json.dumps(out))
"""


def test_switch_opts_out_and_is_installed_by_hand(site):
    """COAT_DISABLE: DeepSpeed then ignores the block, and refuses the loud spelling, as where nothing is
    installed. By hand: before DeepSpeed is imported and after, and back; twice makes one."""
    out = run(site, BY_HAND, COAT_DISABLE="1")
    assert out["waiting"] == [1, 0, 0] and out["applied"] == [True, True, False]
    *ignored, refused = out["off"]
    assert ignored == ["AdamW", "AdamW"] and "CoatAdamW is not a supported DeepSpeed Optimizer" in refused
    assert not out["heavy"] and out["on"] == "CoatAdamW" and out["original"]
    assert out["undone"] == ["AdamW", True]
