"""A node's command and its environment."""

import os
import socket
import sys
from pathlib import Path

import psutil

from coat_launch.settings import SIZES, Settings

# this project's scripts
HERE = Path(__file__).resolve().parent
# seconds that nodes wait for each other
PATIENCE = 300


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
    if settings.tensor_size > 1:
        # kernels run in the order of their launch
        out["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return out


def command(settings: Settings, node_rank: int, words: list[str], *, trial: bool = False) -> list[str]:
    """The command that starts processes on a node.

    words: what the processes run. trial: for one process on each node, with the next port.
    """
    processes, port = (1 if trial else settings.gpus_per_node), settings.master_port + trial
    # the interface's address is known on this node only
    address = _address(settings.interface) if node_rank == settings.node_rank else None
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={settings.nodes}",
        f"--nproc-per-node={processes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={settings.address}:{port}",
        f"--rdzv-id={settings.job}",
        f"--rdzv-conf=is_host={int(node_rank == 0)},join_timeout={PATIENCE},read_timeout={PATIENCE}",
        f"--max-restarts={0 if trial else settings.max_restarts}",
        *([f"--local-addr={address}"] if address else []),
        # torchrun expands "$local_rank", and thereby turns "$$" into "$"
        *(word.replace("$", "$$") for word in words),
    ]


def script_words(settings: Settings, extra: list[str]) -> list[str]:
    """The training script and its arguments, as every rank has to receive them."""
    if settings.kind == "megatron":
        return [f"{settings.megatron_path}/pretrain_gpt.py", *_megatron_arguments(settings), *extra]
    return [str(HERE / "pretrain_gpt.py"), *_pretrain_arguments(settings), *extra]


def _pretrain_arguments(s: Settings) -> list[str]:
    return [
        f"--model-config={s.model_config}",
        f"--deepspeed-config={s.deepspeed_config}",
        *(["--data", *s.paths] if s.data else []),
        *([f"--tokenizer={s.tokenizer}"] if s.tokenizer else []),
        f"--seq-length={s.seq_length}",
        f"--steps={s.steps}",
        f"--tensor-model-parallel-size={s.tensor_size}",
        f"--output={s.output}",
        f"--save-interval={s.save_interval}",
        "--resume",
    ]


def _megatron_arguments(s: Settings) -> list[str]:
    shape, folder = s.shape(), f"{s.output}/megatron"
    options = f"""
        --bf16 --swiglu --disable-bias-linear --group-query-attention --use-distributed-optimizer
        --no-gradient-accumulation-fusion --no-rope-fusion --exit-signal-handler
        --normalization RMSNorm --norm-epsilon {shape.get("layernorm_epsilon", 1e-5)}
        --position-embedding-type rope --rotary-base {shape.get("rotary_base", 10000)}
        --attention-dropout 0 --hidden-dropout 0
        --seq-length {s.seq_length} --max-position-embeddings {s.seq_length}
        --tensor-model-parallel-size {s.tensor_size} --pipeline-model-parallel-size {s.pipeline_size}
        --train-iters {s.steps} --micro-batch-size 1 --lr 3e-4 --log-interval 1
        --eval-interval {s.save_interval} --save-interval {s.save_interval}
        --spec megatron_ext.spec coat_layer_spec
    """.split()
    for key in SIZES:
        options += ["--" + key.replace("_", "-"), str(shape[key])]
    if shape.get("untie_embeddings_and_output_weights", True):
        options.append("--untie-embeddings-and-output-weights")
    if s.tensor_size > 1:
        options.append("--sequence-parallel")
    if s.data:
        options += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", s.tokenizer]
        options += ["--data-path", *s.paths]
    else:
        options += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "8191"]
    return [*options, "--save", folder, "--load", folder]


def _address(interface: str | None) -> str | None:
    """The interface's IPv4 address on this node; None without an interface or without an address."""
    found = psutil.net_if_addrs().get(interface, [])
    return next((address.address for address in found if address.family == socket.AF_INET), None)
