"""A mixture of experts whose router chooses in several ways."""

import torch

TOKENS, WIDTH, EXPERTS, TAKEN = 512, 64, 8, 2
GROUP = 64


class Mixture(torch.nn.Module):
    """Experts one after another, so that what is saved has a shape of each expert's tokens."""

    def __init__(self, device, choose):
        super().__init__()
        torch.manual_seed(1)
        self.gate = torch.nn.Linear(WIDTH, EXPERTS, bias=False, device=device)
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(EXPERTS)
        )
        self.choose = choose
        self.taken: list[torch.Tensor] = []

    def forward(self, x, indices=None):
        logits = self.gate(x)
        if indices is None:
            weights, indices = self.choose(logits)
        else:
            weights = logits.gather(-1, indices)
        self.taken.append(indices)
        out = x
        for number, expert in enumerate(self.experts):
            token, which = (indices == number).nonzero(as_tuple=True)
            taken = expert(x[token]).relu() * weights[token, which, None]
            out = out.index_add(0, token, taken)
        return out


def _by_argmax(logits):
    indices = torch.argmax(logits, -1, keepdim=True)
    return logits.gather(-1, indices), indices


CHOOSE = {
    "topk": lambda logits: torch.topk(logits, TAKEN, dim=-1),
    "method": lambda logits: logits.topk(k=TAKEN, sorted=False),
    "argmax": _by_argmax,
}
