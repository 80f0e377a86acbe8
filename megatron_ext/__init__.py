"""The Megatron adapter: layer specs, `CoatAdamW` in Megatron's optimizers, and Megatron under DeepSpeed or
on a CPU.

It may import `coat_ds`, `coat_kernels` and megatron-core. Start at layer_specs.py, which `--spec` names.

    layer_specs.py, hybrid_specs.py          the specs; with_optimizer.py and with_checkpoints.py install more
    layers/                                  the modules of a layer
    optimizer/                               the optimizer, its checkpoints and the watch
    options.py, installing.py                the file of COAT_CONFIG, and what a spec's module installs
    cpu.py, mpu.py, model.py, ledger.py      Megatron without GPU or in DeepSpeed, small models, saved bytes
"""
