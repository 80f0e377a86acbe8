"""Converted layers whose weights a framework splits over ranks.

This package may import `modules`, `detection` and `coat_kernels`. DeepSpeed's AutoTP and AutoEP, and the
tensor-parallel and expert-parallel plans of transformers have a file each. Start at autotp.py. Weights that
are DTensors are in modules/dtensor.py.
"""
