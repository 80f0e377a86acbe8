"""`CoatAdamW` in Megatron's optimizers: how it is built, checkpointed and watched.

It may import `coat_ds.optim`, `coat_ds.watch` and `megatron_ext.options`. Start at patches.py.
"""
