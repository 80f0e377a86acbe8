"""Which modules of a model can be converted, found by what they compute.

This package may import `coat_kernels`. Start at probe.py: small copies of modules are run and compared with
what the kernels compute.
"""
