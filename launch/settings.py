"""The settings that launchers take from environment variables: `coat_launch.cluster` describes them."""

import functools
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from coat_launch import config_path
from coat_launch.errors import LaunchError
from coat_launch.files import read_object

# keys of MODEL_CONFIG that are read here
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
KINDS = ("torchrun", "deepspeed", "megatron")
LAUNCHERS = ("pdsh", "openmpi", "slurm")
# a name that begins with "-" would be parsed as an option of ssh
HOST = r"[\w.:][\w.:-]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The variables that `coat_launch.cluster` documents."""

    kind: str
    nodes: int
    node_rank: int
    gpus_per_node: int
    hosts: tuple[str, ...]
    """Names of the hosts of HOSTFILE or of Slurm's allocation, for DeepSpeed's launcher; else empty."""
    launcher: str
    master_addr: str
    master_port: int
    interface: str | None
    tensor_size: int
    pipeline_size: int
    model_config: str
    deepspeed_config: str
    data: tuple[str, ...]
    tokenizer: str | None
    seq_length: int
    steps: int
    save_interval: int
    output: str
    max_restarts: int
    job: str
    megatron_path: str | None

    @property
    def hostfile(self) -> str:
        """DeepSpeed's hostfile: `hosts`, each with GPUS_PER_NODE slots."""
        return f"{self.output}/deepspeed_hosts"

    @classmethod
    def from_environment(cls, kind: str, env: dict[str, str]) -> "Settings":
        """Raises LaunchError, naming the variable, for invalid values."""
        number = functools.partial(_number, env)
        launcher = env.get("LAUNCHER", "pdsh")
        if launcher not in LAUNCHERS:
            raise LaunchError(f"LAUNCHER: expected one of {', '.join(LAUNCHERS)}, found {launcher!r}")
        if kind == "megatron" and not env.get("MEGATRON_PATH"):
            raise LaunchError("MEGATRON_PATH: expected the path of a checkout of Megatron-LM, found none")
        hosts = _hosts(launcher, env) if kind == "deepspeed" else {}
        nodes = number("NODES", len(hosts) or number("SLURM_NNODES", 1))
        settings = cls(
            kind=kind,
            nodes=nodes,
            node_rank=number("NODE_RANK", number("SLURM_NODEID", 0, 0), 0),
            gpus_per_node=number("GPUS_PER_NODE", next(iter(hosts.values()), None) or _gpu_count()),
            hosts=tuple(hosts)[:nodes],
            launcher=launcher,
            master_addr=env.get("MASTER_ADDR") or next(iter(hosts), "" if nodes > 1 else "127.0.0.1"),
            # the next port is used too
            master_port=number("MASTER_PORT", 29500, 1, 2**16 - 2),
            interface=env.get("INTERFACE") or None,
            tensor_size=number("TENSOR_SIZE", 1),
            pipeline_size=number("PIPELINE_SIZE", 1),
            model_config=env.get("MODEL_CONFIG", config_path("model_quickstart.json")),
            deepspeed_config=env.get("DEEPSPEED_CONFIG", config_path("ds_zero1_coat.json")),
            # a path that begins with "-" would be parsed as an option
            data=tuple(f"./{p}" if p.startswith("-") else p for p in env.get("DATA", "").split(":") if p),
            tokenizer=env.get("TOKENIZER") or None,
            seq_length=number("SEQ_LENGTH", 128),
            steps=number("STEPS", 120),
            save_interval=number("SAVE_INTERVAL", 100),
            output=os.path.abspath(env.get("OUTPUT") or "runs/gpt"),
            max_restarts=number("MAX_RESTARTS", 0, 0),
            job=env.get("JOB") or "coat",
            megatron_path=env.get("MEGATRON_PATH"),
        )
        settings._check_nodes()
        settings._check_sizes()
        return settings

    def shape(self) -> dict:
        try:
            shape = read_object(self.model_config)
            for key in SIZES:
                if type(shape.get(key)) is not int or shape[key] < 1:
                    raise ValueError(f"{key}: expected a whole number above 0, found {shape.get(key)!r}")
        except ValueError as error:
            raise LaunchError(f"MODEL_CONFIG {self.model_config}: {error}") from error
        return shape

    def _check_nodes(self) -> None:
        if self.kind == "deepspeed" and self.nodes > max(1, len(self.hosts)):
            raise LaunchError(
                f"NODES: {self.nodes}, but HOSTFILE, a file of lines 'host slots=n', or the allocation of "
                f"Slurm names {len(self.hosts)}"
            )
        if self.node_rank >= self.nodes:
            raise LaunchError(f"NODE_RANK: expected less than NODES ({self.nodes}), found {self.node_rank}")
        if not re.fullmatch(HOST, self.master_addr):
            raise LaunchError(
                f"MASTER_ADDR: expected the name or the address of node 0, found {self.master_addr!r}"
            )

    def _check_sizes(self) -> None:
        if self.kind != "megatron" and self.pipeline_size > 1:
            raise LaunchError(
                f"PIPELINE_SIZE: {self.pipeline_size}, but launch/pretrain_gpt.py has no pipeline: use "
                "megatron_pretrain.sh, or 1"
            )
        processes = self.nodes * self.gpus_per_node
        if processes % (self.tensor_size * self.pipeline_size):
            raise LaunchError(
                f"TENSOR_SIZE {self.tensor_size} times PIPELINE_SIZE {self.pipeline_size} does not divide "
                f"the {processes} processes ({self.nodes} nodes of {self.gpus_per_node})"
            )
        shape = self.shape()
        for name, key, size in (
            ("TENSOR_SIZE", "num_attention_heads", self.tensor_size),
            ("TENSOR_SIZE", "num_query_groups", self.tensor_size),
            ("TENSOR_SIZE", "ffn_hidden_size", self.tensor_size),
            ("PIPELINE_SIZE", "num_layers", self.pipeline_size),
        ):
            if shape[key] % size:
                raise LaunchError(f"{name}: {size} does not divide {key} {shape[key]} of {self.model_config}")


def _number(env: dict[str, str], name: str, default: int, least: int = 1, most: int = 10**9) -> int:
    text = env.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise LaunchError(f"{name}: expected a whole number from {least} to {most}, found {text[:60]!r}")
    return int(text)


def _hosts(launcher: str, env: dict[str, str]) -> dict[str, int | None]:
    """The hosts in HOSTFILE with their slots, or those of Slurm's allocation; empty without both."""
    hostfile = env.get("HOSTFILE")
    if launcher == "slurm":
        if hostfile:
            raise LaunchError(f"HOSTFILE {hostfile}: slurm takes the nodes of the allocation, leave it out")
        return dict.fromkeys(_allocated_nodes(env))
    if not hostfile:
        return {}
    try:
        text = Path(hostfile).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"HOSTFILE {hostfile}: cannot be read as text ({error})") from error
    hosts = {}
    for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
        match = re.fullmatch(rf"({HOST})\s+slots=([1-9][0-9]{{0,5}})", line)
        if match is None or match[1] in hosts:
            raise LaunchError(f"HOSTFILE {hostfile}: expected lines 'host slots=n', found {line!r}")
        hosts[match[1]] = int(match[2])
    if len(set(hosts.values())) != 1:
        raise LaunchError(f"HOSTFILE {hostfile}: expected hosts with the same slots on each, found {hosts}")
    return hosts


def _allocated_nodes(env: dict[str, str]) -> list[str]:
    if "SLURM_JOB_NODELIST" not in env:
        raise LaunchError(
            "LAUNCHER: slurm needs an allocation: start this inside salloc or sbatch, or submit "
            "launch/slurm.sbatch"
        )
    show = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
    try:
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"LAUNCHER: slurm needs `{shlex.join(show)}` to work here ({error})") from error


def _gpu_count() -> int:
    """GPUs of this node; 1 without any, for a process on the CPU."""
    import torch

    return torch.cuda.device_count() or 1
