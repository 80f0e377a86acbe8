"""The Megatron adapter: layer specs, `CoatAdamW` in Megatron's optimizers, and Megatron under DeepSpeed or
on a CPU.

It may import `coat_ds`, `coat_kernels` and megatron-core. Start at spec.py, which `--spec` names.

    spec.py                                  the spec, by the file of COAT_CONFIG
    layer_specs.py, hybrid_specs.py          its layers and stacks, and those of BF16
    layers/                                  the modules of a layer
    optimizer/                               the optimizer, its checkpoints and the watch
    options.py                               the file of COAT_CONFIG
    cpu.py, mpu.py, model.py, ledger.py      Megatron without GPU or in DeepSpeed, small models, saved bytes
"""
