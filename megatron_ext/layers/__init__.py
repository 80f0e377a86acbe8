"""The modules of a Megatron layer with FP8 GEMMs and 8-bit saved activations.

It may import `coat_kernels`, `coat_ds.layers` and `megatron_ext.options`. Start at decoder_layer.py,
which chooses the path of a layer. The other files hold one kind of module each, but settings.py, how the
block configures them, and process_groups.py and recompute.py, Megatron's groups and checkpoints.
"""
