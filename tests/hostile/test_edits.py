"""Edits of every tensor that a user can access, in a hook or between forward and backward, against PyTorch.

Edits are in place, of the whole tensor or of a part, through an alias, or through `.data`, which autograd
does not notice. Where we raise an error, stock PyTorch raises one too. Where we do not, results and gradients
are those of the function as it was computed. Stock gives these if every saved tensor is copied, because it
then raises for no edit. For an edit through `.data`, results are those of stock with the same edit. All
comparisons are within the error of FP8.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from coat_kernels.activation import ActivationOptions, activation
from coat_kernels.autograd.origin import origin_of
from coat_kernels.linear import fp8_linear
from coat_kernels.norm import NormOptions, normalize
from tests.hostile.conftest import EXAMPLES
from tests.util import rel_rms

S, B, H, FFN, HEADS = 32, 2, 64, 96, 2

# visible in the result: a sign, and eight times the magnitude, which saturates with the old scale
FACTOR = -8.0
# after forward the magnitude of a weight is not measured again
LATER = -0.5


def in_place(t, factor):
    with torch.no_grad():
        t.mul_(factor)


def recorded(t, factor):
    """Edits within the model's function, which autograd records; leaves refuse them."""
    t.mul_(factor)


def part_in_place(t, factor):
    with torch.no_grad():
        t[..., : t.shape[-1] // 2].mul_(factor)


def alias_in_place(t, factor):
    t.detach().mul_(factor)


def data_in_place(t, factor):
    t.data.mul_(factor)


def data_part(t, factor):
    t.data[..., : t.shape[-1] // 2].mul_(factor)


def data_replaced(t, factor):
    t.data = t.data * factor


EDITS = {
    f.__name__: f
    for f in (in_place, recorded, part_in_place, alias_in_place, data_in_place, data_part, data_replaced)
}
BEHIND_AUTOGRAD = {"data_in_place", "data_part", "data_replaced"}


@dataclass(frozen=True)
class Case:
    """An `edit` of the tensor called `target` at a place of the forward pass, or "after" it."""

    target: str
    edit: str
    when: str
    train: bool = True


@dataclass
class Editor:
    """Carries out one case, in one run; without a case, none."""

    case: Case = Case("", "", "never")
    seen: dict[str, torch.Tensor] = field(default_factory=dict)

    def see(self, place: str, **tensors: torch.Tensor) -> None:
        """At `place` the user's code can access these tensors."""
        self.seen |= tensors
        if place == self.case.when:
            EDITS[self.case.edit](self.seen[self.case.target], LATER if place == "after" else FACTOR)


def run(model, case: Case) -> dict[str, torch.Tensor] | RuntimeError:
    """Results by name, or the raised error."""
    editor, parameters = Editor(case), model.parameters()
    values = {name: p.detach().clone() for name, p in parameters.items()}
    device = next(iter(values.values())).device
    generator = torch.Generator().manual_seed(1)
    # small compared with the output of the branches, so that their errors are visible
    x, grad = torch.randn(2, S, B, H, generator=generator).to(device, model.dtype)
    x = (0.01 * x).requires_grad_(case.train)
    try:
        with torch.set_grad_enabled(case.train):
            h = x * 1
            editor.see("begin", x=x, h=h, **parameters)
            y = model(h, editor)
            editor.see("after", y=y)
        found = {"y": (y - x).detach()}
        if case.train:
            wanted = {"x": x, **parameters}
            found |= zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True)
        return found
    except RuntimeError as error:
        return error
    finally:
        for name, p in parameters.items():
            p.data = values[name]


def outcome_of(case: Case, ours, stock, bound: float) -> str:
    """The outcome of one edit; AssertionError if the result is wrong."""
    plain = run(stock, case)
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        faithful = run(stock, case)
    found = run(ours, case)
    if isinstance(found, RuntimeError):
        assert isinstance(plain, RuntimeError), (case, found)
        return "both raise"
    accepted = [faithful, plain] if case.edit in BEHIND_AUTOGRAD else [faithful]
    accepted = [result for result in accepted if not isinstance(result, RuntimeError)]
    if not accepted:
        # stock refuses in-place operations on some outputs and on parts of a split
        assert all(value.isfinite().all() for value in found.values()), case
        return "stock refuses"
    for name, value in found.items():
        errors = [rel_rms(value, result[name]) for result in accepted]
        assert min(errors) < bound, (case, name, errors)
    return "stock raises" if isinstance(plain, RuntimeError) else "both work"


def attack(cases: list[Case], ours, stock, bound: float) -> None:
    """Tries cases up to the folder's number of inputs: the same cases each time."""
    tried = random.Random(0).sample(cases, min(len(cases), max(1, EXAMPLES // 4)))
    outcomes = Counter(outcome_of(case, ours, stock, bound) for case in tried)
    print(f"{len(tried)} of {len(cases)} edits: {dict(outcomes)}")
    # the edits had an effect
    assert outcomes["both raise"] and outcomes["both work"]


class Stack:
    """norm -> linear -> SwiGLU -> linear, either ours or torch's own."""

    dtype = torch.float32
    parts = ("norm", "up", "activation", "down")

    def __init__(self, ours: bool, device: torch.device):
        self.ours = ours
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        weights = {
            "norm.weight": 1 + 0.5 * randn(H),
            "norm.bias": 0.1 * randn(H),
            "up.weight": randn(2 * FFN, H) / H**0.5,
            "down.weight": randn(H, FFN) / FFN**0.5,
        }
        self.weights = {name: weight.to(device).requires_grad_() for name, weight in weights.items()}

    def parameters(self):
        return self.weights

    def __call__(self, x, editor):
        weight, bias, up, down = self.weights.values()
        if not self.ours:
            y = F.layer_norm(x, (H,), weight, bias)
            editor.see("norm", norm=y)
            u = F.linear(y, up)
            editor.see("up", up=u)
            gate, linear = u.chunk(2, -1)
            z = F.silu(gate) * linear
            editor.see("activation", activation=z)
            out = F.linear(z, down)
        else:
            y = normalize(x, weight, bias, NormOptions(1e-5, True))
            editor.see("norm", norm=y)
            u = fp8_linear(y, up, origin=origin_of(y))
            editor.see("up", up=u)
            z = activation(u, ActivationOptions("silu", True))
            editor.see("activation", activation=z)
            out = fp8_linear(z, down, origin=origin_of(z))
        editor.see("down", down=out)
        return out


def times(edit: str, *within: str) -> tuple[str, ...]:
    """The places at which a weight is edited. Backward reads the weight again, and with FP8 uses the scale of
    the forward pass: between the two no code may write it through `.data`, as with stock."""
    return ("begin",) if edit in BEHIND_AUTOGRAD else ("begin", *within, "after")


def stack_cases() -> list[Case]:
    cases = []
    for edit in EDITS:
        for part in Stack.parts:
            # after a write through `.data` to a plain tensor, the caller has to remove its notes
            if edit not in ("data_in_place", "data_part"):
                cases += [Case(part, edit, part), Case(part, edit, part, train=False)]
            cases.append(Case(part, edit, "after"))
        for weight in ("norm.weight", "norm.bias", "up.weight", "down.weight"):
            cases += [Case(weight, edit, when) for when in times(edit, "norm", "activation")]
        cases += [Case(name, edit, when) for name in "xh" for when in ("begin", "norm", "down", "after")]
    return cases


def test_edits_of_a_stack(device):
    ours, stock = Stack(True, device), Stack(False, device)
    # without edits results differ by up to 0.10, and edits enlarge the rounded values
    attack(stack_cases(), ours, stock, bound=0.2)
