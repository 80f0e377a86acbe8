"""Checks a node and starts `launch/pretrain_gpt.py` on it; the scripts of this folder call it.

    python launch/cluster.py [--dry-run] [arguments of launch/pretrain_gpt.py]

Environment variables describe the cluster:

    NODES            number of nodes; Slurm's where there is one, else 1
    NODE_RANK        index of this node, from 0
    GPUS_PER_NODE    processes a node (default: the node's GPUs, or 1)
    MASTER_ADDR      address of node 0 (default: 127.0.0.1 for a single node)
    MASTER_PORT      first of two free ports there (default 29500)
    INTERFACE        network interface of NCCL, gloo and the rendezvous, as "eth0"
    OUTPUT           folder that all nodes see (default runs/gpt)
    MAX_RESTARTS     number of times that torchrun restarts all ranks after a failure (default 0)
    JOB              name of the rendezvous, the same on all nodes (default coat)
    PYTHON           the interpreter, at the same path on all nodes

The run saves every 100 steps, or by `--save-interval`, and resumes.

Checks of every node come first: versions, GPUs, NCCL's variables. `--dry-run` prints each node's command
instead. Both need the network only with more than one node.
"""

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

try:
    from coat_launch import commands, preflight
    from coat_launch.args import parse_args
    from coat_launch.errors import LaunchError
    from coat_launch.settings import Settings
except ModuleNotFoundError as error:
    if error.name != "coat_launch":
        raise
    clone = Path(__file__).resolve().parents[1]
    way_out = f"run `make setup` in {clone} and take its .venv/bin/python, or `pip install -e {clone}`"
    sys.exit(f"error: coat_launch is not installed for {sys.executable}: {way_out}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dry-run", action="store_true", help="print what every node would run")
    args, extra = parser.parse_known_args(argv)
    env = dict(os.environ)
    try:
        settings = Settings.from_environment(env)
        own = commands.environment(settings, env)
        words = commands.script_words(settings, extra)
        training = parse_args(words[1:])
        if args.dry_run:
            for rank in range(settings.nodes):
                variables = (f"{name}={value}" for name, value in own.items())
                print(f"# node {rank} of {settings.nodes}")
                print(shlex.join(["env", *variables, *commands.command(settings, rank, words)]))
            return
        preflight.check(settings, training, {**env, **own})
    except LaunchError as error:
        sys.exit(f"error: {error}")
    # the ranks react with a checkpoint; the agents ignore the signal
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    argv = commands.command(settings, settings.node_rank, words)
    os.execvpe(argv[0], argv, {**env, **own})


if __name__ == "__main__":
    main(sys.argv[1:])
