"""AdamW whose moments are stored in eight bits each, for any framework.

It may import `coat_kernels` and the config. Start at optimizer.py.

    optimizer.py     CoatAdamW
    options.py       its options: names, choices, what they mean for a moment
    checks.py        which tensors, and which changes of options between steps, it refuses
    states.py        the state of one parameter: created, completed, converted
    step.py          the update of one parameter group by `coat_kernels.adamw`
    host_states.py   states in host memory that stream through the GPU
    host_memory.py   pinned host memory, and how much of it there is
    release.py       steps during backward, which free gradients
    layouts.py       how the moments of each tensor, or of parts of parameters in flat partitions, are stored
    moment.py        the moments in `state[p]`: FP32 tensors to every caller, codes inside; relative codes
    tensor.py        how operations of torch on moments are carried out
    pieces.py        what is stored: codes, scales, exponents
    stored_moment.py moments in state dicts: FP32, or as they are stored
    saving.py        moments that are decoded one by one while a file is written
    loading.py       load_state_dict: which state dicts are refused, and how the others are loaded
    recover.py       codes recovered from FP32 values
    narrow_grad.py   gradients that look FP32 and are BF16 or FP16
    shards.py        DTensors, and the shapes of parameters that ZeRO-3 has emptied
    accounting.py    bytes of states, and log lines about them

Nothing here imports DeepSpeed, Megatron or their adapters.
"""
