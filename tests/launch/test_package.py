"""The wheel is built from the sdist, contains all sources, and works without the repository."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import coat_ds
from coat_ds.versions import DEEPSPEED, MEGATRON_CORE

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "coat_ds": "coat_ds",
    "coat_kernels": "kernels",
    "coat_launch": "launch",
    "coat_launch/configs": "configs",
    "megatron_ext": "megatron_ext",
}
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "coat_autoload.py")
# scripts for a clone
LEFT_OUT = (".sh", ".sbatch")

LONG = pytest.mark.long("builds and installs a wheel")

INSIDE = """
import importlib.resources, json
import coat_ds, coat_kernels, coat_launch, megatron_ext
from coat_launch import config_path
configs = importlib.resources.files("coat_launch.configs")
print("RESULT " + json.dumps({
    "version": coat_ds.__version__,
    "folders": [module.__file__ for module in (coat_ds, coat_kernels, coat_launch, megatron_ext)],
    "schema": json.loads((configs / "coat.schema.json").read_text()),
    "config": json.loads(open(config_path("ds_zero1_coat.json")).read()),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from an sdist, as pip does for users of a package index if no wheel fits; not in the clone."""
    folder = tmp_path_factory.mktemp("package")
    for name in FOLDERS.values():
        shutil.copytree(ROOT / name, folder / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / "clone" / name)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "clone", check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True)
    return folder


def python(*words, cwd: Path, paths: tuple = (), code: int = 0) -> subprocess.CompletedProcess:
    """Python without the repository: -S leaves out the file through which its editable install is found."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, sysconfig.get_path("purelib"))))}
    done = subprocess.run(
        [sys.executable, "-S", *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@LONG
def test_wheel_holds_all_sources_and_nothing_else(wheel):
    expected = {"coat_autoload.py"}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in LEFT_OUT:
                expected.add(f"{package}/{path.relative_to(ROOT / folder)}")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {
        f"{package}/py.typed" for package in ("coat_ds", "coat_kernels", "coat_launch", "megatron_ext")
    } <= names


@LONG
def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == coat_ds.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    # the build decides the order of the two bounds
    needed = {frozenset(line.replace(";", ",").split(",")[:2]) for line in metadata.get_all("Requires-Dist")}
    for framework, supported in (("deepspeed", DEEPSPEED), ("megatron-core", MEGATRON_CORE)):
        assert {f"{framework}<{supported.untried}", f">={supported.oldest}"} in needed


@LONG
def test_works_without_the_repository(site, tmp_path):
    done = python("-c", INSIDE, cwd=tmp_path, paths=(site,))
    found = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert all(Path(path).is_relative_to(site) for path in found["folders"])
    assert found["version"] == coat_ds.__version__
    for key, name in (("schema", "coat.schema.json"), ("config", "ds_zero1_coat.json")):
        assert found[key] == json.loads((ROOT / "configs" / name).read_text())
    said = python("-m", "coat_launch.pretrain_gpt", "--help", cwd=tmp_path, paths=(site,)).stdout
    assert "--deepspeed-config" in said


@pytest.fixture
def small_clone(tmp_path) -> Path:
    """A git clone with one module in each package, which the real setup.py builds."""
    clone = tmp_path / "clone"
    for name in ("coat_ds", "kernels", "megatron_ext", "launch", "configs"):
        (clone / name).mkdir(parents=True)
        (clone / name / "__init__.py").touch()
    for name in (*FILES, "coat_ds/versions.py"):
        shutil.copy(ROOT / name, clone / name)
    return clone


def build(clone: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    folder = clone.with_name("wheels")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([*command, "--wheel-dir", str(folder), str(clone)], check=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_version_of_a_clone_names_its_commit(small_clone):
    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(small_clone), *names, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert f"-{coat_ds.__version__}-" in build(small_clone).name
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert f"-{coat_ds.__version__}+g{commit[:7]}" in build(small_clone).name
