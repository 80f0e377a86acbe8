"""The settings that launchers take from environment variables: `coat_launch.cluster` describes them."""

import functools
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from coat_launch import config_path
from coat_launch.json_file import read_object

# keys of MODEL_CONFIG that are read here
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
KINDS = ("torchrun", "deepspeed", "megatron")
LAUNCHERS = ("pdsh", "openmpi", "slurm")
HOST = r"[\w.:][\w.:-]*"


class ClusterError(ValueError):
    """Settings or a node that cannot be used; the message names them and the fix."""


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
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def hostfile(self) -> str:
        """DeepSpeed's hostfile: `hosts`, each with GPUS_PER_NODE slots."""
        return f"{self.output}/deepspeed_hosts"

    @classmethod
    def from_environment(cls, kind: str, env: dict[str, str]) -> "Settings":
        """Raises ClusterError, naming the variable, for invalid values."""
        number = functools.partial(_number, env)
        launcher = env.get("LAUNCHER", "pdsh")
        if launcher not in LAUNCHERS:
            raise ClusterError(f"LAUNCHER: expected one of {', '.join(LAUNCHERS)}, found {launcher!r}")
        gpus = _gpu_count() or 1
        hosts = _slots_by_host(kind, launcher, env, gpus)
        nodes, rank = _nodes_and_rank(kind, launcher, env, hosts)
        master_addr = _master_addr(env, hosts, nodes)
        if kind == "megatron" and not env.get("MEGATRON_PATH"):
            raise ClusterError("MEGATRON_PATH: expected the path of a checkout of Megatron-LM, found none")
        job = env.get("JOB") or "coat"
        # torchrun creates a folder of this name
        if not re.fullmatch(r"[\w.@+:-]+", job):
            raise ClusterError(f"JOB: expected letters, digits and any of . _ @ + : -, found {job!r}")
        settings = cls(
            kind=kind,
            nodes=nodes,
            node_rank=rank,
            gpus_per_node=number("GPUS_PER_NODE", next(iter(hosts.values()), gpus)),
            hosts=tuple(hosts)[:nodes],
            launcher=launcher,
            master_addr=master_addr,
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
            job=job,
            megatron_path=env.get("MEGATRON_PATH"),
        )
        settings._check_sizes(env.get("DATA_SIZE"))
        return settings

    def shape(self) -> dict:
        try:
            shape = read_object(self.model_config)
            for key in SIZES:
                if type(shape.get(key)) is not int or shape[key] < 1:
                    found = repr(shape[key]) if key in shape else "none"
                    raise ValueError(f"{key}: expected a whole number of at least 1, found {found}")
        except ValueError as error:
            raise ClusterError(f"MODEL_CONFIG {self.model_config}: {error}") from error
        return shape

    def _check_sizes(self, data_size: str | None) -> None:
        if self.kind != "megatron" and self.pipeline_size > 1:
            raise ClusterError(
                f"PIPELINE_SIZE: {self.pipeline_size}, but launch/pretrain_gpt.py has no pipeline: use "
                "megatron_pretrain.sh, or 1"
            )
        model = self.tensor_size * self.pipeline_size
        if self.world_size % model:
            raise ClusterError(
                f"TENSOR_SIZE {self.tensor_size} times PIPELINE_SIZE {self.pipeline_size} does not divide "
                f"the {self.world_size} processes ({self.nodes} nodes of {self.gpus_per_node})"
            )
        if data_size and data_size != str(self.world_size // model):
            raise ClusterError(
                f"DATA_SIZE: {data_size}, but {self.world_size} processes in groups of {model} leave "
                f"{self.world_size // model}"
            )
        shape = self.shape()
        for name, key, size in (
            ("TENSOR_SIZE", "num_attention_heads", self.tensor_size),
            ("TENSOR_SIZE", "num_query_groups", self.tensor_size),
            ("TENSOR_SIZE", "ffn_hidden_size", self.tensor_size),
            ("PIPELINE_SIZE", "num_layers", self.pipeline_size),
        ):
            if shape[key] % size:
                raise ClusterError(
                    f"{name}: {size} does not divide {key} {shape[key]} of {self.model_config}"
                )


def _number(env: dict[str, str], name: str, default: int, least: int = 1, most: int = 10**9) -> int:
    text = env.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        limits = f"of at least {least}" if most == 10**9 else f"from {least} to {most}"
        raise ClusterError(f"{name}: expected a whole number {limits}, found {text[:60]!r}")
    return int(text)


def _slots_by_host(kind: str, launcher: str, env: dict[str, str], gpus: int) -> dict[str, int]:
    """The slots by host in HOSTFILE or Slurm's allocation, for DeepSpeed's launcher; else empty."""
    hostfile = env.get("HOSTFILE")
    if kind != "deepspeed":
        return {}
    if launcher == "slurm":
        if hostfile:
            raise ClusterError(f"HOSTFILE {hostfile}: slurm takes the nodes of the allocation, leave it out")
        return dict.fromkeys(_allocated_nodes(env), gpus)
    hosts = _read_hostfile(Path(hostfile)) if hostfile else {}
    if len(set(hosts.values())) > 1:
        raise ClusterError(f"HOSTFILE {hostfile}: expected the same slots on each host, found {hosts}")
    return hosts


def _nodes_and_rank(kind: str, launcher: str, env: dict[str, str], hosts: dict[str, int]) -> tuple[int, int]:
    """The number of nodes, and the index of this node."""
    nodes = _number(env, "NODES", len(hosts) or _number(env, "SLURM_NNODES", 1))
    if hosts and nodes > len(hosts):
        place = "the allocation" if launcher == "slurm" else f"HOSTFILE {env['HOSTFILE']}"
        raise ClusterError(f"NODES: {nodes}, but {place} has {len(hosts)} hosts")
    if kind == "deepspeed" and nodes > 1 and not hosts:
        raise ClusterError(f"HOSTFILE: {launcher} needs it for {nodes} nodes: a file of lines 'host slots=n'")
    rank = _number(env, "NODE_RANK", _number(env, "SLURM_NODEID", 0, 0), 0)
    if rank >= nodes:
        raise ClusterError(f"NODE_RANK: expected less than NODES ({nodes}), found {rank}")
    return nodes, rank


def _master_addr(env: dict[str, str], hosts: dict[str, int], nodes: int) -> str:
    master = env.get("MASTER_ADDR") or next(iter(hosts), None)
    if master is None and nodes > 1:
        raise ClusterError(f"MASTER_ADDR: expected the address of node 0, for there are {nodes} nodes")
    if not re.fullmatch(HOST, master or "127.0.0.1"):
        raise ClusterError(f"MASTER_ADDR: expected a name or an address of a host, found {master!r}")
    return master or "127.0.0.1"


def _read_hostfile(path: Path) -> dict[str, int]:
    try:
        lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    except OSError as error:
        raise ClusterError(f"HOSTFILE {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ClusterError(
            f"HOSTFILE {path}: expected text, found byte 0x{error.object[error.start]:02x} at {error.start}: "
            "give a file of lines 'host slots=n'"
        ) from error
    hosts = {}
    for line in filter(None, lines):
        slots = re.fullmatch(r"slots=([1-9][0-9]{0,5})", line[1]) if len(line) == 2 else None
        # a name that begins with "-" would be parsed as an option of ssh
        if slots is None or not re.fullmatch(HOST, line[0]) or line[0] in hosts:
            raise ClusterError(f"HOSTFILE {path}: expected lines 'host slots=n', found {' '.join(line)!r}")
        hosts[line[0]] = int(slots[1])
    if not hosts:
        raise ClusterError(f"HOSTFILE {path}: expected lines 'host slots=n', found none")
    return hosts


def _allocated_nodes(env: dict[str, str]) -> list[str]:
    if "SLURM_JOB_NODELIST" not in env:
        raise ClusterError(
            "LAUNCHER: slurm needs an allocation: start this inside salloc or sbatch, or submit "
            "launch/slurm.sbatch"
        )
    show = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
    try:
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise ClusterError(f"LAUNCHER: slurm needs `{shlex.join(show)}` to work here ({why})") from error


def parameter_count(shape: dict, vocab_size: int) -> int:
    """Parameters of a `megatron_ext.model.ModelShape` given as a dict."""
    h, f = shape["hidden_size"], shape["ffn_hidden_size"]
    kv = h * shape["num_query_groups"] // shape["num_attention_heads"]
    # query and output, key and value, the gated product's three, two norms
    layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    tables = 2 if shape.get("untie_embeddings_and_output_weights", True) else 1
    return shape["num_layers"] * layer + tables * vocab_size * h + h


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
