#!/usr/bin/env bash
# Trains on the hosts of a hostfile through DeepSpeed's launcher. Start it once, where ssh reaches all of them:
#
#     HOSTFILE=hosts INTERFACE=eth0 OUTPUT=/shared/run launch/deepspeed_multinode.sh
#
# LAUNCHER=openmpi takes mpirun; with LAUNCHER=slurm, inside an allocation, srun starts the ranks and there is no
# hostfile. SIGUSR1 has to go to pdsh's ranks, to mpirun, or by `scancel --signal=USR1 JOB` to srun's: DeepSpeed's
# launcher hands none on.
#
# All variables: launch/cluster.py. --dry-run prints the command; other arguments go to launch/pretrain_gpt.py.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/cluster.py" deepspeed "$@"
