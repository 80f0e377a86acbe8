"""The DeepSpeed adapter.

It may import every other room of `coat_ds`, and DeepSpeed inside functions. Start at engine.py, `prepare` and
`finish`, which run before and after `DeepSpeedEngine.__init__`.

    switch.py            how an unmodified script comes to honour the block
    block.py             where the block is in a DeepSpeed config
    engine.py            what is done before and after an engine is built
    deepspeed_config.py  what the rest of the DeepSpeed config has to be
    build.py             the optimizer that an engine is given
    convert_optimizer.py an Adam of torch or DeepSpeed, turned into a CoatAdamW
    partitions.py        which parts of which parameters ZeRO's flat tensors hold
    guards.py            checkpoints and offloading of the states
    gradients.py         gradients that are handed over in 16 bits
    grad_norm.py         the norm of gradients by one operation
    stage0.py            checkpoints of stage 0, by either of DeepSpeed's wrappers
    universal.py         moments of universal checkpoints, which wait on the CPU
    recompute.py         FP8 inputs of what DeepSpeed recomputes
    model_layers.py      what the block makes of a model's layers
    layer_units.py       whole layers as units of ZeRO-3
    module_hooks.py      ZeRO-3's hooks of other modules
    status.py            `engine.coat`
    log.py               lines on rank 0

Nothing here is imported before an engine with a block is built, but switch.py and block.py.
"""
