"""A node's command and its environment."""

import socket
import sys
from pathlib import Path

import psutil

from coat_launch.settings import Settings

SCRIPT = Path(__file__).resolve().with_name("pretrain_gpt.py")
# seconds that nodes wait for each other
PATIENCE = 300


def environment(settings: Settings, env: dict[str, str]) -> dict[str, str]:
    """The variables that a node's processes get in addition to their own."""
    out = {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")}
    # the store of torch 2.13's agents outlives a restart, and gloo then waits for ranks that no longer exist
    out["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if settings.interface:
        out["NCCL_SOCKET_IFNAME"] = out["GLOO_SOCKET_IFNAME"] = settings.interface
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
    return [str(SCRIPT), "--resume", "--save-interval=100", f"--output={settings.output}", *extra]


def _address(interface: str | None) -> str | None:
    """The interface's IPv4 address on this node; None without an interface or without an address."""
    found = psutil.net_if_addrs().get(interface, [])
    return next((address.address for address in found if address.family == socket.AF_INET), None)
