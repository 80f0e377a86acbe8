"""RMSNorm over the channels of each head (query-key normalization: Henry et al., arXiv 2010.04245; with a
weight for each channel in Qwen3, arXiv 2505.09388), then rotary positions as in `coat_kernels.rope`.

x is saved in 8 bits, in 1 x G groups, as by `coat_kernels.norm`. Values between norm and rotation are not
rounded.
"""

from coat_kernels.groups.reference import Grouped
from coat_kernels.norm.reference import norm_backward_reference, norm_forward_reference
from coat_kernels.rope.reference import rotate, rotate_back


def head_norm_forward_reference(x, weight, cos, sin, eps: float, zero_centered: bool, saved_format: str):
    """x [s, b, heads, d] -> (y like x, x as rows of d channels in `saved_format`, rstd FP32 [rows])."""
    rows = x.flatten(0, 2).float()
    y, _, q, rstd = norm_forward_reference(rows, weight, None, eps, False, zero_centered, saved_format)
    return rotate(y.view(x.shape), cos, sin).to(x.dtype), q, rstd


def head_norm_backward_reference(grad_y, q: Grouped, rstd, weight, cos, sin, zero_centered: bool):
    """(grad_x like grad_y, grad_weight FP32 [d])."""
    grad = rotate_back(grad_y.float(), cos, sin)
    rows = grad.flatten(0, 2)
    grad_x, _, grad_weight, _ = norm_backward_reference(rows, None, q, rstd, weight, False, zero_centered)
    return grad_x.view(grad_y.shape).to(grad_y.dtype), grad_weight
