#!/usr/bin/env bash
# Trains on several nodes through torchrun. Start it on every node, with the same variables but NODE_RANK:
#
#     NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 INTERFACE=eth0 OUTPUT=/shared/run launch/torchrun_multinode.sh
#
# All variables: launch/cluster.py. --dry-run prints the commands of all nodes; other arguments go to
# launch/pretrain_gpt.py.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/cluster.py" "$@"
