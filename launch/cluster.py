"""What the scripts of this folder start on each node, and what they look at before.

    python launch/cluster.py torchrun|deepspeed|megatron [--dry-run] [arguments of the training script]

Settings come from environment variables:

    NODES            number of nodes; from HOSTFILE or Slurm where there is one, else 1
    NODE_RANK        which of them this is, from 0 (torchrun, megatron)
    GPUS_PER_NODE    processes a node (default: slots of HOSTFILE, GPUs of the node that starts this, or 1)
    HOSTFILE         lines "host slots=n"; hosts are reached by ssh (deepspeed)
    LAUNCHER         pdsh, openmpi, or slurm inside an allocation, without HOSTFILE (deepspeed; default pdsh)
    MASTER_ADDR      address of node 0; its name in HOSTFILE or the allocation where there is one (deepspeed),
                     else 127.0.0.1 for a single node
    MASTER_PORT      first of two free ports there (default 29500)
    INTERFACE        network interface of NCCL, gloo and the rendezvous, as "eth0"
    TENSOR_SIZE      tensor parallel size (default 1)
    PIPELINE_SIZE    pipeline parallel size (megatron; default 1)
    DATA_SIZE        data parallel size: what the others leave; given, it is checked
    MODEL_CONFIG     default configs/model_quickstart.json
    DEEPSPEED_CONFIG default configs/ds_zero1_coat.json
    DATA             paths of the data, separated by ":" (default: what the training script does without)
    TOKENIZER        tokenizer.json
    SEQ_LENGTH       default 128
    STEPS            default 120
    SAVE_INTERVAL    steps between checkpoints (default 100)
    OUTPUT           folder that all nodes see (default runs/gpt)
    MAX_RESTARTS     how often torchrun starts all ranks again after a failure (default 0)
    JOB              name of the rendezvous, the same on all nodes (default coat)
    PYTHON           the interpreter, at the same path on all nodes
    MEGATRON_PATH    checkout of Megatron-LM (megatron)
    SPEC             module of the layer spec (megatron; default megatron_ext.with_optimizer)

Every node is looked at first: versions, GPUs, sizes, disk, NCCL's variables; `--dry-run` prints what each
would run instead. Both need the network only where there is more than one node.
"""

import argparse
import fcntl
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launch.json_file import read_object  # noqa: E402

# keys of MODEL_CONFIG that are needed here
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
KINDS = ("torchrun", "deepspeed", "megatron")
LAUNCHERS = ("pdsh", "openmpi", "slurm")
# beginnings of the names of variables that DeepSpeed's launcher hands to other nodes by itself
HANDED_ON = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
# characters of variables that do not reach the ranks as they are. DeepSpeed quotes all but a few for a shell,
# which is not there with two of the launchers, and srun cuts at commas. With pdsh there is one, but the file
# of variables has a line for each, of which DeepSpeed strips the ends.
SPOILT = {
    "openmpi": r"[^\w@%+=:,./-]",
    "slurm": r"[^\w@%+=:./-]",
    "pdsh": r"[\r\n]|^\s|\s$",
}
# what DeepSpeed puts into pdsh's command without quotes, though a shell reads it and pdsh expands "%"
UNQUOTED = r"[\w@+=:,./-]+"
HOST = r"[\w.:][\w.:-]*"


class ClusterError(ValueError):
    """Settings or a node that cannot be used; the message names them and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The variables of the module's description."""

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
    spec: str

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def hostfile(self) -> str:
        """What DeepSpeed's launcher reads: `hosts`, each with as many slots as GPUS_PER_NODE says."""
        return f"{self.output}/deepspeed_hosts"

    @classmethod
    def from_environment(cls, kind: str, env: dict[str, str]) -> "Settings":
        """Raises ClusterError, naming the variable, for what cannot be honoured."""

        def number(name: str, default: int, least: int = 1, most: int = 10**9) -> int:
            text = env.get(name, str(default))
            if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
                limits = f"of at least {least}" if most == 10**9 else f"from {least} to {most}"
                raise ClusterError(f"{name}: expected a whole number {limits}, found {text[:60]!r}")
            return int(text)

        hostfile = env.get("HOSTFILE") if kind == "deepspeed" else None
        launcher = env.get("LAUNCHER", "pdsh")
        if launcher not in LAUNCHERS:
            raise ClusterError(f"LAUNCHER: expected one of {', '.join(LAUNCHERS)}, found {launcher!r}")
        gpus = _gpu_count() or 1
        if kind == "deepspeed" and launcher == "slurm":
            if hostfile:
                raise ClusterError(
                    f"HOSTFILE {hostfile}: slurm takes the nodes of the allocation, leave it out"
                )
            hosts = dict.fromkeys(_allocated_nodes(env), gpus)
        else:
            hosts = _read_hostfile(Path(hostfile)) if hostfile else {}
        if len(set(hosts.values())) > 1:
            raise ClusterError(f"HOSTFILE {hostfile}: expected as many slots on each host, found {hosts}")
        slots = next(iter(hosts.values()), gpus)
        nodes = number("NODES", len(hosts) or number("SLURM_NNODES", 1))
        if hosts and nodes > len(hosts):
            place = f"HOSTFILE {hostfile}" if hostfile else "the allocation"
            raise ClusterError(f"NODES: {nodes}, but {place} has {len(hosts)} hosts")
        if kind == "deepspeed" and nodes > 1 and not hosts:
            raise ClusterError(
                f"HOSTFILE: {launcher} needs it for {nodes} nodes: a file of lines 'host slots=n'"
            )
        rank = number("NODE_RANK", number("SLURM_NODEID", 0, 0), 0)
        if rank >= nodes:
            raise ClusterError(f"NODE_RANK: expected less than NODES ({nodes}), found {rank}")
        master = env.get("MASTER_ADDR") or next(iter(hosts), None)
        if master is None and nodes > 1:
            raise ClusterError(f"MASTER_ADDR: expected the address of node 0, for there are {nodes} nodes")
        if kind == "megatron" and not env.get("MEGATRON_PATH"):
            raise ClusterError("MEGATRON_PATH: expected the path of a checkout of Megatron-LM, found none")
        if not re.fullmatch(HOST, master or "127.0.0.1"):
            raise ClusterError(f"MASTER_ADDR: expected a name or an address of a host, found {master!r}")
        job = env.get("JOB") or "coat"
        # torchrun makes a folder of this name
        if not re.fullmatch(r"[\w.@+:-]+", job):
            raise ClusterError(f"JOB: expected letters, digits and any of . _ @ + : -, found {job!r}")
        settings = cls(
            kind=kind,
            nodes=nodes,
            node_rank=rank,
            gpus_per_node=number("GPUS_PER_NODE", slots),
            hosts=tuple(hosts)[:nodes],
            launcher=launcher,
            master_addr=master or "127.0.0.1",
            # the next one is taken too
            master_port=number("MASTER_PORT", 29500, 1, 2**16 - 2),
            interface=env.get("INTERFACE") or None,
            tensor_size=number("TENSOR_SIZE", 1),
            pipeline_size=number("PIPELINE_SIZE", 1),
            model_config=env.get("MODEL_CONFIG", str(ROOT / "configs/model_quickstart.json")),
            deepspeed_config=env.get("DEEPSPEED_CONFIG", str(ROOT / "configs/ds_zero1_coat.json")),
            # a path that begins with "-" would be an option
            data=tuple(f"./{p}" if p.startswith("-") else p for p in env.get("DATA", "").split(":") if p),
            tokenizer=env.get("TOKENIZER") or None,
            seq_length=number("SEQ_LENGTH", 128),
            steps=number("STEPS", 120),
            save_interval=number("SAVE_INTERVAL", 100),
            output=os.path.abspath(env.get("OUTPUT") or "runs/gpt"),
            max_restarts=number("MAX_RESTARTS", 0, 0),
            job=job,
            megatron_path=env.get("MEGATRON_PATH"),
            spec=env.get("SPEC", "megatron_ext.with_optimizer"),
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
        # a name that begins with "-" would be an option to ssh
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


def environment(settings: Settings, env: dict[str, str]) -> dict[str, str]:
    """The variables that a node's processes get besides what they have."""
    out = {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")}
    # the store of torch 2.13's agents outlives a restart, and gloo then waits for ranks that are gone
    out["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    paths = [str(ROOT), *([settings.megatron_path] if settings.megatron_path else [])]
    out["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    if settings.interface:
        out["NCCL_SOCKET_IFNAME"] = out["GLOO_SOCKET_IFNAME"] = settings.interface
    if settings.kind == "deepspeed":
        # neither mpirun nor srun tells the ranks
        out |= {"MASTER_ADDR": settings.master_addr, "MASTER_PORT": str(settings.master_port)}
    if settings.tensor_size > 1:
        # kernels run in the order of their launch
        out["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return out


def check_handed_on(settings: Settings, env: dict[str, str], own: dict[str, str], words: list[str]) -> None:
    """Raises ClusterError for a value that DeepSpeed's launcher would change on its way to the ranks.

    env, own: the environment's variables, and those that are set besides.
    words: the arguments of the training script.
    """
    if not settings.hosts:
        return

    def refuse(name: str, value: str, found: str, way_out: str) -> None:
        raise ClusterError(
            f"{name}: {value!r} would not reach the ranks as it is by LAUNCHER={settings.launcher}, for "
            f"{found!r} in it. {way_out}"
        )

    others = {"openmpi": "LAUNCHER=pdsh", "slurm": "launch/slurm.sbatch", "pdsh": "LAUNCHER=openmpi"}
    elsewhere = f"Leave that out, or use {others[settings.launcher]}"
    for name, value in _handed_on(env, own).items():
        if spoilt := re.search(SPOILT[settings.launcher], value):
            refuse(name, value, spoilt[0], elsewhere)
    if settings.launcher == "openmpi" and ":" in words:
        refuse(
            "argument of the training script", ":", ":", "mpirun takes it for the start of another program"
        )
    if settings.launcher == "pdsh":
        for name, value in (("folder to start in", os.getcwd()), ("PYTHON", sys.executable)):
            if not re.fullmatch(UNQUOTED, value):
                spoilt = next(c for c in value if not re.fullmatch(UNQUOTED, c))
                refuse(name, value, spoilt, elsewhere)
        for name in _handed_on(env, own):
            if not name.isidentifier():
                refuse("variable", name, next(c for c in name if not f"_{c}".isidentifier()), elsewhere)


def _handed_on(env: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """The variables that DeepSpeed's launcher sets on other nodes."""
    return {name: value for name, value in env.items() if name.startswith(HANDED_ON)} | own


def _for_pdsh(word: str) -> str:
    """What becomes `word` on its way through DeepSpeed's launcher, pdsh and the shell at the other end."""
    word = word.replace("%", "%%")
    # DeepSpeed puts double quotes around an argument with a blank, and escapes none but those in it
    return re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word)


def _for_torchrun(word: str) -> str:
    # torchrun fills "$local_rank" in, and so makes one "$" of two
    return word.replace("$", "$$")


def command(settings: Settings, node_rank: int, extra: list[str]) -> list[str]:
    """What starts training on a node; with `deepspeed`, on the node that starts all.

    extra: arguments of the training script, after those made here.
    """
    script = script_words(settings, extra)
    if settings.kind == "deepspeed":
        if settings.hosts and settings.launcher == "pdsh":
            # of the script's own path DeepSpeed quotes nothing
            script = [shlex.quote(script[0].replace("%", "%%")), *map(_for_pdsh, script[1:])]
        if settings.hosts:
            places = [f"--hostfile={settings.hostfile}", "--force_multi", f"--launcher={settings.launcher}"]
            # preflight has reached all of them, under Slurm not by ssh
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
    # what the interface's address is on another node is not known here
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
    """The training script and its arguments, as every rank should see them."""
    if settings.kind == "megatron":
        return [f"{settings.megatron_path}/pretrain_gpt.py", *_megatron_arguments(settings), *extra]
    return [str(ROOT / "launch/pretrain_gpt.py"), *_pretrain_arguments(settings), *extra]


def _launcher_arguments(s: Settings) -> list[str]:
    """What mpirun and srun get besides what DeepSpeed gives them."""
    if s.launcher == "openmpi":
        # ranks fill a node before the next; mpirun would bind each with all its threads to one core
        places = ["--map-by", "slot", "--bind-to", "none"]
        # of the daemons, for MPI itself is not used
        return places + (["--mca", "oob_tcp_if_include", s.interface] if s.interface else [])
    if s.launcher == "slurm":
        # the first node is MASTER_ADDR; srun would let ranks wait for one that has failed, and with
        # --kill-on-bad-exit would kill those that are about to leave like it, after a checkpoint
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
        *("--spec", s.spec, "coat_layer_spec"),
    ]


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _address(interface: str | None) -> str | None:
    """The interface's IPv4 address on this node; None for no interface or one without."""
    if interface is None:
        return None
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--dry-run", action="store_true", help="print what every node would run")
    args, extra = parser.parse_known_args(argv)
    from launch import preflight

    env = dict(os.environ)
    try:
        settings = Settings.from_environment(args.kind, env)
        own = environment(settings, env)
        check_handed_on(settings, env, own, script_words(settings, extra))
        if args.dry_run:
            started = range(1 if settings.kind == "deepspeed" else settings.nodes)
            for rank in started:
                names = " ".join(settings.hosts) or f"node {rank} of {settings.nodes}"
                print(f"# {names}")
                print(
                    shlex.join(
                        ["env", *(f"{k}={v}" for k, v in own.items()), *command(settings, rank, extra)]
                    )
                )
            return
        preflight.check(settings, env)
        if settings.hosts:
            own["DS_ENV_FILE"] = _write_for_deepspeed(settings, env, own)
    except ClusterError as error:
        sys.exit(f"error: {error}")
    # the agents ignore what the ranks answer by a checkpoint
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    argv = command(settings, settings.node_rank, extra)
    os.execvpe(argv[0], argv, {**env, **own})


def _write_for_deepspeed(settings: Settings, env: dict[str, str], own: dict[str, str]) -> str:
    """Writes hostfile and variables. DeepSpeed hands a few of its own choice to other nodes, and this file's,
    which win over them: so all are in it.
    """
    path = Path(settings.output) / "deepspeed_env"
    variables = _handed_on(env, own)
    if settings.launcher == "pdsh":
        # DeepSpeed puts double quotes around what is not plain, and escapes nothing
        quoted = {name: re.sub(r'([\\$`"])', r"\\\1", value) for name, value in variables.items()}
        variables = {name: value.replace("%", "%%") for name, value in quoted.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        slots = settings.gpus_per_node
        Path(settings.hostfile).write_text("".join(f"{host} slots={slots}\n" for host in settings.hosts))
    except (OSError, UnicodeEncodeError) as error:
        raise ClusterError(f"OUTPUT {settings.output}: cannot write {path.name} there ({error})") from error
    return str(path)


if __name__ == "__main__":
    # the module that launch.preflight knows, not this second copy
    from launch.cluster import main as start

    start(sys.argv[1:])
