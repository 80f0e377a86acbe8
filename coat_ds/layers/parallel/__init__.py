"""Converted layers whose weights are split over ranks.

This package may import the converted modules and `coat_kernels`. Start at dtensor.py; DeepSpeed's AutoTP,
and the tensor-parallel and expert-parallel plans of transformers have a file each.
"""
