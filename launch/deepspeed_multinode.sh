#!/usr/bin/env bash
# Trains on the hosts of a hostfile through DeepSpeed's launcher. Start it once, where ssh reaches all of them:
#
#     HOSTFILE=hosts INTERFACE=eth0 OUTPUT=/shared/run launch/deepspeed_multinode.sh
#
# DeepSpeed's launcher needs pdsh. Its others can start launch/pretrain_gpt.py too: deepspeed --launcher=openmpi ...
#
# All variables: launch/cluster.py. --dry-run prints the command; other arguments go to launch/pretrain_gpt.py.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/cluster.py" deepspeed "$@"
