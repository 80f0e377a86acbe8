"""Writes to a moment, as frameworks make them."""

import torch

SHAPE = (7, 100)


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WRITES = {
    "copy": lambda m: m.copy_(values(*SHAPE, seed=1)),
    "copy-broadcast": lambda m: m.copy_(values(100, seed=1)),
    "copy-bf16": lambda m: m.copy_(values(*SHAPE, seed=1).bfloat16()),
    "narrow": lambda m: m.view(-1).narrow(0, 130, 300).copy_(values(300)),
    "narrow-twice": lambda m: m.flatten().narrow(0, 130, 300)[7:-3].fill_(2),
    "narrow-data": lambda m: m.view(-1).narrow(0, 130, 300).data.copy_(values(300)),
    "slice": lambda m: m[2:5].copy_(values(3, 100)),
    "negative-slice": lambda m: m[-2:].zero_(),
    "select": lambda m: m[-3][4:7].add_(1),
    "split": lambda m: m.split(3)[2].mul_(4),
    "split-sizes": lambda m: m.view(-1).split([1, 127, 129, 443])[2].neg_(),
    "chunk": lambda m: m.chunk(2)[1].mul_(3),
    "empty-window": lambda m: m.view(-1)[5:5].copy_(torch.empty(0)),
    "setitem": lambda m: m.__setitem__(slice(1, 3), 5.0),
    "setitem-mask": lambda m: m.__setitem__(values(*SHAPE) > 0, 5.0),
    "unsqueeze": lambda m: m.unsqueeze(0).mul_(2),
    "reshape": lambda m: m.reshape(70, 10)[3].mul_(2),
    "detach": lambda m: m.detach().mul_(2),
    "in-place": lambda m: m.mul_(0.5).add_(values(*SHAPE)),
    "lerp": lambda m: m.lerp_(values(*SHAPE), 0.1),
    "zero": lambda m: m.zero_(),
    "out": lambda m: torch.add(values(*SHAPE), 1, out=m),
    "foreach": lambda m: torch._foreach_mul_([m, torch.ones(3)], 2.0),
    "data": lambda m: setattr(m, "data", values(*SHAPE)),
    "rows": lambda m: [row.zero_() for row in m],
    "index-put": lambda m: m.index_put_((torch.tensor([1, 1, 4]), torch.tensor([0, 2, 99])), torch.ones(3)),
    "masked-scatter": lambda m: m.masked_scatter_(values(*SHAPE) > 0, values(*SHAPE, seed=2)),
    "scatter": lambda m: m.scatter_(1, torch.arange(7).view(7, 1), 5.0),
    "index-copy": lambda m: m.index_copy_(0, torch.tensor([5]), values(1, 100)),
    "put": lambda m: m.put_(torch.tensor([3, 300]), torch.ones(2)),
    "clamp": lambda m: torch.clamp_(m[3:], -0.5, 0.5),
    "masked-fill": lambda m: m[2:].masked_fill_(values(5, 100) > 1, 0),
    "overlapping-windows": lambda m: torch._foreach_mul_([m[0:4], m[2:6], m[3]], 2.0),
    "rows-of-each-other": lambda m: m[1].copy_(m[2]),
    "swap": lambda m: m.copy_(m.flip(0)),
}
