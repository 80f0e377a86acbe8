"""Converted linear layers whose weights lie on several ranks.

It may import the converted modules and `coat_kernels`. Start at dtensor.py; DeepSpeed's AutoTP and the plans
of transformers have a file each.
"""
