"""What gradients lose in FP8: formats, scales, rounding, and layers left in BF16, by emulated GEMMs."""

import math
import statistics

import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.rounding import Rounding, linear_layers, round_operands
from benchmarks.common.training import LARGE, SMALL
from benchmarks.finetune import weights_option
from benchmarks.gradients.models import Sample, pretrained, trained
from benchmarks.gradients.times import add_times
from benchmarks.gradients.variants import KINDS, VARIANTS, Emulated


def gradients_of(sample: Sample, rounding: Rounding | None) -> dict[str, torch.Tensor]:
    """The gradient of every linear layer's weight, and `dx`, the gradient of the first layer's input."""
    model, found = sample.model, {}
    round_operands(model, rounding or (lambda layer, operand, x: x))

    def keep(module, given, y) -> None:
        y.register_hook(lambda grad: found.update(dx=grad))

    handle = model.get_input_embeddings().register_forward_hook(keep)
    model.zero_grad()
    model(input_ids=sample.tokens, labels=sample.tokens, use_cache=False).loss.backward()
    handle.remove()
    return {name: layer.weight.grad for name, layer in linear_layers(model).items()} | found


def errors_of(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative RMS errors."""
    return {k: ((found[k] - exact[k]).norm() / exact[k].norm()).item() for k in exact}


def mean_ratio(errors: dict[str, float], others: dict[str, float], parts: tuple[str, ...]) -> float:
    """The geometric mean over the weights with one of `parts` in their names."""
    names = [name for name in errors if name != "dx" and any(part in name for part in parts)]
    return math.exp(statistics.fmean(math.log(errors[name] / others[name]) for name in names))


def add_errors(sample: Sample, table: Table) -> None:
    """A row for each variant."""
    layers, one = sample.model.config.num_hidden_layers, dict.fromkeys(linear_layers(sample.model), 1.0)
    exact = gradients_of(sample, None)
    same_forward: dict[tuple, dict[str, torch.Tensor]] = {}
    base: tuple[dict, dict] | None = None
    for name, variant in VARIANTS.items():
        if variant.bf16 not in same_forward:
            same_forward = {variant.bf16: gradients_of(sample, Emulated(variant, layers, backward=False))}
        expected = same_forward[variant.bf16]
        torch.manual_seed(0)
        rounding = Emulated(variant, layers)
        found = gradients_of(sample, rounding)
        total, backward = errors_of(found, exact), errors_of(found, expected)
        base = base or (total, backward)
        weights = [k for k in found if k != "dx"]
        product, square, own = (
            sum((a[k] * b[k]).sum().item() for k in weights)
            for a, b in ((found, expected), (expected, expected), (found, found))
        )
        table.add(
            what="errors",
            **sample.names,
            variant=name,
            total=mean_ratio(total, one, ("",)),
            backward=mean_ratio(backward, one, ("",)),
            total_to_e5m2=mean_ratio(total, base[0], ("",)),
            backward_to_e5m2=mean_ratio(backward, base[1], ("",)),
            **{f"{kind}_to_e5m2": mean_ratio(backward, base[1], parts) for kind, parts in KINDS.items()},
            dx=backward["dx"],
            dx_to_e5m2=backward["dx"] / base[1]["dx"],
            total_dx_to_e5m2=total["dx"] / base[0]["dx"],
            flushed=(rounding.flushed / rounding.nonzero.clamp(min=1)).item(),
            length=product / square,
            norm=(own / square) ** 0.5,
        )


def options(parser) -> None:
    weights_option(parser)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[0, 20, 400], help="ages of the trained model"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the batch whose gradients are compared")


@benchmark(needs_gpu=False, options=options)
def gradients(arguments, table: Table) -> None:
    """What weight gradients and dx lose by the format of gradients, and the time of GEMMs in each.

    Operands are rounded to FP8 and back before FP32 GEMMs: inputs and weights to E4M3 with one scale,
    gradients as each variant names; layers in BF16 round to BF16. Embeddings, norms and the head stay exact.
    Models: a Llama that learns the standard library, at the ages --steps, also with some input channels 30 to
    100 times as large and their weights divided by these factors; and a pretrained one. Without a GPU a small
    Llama.
    Rows of `what` errors have relative RMS errors, geometric means over all weights:
    - total: against exact gradients; backward: against the exact backward of the same rounded forward;
    - to_e5m2: over the error of E5M2; by kind of weight: of `backward`;
    - dx: of the gradient of the first layer's input, against the same two;
    - flushed: share of the gradients' elements that were not zero and became zero;
    - length: projection of the weights' gradients on those of the exact backward, over their norm; norm: the
      ratio of both norms.
    Rows of `what` time have the GEMMs of a Llama-2-7B layer, 8,192 tokens, and the quantization of gradients
    as rows and columns: one scale by COAT's kernels, row scales by torch's operations, an upper bound. A
    kernel for row scales reads and writes the same bytes as COAT's.
    """
    quick = arguments.quick or not torch.cuda.is_available()
    add_times(quick, table)
    tokens, ages = (256, [0, 2]) if arguments.quick else (arguments.tokens, arguments.steps)
    add_errors(pretrained(arguments, tokens), table)
    for sample in trained(SMALL if quick else LARGE, ages, tokens):
        add_errors(sample, table)
