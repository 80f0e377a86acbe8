#!/usr/bin/env bash
# Trains on the hosts of a hostfile through DeepSpeed's launcher. Start it once, where ssh reaches all of them:
#
#     HOSTFILE=hosts INTERFACE=eth0 OUTPUT=/shared/run launch/deepspeed_multinode.sh
#
# LAUNCHER=openmpi takes mpirun instead of pdsh. With LAUNCHER=slurm, inside an allocation, srun starts the ranks
# and there is no hostfile. DeepSpeed's launcher hands these two no signals: SIGUSR1 and SIGTERM have to go to
# mpirun itself, and to srun's ranks by scancel.
#
# All variables: launch/cluster.py. --dry-run prints the command; other arguments go to launch/pretrain_gpt.py.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/cluster.py" deepspeed "$@"
