#!/usr/bin/env bash
# Trains on several nodes through torchrun. Start it on every node, with the same variables but NODE_RANK:
#
#     NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 INTERFACE=eth0 OUTPUT=/shared/run launch/torchrun_multinode.sh
#
#     NODES            number of nodes; Slurm's where there is one, else 1
#     NODE_RANK        index of this node, from 0
#     GPUS_PER_NODE    processes a node (default: the node's GPUs, or 1)
#     MASTER_ADDR      address of node 0 (default: 127.0.0.1 for a single node)
#     MASTER_PORT      a free port there (default 29500)
#     INTERFACE        network interface of NCCL, gloo and the rendezvous, as "eth0"
#     OUTPUT           folder that all nodes share (default runs/gpt)
#     MAX_RESTARTS     number of times that torchrun restarts all ranks after a failure (default 0)
#     JOB              name of the rendezvous, the same on all nodes (default coat)
#     PYTHON           the interpreter (default python3)
#
# Arguments go to launch/pretrain_gpt.py. The run saves every 100 steps, or by --save-interval, and resumes.
# --dry-run, as the first argument, prints the node's command instead.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 1; }

# name, value, the smallest and the largest number
number() {
    if ! [[ "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3 || $2 > $4)); then
        fail "$1: expected a whole number from $3 to $4, found '$2'"
    fi
}

python="${PYTHON:-python3}"
nodes="${NODES:-${SLURM_NNODES:-1}}"
node="${NODE_RANK:-${SLURM_NODEID:-0}}"
number NODES "$nodes" 1 99999
number NODE_RANK "$node" 0 "$((nodes - 1))"
number MASTER_PORT "${MASTER_PORT:-29500}" 1 65535
number MAX_RESTARTS "${MAX_RESTARTS:-0}" 0 99999
gpus="${GPUS_PER_NODE:-$("$python" -c "import torch; print(torch.cuda.device_count() or 1)")}"
number GPUS_PER_NODE "$gpus" 1 999
[[ "$nodes" == 1 || -n "${MASTER_ADDR:-}" ]] || fail "MASTER_ADDR: expected the address of node 0, found none"

# 300: seconds that nodes wait for each other
torchrun=(
    "$python" -m torch.distributed.run "--nnodes=$nodes" "--nproc-per-node=$gpus" --rdzv-backend=c10d
    "--rdzv-endpoint=${MASTER_ADDR:-127.0.0.1}:${MASTER_PORT:-29500}" "--rdzv-id=${JOB:-coat}"
    "--rdzv-conf=is_host=$((node == 0)),join_timeout=300,read_timeout=300" "--max-restarts=${MAX_RESTARTS:-0}"
)
if [[ -n "${INTERFACE:-}" ]]; then
    [[ -e "/sys/class/net/$INTERFACE" ]] || fail "INTERFACE: expected one of $(cd /sys/class/net && echo *), found $INTERFACE"
    export NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
    address="$("$python" -c "if True:
        import psutil, socket, sys
        found = psutil.net_if_addrs().get(sys.argv[1], [])
        print(next((a.address for a in found if a.family == socket.AF_INET), ''))" "$INTERFACE")"
    [[ -z "$address" ]] || torchrun+=("--local-addr=$address")
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# the store of torch 2.13's agents outlives a restart, and gloo then waits for ranks that no longer exist
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# the ranks save a checkpoint at this signal; torchrun ignores it
trap "" USR1

dry_run=
if [[ "${1:-}" == --dry-run ]]; then
    dry_run=1
    shift
fi
script="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/pretrain_gpt.py"
# processes of other nodes start in other folders
words=("$script" --resume --save-interval=100 "--output=$(realpath -ms -- "${OUTPUT:-runs/gpt}")" "$@")
# torchrun expands "$local_rank", and turns "$$" into "$"
torchrun+=("${words[@]//\$/\$\$}")
if [[ -n "$dry_run" ]]; then
    printf "%q " "${torchrun[@]}"
    exit
fi
exec "${torchrun[@]}"
