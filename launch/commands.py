"""A node's command and its environment, and checks for values that DeepSpeed's launcher would change."""

import os
import re
import shlex
import socket
import sys
from pathlib import Path

import psutil

from coat_launch.errors import LaunchError
from coat_launch.files import writing
from coat_launch.settings import Settings

# this project's scripts
HERE = Path(__file__).resolve().parent
# prefixes of the variables that DeepSpeed's launcher passes to other nodes by itself
HANDED_ON = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
# the characters that DeepSpeed and its launchers pass on as they are: pdsh expands "%", srun splits at ",",
# and mpirun and srun know no quotes
UNCHANGED = {"pdsh": r"[\w@^+=:,./-]*", "openmpi": r"[\w@%+=:,./-]*", "slurm": r"[\w@%+=:./-]*"}


def environment(settings: Settings, env: dict[str, str]) -> dict[str, str]:
    """The variables that a node's processes get in addition to their own."""
    out = {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")}
    # the store of torch 2.13's agents outlives a restart, and gloo then waits for ranks that no longer exist
    out["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if settings.megatron_path:
        paths = [settings.megatron_path, *filter(None, [env.get("PYTHONPATH")])]
        out["PYTHONPATH"] = os.pathsep.join(paths)
    if settings.interface:
        out["NCCL_SOCKET_IFNAME"] = out["GLOO_SOCKET_IFNAME"] = settings.interface
    if settings.kind == "deepspeed":
        # neither mpirun nor srun sets them
        out |= {"MASTER_ADDR": settings.master_addr, "MASTER_PORT": str(settings.master_port)}
    if settings.tensor_size > 1:
        # kernels run in the order of their launch
        out["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return out


def check_handed_on(settings: Settings, env: dict[str, str], own: dict[str, str], words: list[str]) -> None:
    """Raises LaunchError for a value that DeepSpeed's launcher would change on its way to the ranks.

    env, own: the environment's variables, and the variables that are set in addition.
    words: the training script and its arguments.
    """
    if not settings.hosts:
        return
    places = {"folder to start in": os.getcwd(), "PYTHON": sys.executable}
    arguments = {f"argument {number}": word for number, word in enumerate(words)}
    for name, value in (places | arguments | _handed_on(env, own)).items():
        if not re.fullmatch(UNCHANGED[settings.launcher], value):
            raise LaunchError(
                f"{name}: {value!r} would be changed by LAUNCHER={settings.launcher}, which passes on only "
                f"{UNCHANGED[settings.launcher]}. Leave the rest out, or use torchrun_multinode.sh or "
                "slurm.sbatch"
            )


def _handed_on(env: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """The variables that DeepSpeed's launcher sets on other nodes."""
    return {name: value for name, value in env.items() if name.startswith(HANDED_ON)} | own


def _for_torchrun(word: str) -> str:
    # torchrun expands "$local_rank", and thereby turns "$$" into "$"
    return word.replace("$", "$$")


def command(settings: Settings, node_rank: int, extra: list[str]) -> list[str]:
    """The command that starts training on a node; with `deepspeed`, on the node that starts all nodes.

    extra: arguments of the training script, appended to the ones from the settings.
    """
    script = script_words(settings, extra)
    if settings.kind == "deepspeed":
        if settings.hosts:
            places = [f"--hostfile={settings.hostfile}", "--force_multi", f"--launcher={settings.launcher}"]
            # preflight has reached all nodes, under Slurm not by ssh
            places.append("--no_ssh_check")
            if words := _launcher_arguments(settings):
                places.append(f"--launcher_args={shlex.join(words)}")
        else:
            places = [f"--num_gpus={settings.gpus_per_node}"]
        return [
            *(sys.executable, "-m", "deepspeed.launcher.runner"),
            *places,
            f"--master_addr={settings.master_addr}",
            f"--master_port={settings.master_port}",
            *script,
        ]
    # the interface's address is known on this node only
    address = _address(settings.interface) if node_rank == settings.node_rank else None
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={settings.nodes}",
        f"--nproc-per-node={settings.gpus_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={settings.master_addr}:{settings.master_port}",
        f"--rdzv-id={settings.job}",
        f"--rdzv-conf=is_host={int(node_rank == 0)}",
        f"--max-restarts={settings.max_restarts}",
        *([f"--local-addr={address}"] if address else []),
        *map(_for_torchrun, script),
    ]


def script_words(settings: Settings, extra: list[str]) -> list[str]:
    """The training script and its arguments, as every rank has to receive them."""
    if settings.kind == "megatron":
        return [f"{settings.megatron_path}/pretrain_gpt.py", *_megatron_arguments(settings), *extra]
    return [str(HERE / "pretrain_gpt.py"), *_pretrain_arguments(settings), *extra]


def _launcher_arguments(s: Settings) -> list[str]:
    """The arguments of mpirun and srun in addition to DeepSpeed's."""
    if s.launcher == "openmpi":
        # ranks fill a node before the next; by default mpirun would bind each rank and its threads to one
        # core
        places = ["--map-by", "slot", "--bind-to", "none"]
        # for mpirun's daemons: the ranks do not use MPI
        return places + (["--mca", "oob_tcp_if_include", s.interface] if s.interface else [])
    if s.launcher == "slurm":
        # The first node is MASTER_ADDR. By default srun would let ranks wait for one that has failed, and
        # with --kill-on-bad-exit it would kill ranks that are about to exit in the same way after a
        # checkpoint.
        nodes = [f"--nodes={s.nodes}", f"--nodelist={','.join(s.hosts)}"]
        return [*nodes, f"--ntasks-per-node={s.gpus_per_node}", "--wait=60"]
    return []


def _pretrain_arguments(s: Settings) -> list[str]:
    return [
        f"--model-config={s.model_config}",
        f"--deepspeed-config={s.deepspeed_config}",
        *(["--data", *s.data] if s.data else []),
        *([f"--tokenizer={s.tokenizer}"] if s.tokenizer else []),
        f"--seq-length={s.seq_length}",
        f"--steps={s.steps}",
        f"--tensor-model-parallel-size={s.tensor_size}",
        f"--output={s.output}",
        f"--save-interval={s.save_interval}",
        "--resume",
    ]


def _megatron_arguments(s: Settings) -> list[str]:
    shape = s.shape()
    flags = {
        "num-layers": shape["num_layers"],
        "hidden-size": shape["hidden_size"],
        "ffn-hidden-size": shape["ffn_hidden_size"],
        "num-attention-heads": shape["num_attention_heads"],
        "num-query-groups": shape["num_query_groups"],
        "rotary-base": shape.get("rotary_base", 10000),
        "norm-epsilon": shape.get("layernorm_epsilon", 1e-5),
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "seq-length": s.seq_length,
        "max-position-embeddings": s.seq_length,
        "tensor-model-parallel-size": s.tensor_size,
        "pipeline-model-parallel-size": s.pipeline_size,
        "train-iters": s.steps,
        "eval-interval": s.save_interval,
        "save-interval": s.save_interval,
        "save": f"{s.output}/megatron",
        "load": f"{s.output}/megatron",
        "micro-batch-size": 1,
        "lr": 3e-4,
        "log-interval": 1,
    }
    switches = ["bf16", "swiglu", "disable-bias-linear", "group-query-attention", "use-distributed-optimizer"]
    switches += ["no-gradient-accumulation-fusion", "no-rope-fusion", "exit-signal-handler"]
    if shape.get("untie_embeddings_and_output_weights", True):
        switches.append("untie-embeddings-and-output-weights")
    if s.tensor_size > 1:
        switches.append("sequence-parallel")
    if s.data:
        data = ["--data-path", *s.data]
        data += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", s.tokenizer or ""]
    else:
        data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "8191"]
    return [
        *(item for name, value in flags.items() for item in (f"--{name}", str(value))),
        *(f"--{name}" for name in switches),
        *data,
        *("--spec", "megatron_ext.spec", "coat_layer_spec"),
    ]


def _address(interface: str | None) -> str | None:
    """The interface's IPv4 address on this node; None without an interface or without an address."""
    found = psutil.net_if_addrs().get(interface, [])
    return next((address.address for address in found if address.family == socket.AF_INET), None)


def write_for_deepspeed(settings: Settings, env: dict[str, str], own: dict[str, str]) -> str:
    """Writes the hostfile and the file of variables; returns the path of the latter. DeepSpeed passes some
    variables of its own choice to other nodes; this file overrides them, so it contains all.
    """
    path = Path(settings.output) / "deepspeed_env"
    with writing(settings.output):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name}={value}\n" for name, value in _handed_on(env, own).items()))
        slots = settings.gpus_per_node
        Path(settings.hostfile).write_text("".join(f"{host} slots={slots}\n" for host in settings.hosts))
    return str(path)
