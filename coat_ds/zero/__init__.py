"""The DeepSpeed adapter.

It may import every other package of `coat_ds`, and DeepSpeed inside functions. Start at engine.py, `prepare`
and `finish`, which run before and after `DeepSpeedEngine.__init__`.

  the engine
    autoload.py          how the block takes effect in an unmodified script
    block.py             where the block is in a DeepSpeed config
    deepspeed_config.py  requirements on the rest of the DeepSpeed config
    engine.py            the work before and after an engine is built
    status.py            `engine.coat`
    watch.py             readings of an engine's steps
  its layers
    model_layers.py      how the block configures a model's layers
    layer_units.py       whole layers as units of ZeRO-3
    module_hooks.py      ZeRO-3's hooks of all other modules
    recompute.py         FP8 inputs of regions that DeepSpeed recomputes
  its optimizer
    build.py             the optimizer that is passed to an engine
    convert_optimizer.py an Adam of torch or DeepSpeed, converted to a CoatAdamW
    partitions.py        the parts of parameters in ZeRO's flat tensors
    gradients.py         gradients that reach the optimizer in 16 bits
    grad_norm.py         the norm of gradients by one operation
    checkpoints.py       states in checkpoints: ZeRO's, universal ones, and those of stage 0
    offloading.py        states that DeepSpeed offloads and reloads

Before an engine with a block is built, only autoload.py and block.py are imported.
"""
