"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34, in halves) between a fused query-key-value
projection and attention.

Each key-value group of the projection's output [s, b, kv_groups * (m + 2) * d] holds m query heads, a key and
a value. If they are `stacked`, all queries come first, then all keys, then all values. Forward rotates
queries and keys and writes queries, keys and values to separate tensors. Backward reads their gradients in
any layout, and returns the gradient of the projection's output.
"""

import torch

from coat_kernels.tensorwise.scale import maxima_reference


def no_rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The angles [any, 0], with which queries and keys are only split, on the device of `cos` and `sin`."""
    return cos[:, :0], sin[:, :0]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [s, b, heads, d] by the angles of cos, sin [s, d], FP32; no rotation if they are [s, 0]."""
    if cos.shape[1] == 0:
        return x.clone()
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return (torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def rotate_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The gradient of `rotate`'s input from the gradient of its output."""
    if cos.shape[1] == 0:
        return grad
    value, crossed = (grad.float() * t[:, None, None] for t in (cos, sin))
    first, second = crossed.chunk(2, dim=-1)
    return (value + torch.cat((second, -first), -1)).to(grad.dtype)


def rotate_qkv_reference(mixed, cos, sin, kv_groups: int, d: int, stacked: bool = False):
    """mixed [s, b, kv_groups * (m + 2) * d] -> q [s, b, kv_groups * m, d], k and v [s, b, kv_groups, d]."""
    if stacked:
        heads = mixed.unflatten(2, (-1, d))
        q, k, v = heads.split((heads.shape[2] - 2 * kv_groups, kv_groups, kv_groups), dim=2)
    else:
        heads = mixed.unflatten(2, (kv_groups, mixed.shape[2] // (kv_groups * d), d))
        q, k, v = (part.flatten(2, 3) for part in heads.split((heads.shape[3] - 2, 1, 1), dim=3))
    return rotate(q, cos, sin), rotate(k, cos, sin), v.clone()


def rotate_qkv_backward_reference(dq, dk, dv, cos, sin, stacked: bool = False):
    """The gradients of `rotate_qkv_reference`'s results -> the gradient of mixed, its maxima."""
    s, b, kv_groups, d = dk.shape
    dq, dk = rotate_back(dq, cos, sin), rotate_back(dk, cos, sin)
    if stacked:
        grad = torch.cat((dq, dk, dv), 2).flatten(2)
    else:
        dq = dq.reshape(s, b, kv_groups, dq.shape[2] // kv_groups, d)
        grad = torch.cat((dq, dk.unsqueeze(3), dv.unsqueeze(3)), 3).flatten(2)
    return grad, maxima_reference(grad)
