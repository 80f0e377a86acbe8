"""The forwards that take the place of a module's own: linear layers, norms, attention, experts.

It may import `coat_kernels` and the config. Start at replaced.py: how a forward is put on a module and taken
off.
"""
