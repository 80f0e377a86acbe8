"""The forwards that replace a module's own: linear layers, norms, attention, experts,
decoder layers.

This package may import `coat_kernels` and the config. Start at replaced.py, which installs and removes a
forward.
"""
