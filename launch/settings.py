"""The settings that launchers take from environment variables: `coat_launch.cluster` describes them."""

import dataclasses
import os
import re
from dataclasses import dataclass

from coat_launch import config_path
from coat_launch.errors import LaunchError
from coat_launch.files import read_object

# keys of MODEL_CONFIG that are read here
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
KINDS = ("torchrun", "megatron")
HOST = r"[\w.:][\w.:-]*"
# the smallest and the largest value of numbers; after MASTER_PORT the next port is used too
LIMITS = {"node_rank": (0, 10**9), "max_restarts": (0, 10**9), "master_port": (1, 2**16 - 2)}
# Slurm's names
OF_SLURM = {"NODES": "SLURM_NNODES", "NODE_RANK": "SLURM_NODEID"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The variables that `coat_launch.cluster` documents, which are the fields in capitals."""

    kind: str
    nodes: int = 1
    node_rank: int = 0
    gpus_per_node: int = 1
    master_addr: str = ""
    master_port: int = 29500
    interface: str = ""
    tensor_size: int = 1
    pipeline_size: int = 1
    model_config: str = config_path("model_quickstart.json")
    deepspeed_config: str = config_path("ds_zero1_coat.json")
    data: str = ""
    tokenizer: str = ""
    seq_length: int = 128
    steps: int = 120
    save_interval: int = 100
    output: str = "runs/gpt"
    max_restarts: int = 0
    job: str = "coat"
    megatron_path: str = ""

    @classmethod
    def from_environment(cls, kind: str, env: dict[str, str]) -> "Settings":
        """Raises LaunchError, naming the variable, for invalid values."""
        values: dict = {"gpus_per_node": _gpu_count()}
        for field in dataclasses.fields(cls):
            name = field.name.upper()
            if not env.get(name):
                name = OF_SLURM.get(name, name)
            if env.get(name) and field.name != "kind":
                number = field.type is int
                values[field.name] = _number(name, env[name], field.name) if number else env[name]
        settings = cls(**values, kind=kind)
        settings._check()
        # ranks of other nodes start in other folders
        return dataclasses.replace(settings, output=os.path.abspath(settings.output))

    @property
    def address(self) -> str:
        """Of node 0."""
        return self.master_addr or "127.0.0.1"

    @property
    def paths(self) -> list[str]:
        """Those of DATA. One that begins with "-" would be parsed as an option."""
        return [f"./{path}" if path.startswith("-") else path for path in self.data.split(":") if path]

    def shape(self) -> dict:
        try:
            shape = read_object(self.model_config)
            for key in SIZES:
                if type(shape.get(key)) is not int or shape[key] < 1:
                    raise ValueError(f"{key}: expected a whole number above 0, found {shape.get(key)!r}")
        except ValueError as error:
            raise LaunchError(f"MODEL_CONFIG {self.model_config}: {error}") from error
        return shape

    def _check(self) -> None:
        if self.node_rank >= self.nodes:
            raise LaunchError(f"NODE_RANK: expected less than NODES ({self.nodes}), found {self.node_rank}")
        if not re.fullmatch(HOST, self.master_addr if self.nodes > 1 else self.address):
            raise LaunchError(
                f"MASTER_ADDR: expected the name or the address of node 0, found {self.master_addr!r}"
            )
        if self.kind == "megatron" and not self.megatron_path:
            raise LaunchError("MEGATRON_PATH: expected the path of a checkout of Megatron-LM, found none")

        if self.kind != "megatron" and self.pipeline_size > 1:
            raise LaunchError(
                f"PIPELINE_SIZE: {self.pipeline_size}, but launch/pretrain_gpt.py has no pipeline: use "
                "megatron_pretrain.sh, or 1"
            )
        shape, model = self.shape(), self.tensor_size * self.pipeline_size
        for name, size, whole in (
            ("TENSOR_SIZE: num_attention_heads", self.tensor_size, shape["num_attention_heads"]),
            ("TENSOR_SIZE: num_query_groups", self.tensor_size, shape["num_query_groups"]),
            ("TENSOR_SIZE: ffn_hidden_size", self.tensor_size, shape["ffn_hidden_size"]),
            ("PIPELINE_SIZE: num_layers", self.pipeline_size, shape["num_layers"]),
            ("TENSOR_SIZE times PIPELINE_SIZE: processes", model, self.nodes * self.gpus_per_node),
        ):
            if whole % size:
                raise LaunchError(
                    f"{name} {whole} do not divide by {size} (MODEL_CONFIG {self.model_config})"
                )


def _number(variable: str, text: str, field: str) -> int:
    least, most = LIMITS.get(field, (1, 10**9))
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise LaunchError(f"{variable}: expected a whole number from {least} to {most}, found {text[:60]!r}")
    return int(text)


def _gpu_count() -> int:
    """GPUs of this node; 1 without any, for a process on the CPU."""
    import torch

    return torch.cuda.device_count() or 1
