"""Experts of an MoE layer: all experts in one grouped FP8 GEMM per projection, saved in 8 bits.

It may import `activation`, `tensorwise`, `groups`, `autograd` and the files of `coat_kernels`. Start at
op.py, which layers call. reference.py specifies the layer and its kernels, order.py brings rows into the
experts' order, matmul.py runs the GEMMs, and gates.py computes the activation and its gradient.
"""

from coat_kernels.experts.gates import KernelGate, TorchGate
from coat_kernels.experts.op import ExpertsState, grouped_experts, permuted_experts

__all__ = ["ExpertsState", "KernelGate", "TorchGate", "grouped_experts", "permuted_experts"]
