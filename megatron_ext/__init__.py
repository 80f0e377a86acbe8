"""The Megatron adapter: layer specs, `CoatAdamW` in Megatron's optimizers, and Megatron under DeepSpeed or
on a CPU.

It may import `coat_ds`, `coat_kernels` and megatron-core. Start at spec.py, which `--spec` names.

    spec.py                                  the spec, by the file of COAT_CONFIG
    layer_specs.py, hybrid_specs.py          its layers and stacks, and those of BF16
    layers/                                  the modules of a layer
    optimizer/                               the optimizer, its checkpoints and the watch
    options.py, unsupported.py               the file of COAT_CONFIG; refused arguments of Megatron
    cpu.py, mpu.py                           Megatron without a GPU; its groups for DeepSpeed
    model.py, saved_bytes.py                 small models; bytes that layers save
"""
