"""The DeepSpeed adapter.

It may import every other package of `coat_ds`, and DeepSpeed inside functions. Start at engine.py, `prepare`
and `finish`, which run before and after `DeepSpeedEngine.__init__`. Before an engine with a block is built,
only autoload.py and block.py are imported.

- the engine: switch, block, deepspeed_config, engine, status, watch
- its layers: model_layers, layer_units, module_hooks, recompute
- its optimizer: build, convert_optimizer, partitions, gradients, grad_norm, checkpoints, offloading
"""
