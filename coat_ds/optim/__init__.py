"""AdamW whose moments are stored in eight bits each, for any framework.

It may import `coat_kernels` and the config, and nothing of DeepSpeed, Megatron or their adapters. Start at
optimizer.py.

- a step: step, host_states, host_memory, release, narrow_grad
- options, and what is refused: options, checks
- a moment: layouts, states, moment, tensor, pieces, shards
- checkpoints: stored_moment, saving, loading, recover
- the log: accounting
"""
