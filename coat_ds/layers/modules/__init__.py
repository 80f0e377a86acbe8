"""The forwards that replace a module's own: linear layers, norms, feed-forward layers, experts, decoder
layers; and attention, which a model's config selects.

This package may import `coat_kernels`, the config and `detection`. Start at converted_forward.py, which
installs and removes a forward.
"""
