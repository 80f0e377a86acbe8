"""The Megatron adapter: layer specs, `CoatAdamW` in Megatron's optimizers, and Megatron under DeepSpeed or
on a CPU.

It may import `coat_ds`, `coat_kernels` and megatron-core. Start at spec.py, which `--spec` names. `layers`
are the modules of a layer, `optimizer` is Megatron's optimizer with its checkpoints and watch.
"""
