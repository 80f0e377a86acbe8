"""What autograd functions share: notes on tensors, recomputed regions, refused derivatives.

It may import `groups` and nothing else of this package. Start at origin.py: what the producer of a tensor
notes on it.
"""
