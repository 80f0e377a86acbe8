"""Shared parts of autograd functions: notes on tensors, recomputed regions, refused derivatives.

The folder may import `groups` and nothing else of this package. Start at origin.py: the notes that the
producer of a tensor leaves on it.
"""
