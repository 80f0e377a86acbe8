#!/usr/bin/env bash
# Trains by Megatron-LM's own pretrain_gpt.py with this project's layers and optimizer, on every node started
# as torchrun_multinode.sh is:
#
#     MEGATRON_PATH=/src/Megatron-LM TENSOR_SIZE=2 DATA=/data/corpus TOKENIZER=/data/tokenizer \
#         launch/megatron_pretrain.sh --global-batch-size 256
#
# All variables: launch/cluster.py. --dry-run prints the commands of all nodes; other arguments go to
# Megatron's script, after those made here, so that they win.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/cluster.py" megatron "$@"
