"""The settings that the launcher takes from environment variables: `coat_launch.cluster` describes them."""

import dataclasses
import os
import re
from dataclasses import dataclass

from coat_launch.errors import LaunchError

HOST = r"[\w.:][\w.:-]*"
# the smallest and the largest value of numbers; after MASTER_PORT the next port is used too
LIMITS = {"node_rank": (0, 10**9), "max_restarts": (0, 10**9), "master_port": (1, 2**16 - 2)}
# Slurm's names
OF_SLURM = {"NODES": "SLURM_NNODES", "NODE_RANK": "SLURM_NODEID"}
# former variables, which are options of the training script
MOVED = "MODEL_CONFIG", "DEEPSPEED_CONFIG", "DATA", "TOKENIZER", "SEQ_LENGTH", "STEPS", "SAVE_INTERVAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The variables that `coat_launch.cluster` documents, which are the fields in capitals."""

    nodes: int = 1
    node_rank: int = 0
    gpus_per_node: int = 1
    master_addr: str = ""
    master_port: int = 29500
    interface: str = ""
    output: str = "runs/gpt"
    max_restarts: int = 0
    job: str = "coat"

    @classmethod
    def from_environment(cls, env: dict[str, str]) -> "Settings":
        """Raises LaunchError, naming the variable, for invalid values and for variables that are options."""
        for name in MOVED:
            if env.get(name):
                option = "--" + name.lower().replace("_", "-")
                raise LaunchError(f"{name}: not a variable any more. Unset it, and give the option {option}")
        values: dict = {"gpus_per_node": _gpu_count()}
        for field in dataclasses.fields(cls):
            name = field.name.upper()
            if not env.get(name):
                name = OF_SLURM.get(name, name)
            if env.get(name):
                number = field.type is int
                values[field.name] = _number(name, env[name], field.name) if number else env[name]
        settings = cls(**values)
        if settings.node_rank >= settings.nodes:
            raise LaunchError(
                f"NODE_RANK: expected less than NODES ({settings.nodes}), found {settings.node_rank}"
            )
        if not re.fullmatch(HOST, settings.master_addr if settings.nodes > 1 else settings.address):
            raise LaunchError(
                f"MASTER_ADDR: expected the name or the address of node 0, found {settings.master_addr!r}"
            )
        # ranks of other nodes start in other folders
        return dataclasses.replace(settings, output=os.path.abspath(settings.output))

    @property
    def address(self) -> str:
        """Of node 0."""
        return self.master_addr or "127.0.0.1"


def _number(variable: str, text: str, field: str) -> int:
    least, most = LIMITS.get(field, (1, 10**9))
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise LaunchError(f"{variable}: expected a whole number from {least} to {most}, found {text[:60]!r}")
    return int(text)


def _gpu_count() -> int:
    """GPUs of this node; 1 without any, for a process on the CPU."""
    import torch

    return torch.cuda.device_count() or 1
