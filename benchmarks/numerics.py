"""What FP8 costs one decoder layer in accuracy, on weights and inputs of a model that is being trained."""

import argparse
import functools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, reason
from benchmarks.common.layers import (
    Layer,
    Result,
    forget,
    megatron_layer,
    random_weights,
    result_of,
    torch_layer,
    transformer_engine_layer,
)
from benchmarks.common.plot import save
from benchmarks.common.shapes import LayerShape
from benchmarks.common.spawn import one_process
from benchmarks.common.training import LARGE, SMALL, Setting, loss_of, train_gpt
from coat_ds.plan.systems import FASTEST

TE_CURRENT = "TE current"
# columns of the table, in addition to ratios to another layer
ERROR, TO, STANDARD_ERROR = "RMS error", "to ", "standard error"
# in the plot; attention in 8 bits lies outside
SHOWN_RATIOS = (0.6, 1.4)
SEED = 1234
# batches of a layer, and sequences in each
BATCHES, BATCH = 2, 8
# channels of the input and what they are multiplied by
OUTLIERS = {0: 30, 1: 50, 2: 70, 3: 100}


class Batch(NamedTuple):
    """A layer's input and its output's gradient, [s, b, h], BF16."""

    x: torch.Tensor
    grad: torch.Tensor


class Sample(NamedTuple):
    """A layer's weights, BF16, by Megatron's names, and what it is run on."""

    weights: dict[str, torch.Tensor]
    batches: list[Batch]


# by tensor
Errors = dict[str, float]


def rows() -> dict[str, Callable[[LayerShape], Layer]]:
    ours = functools.partial(megatron_layer, spec="coat_layer_spec")
    te = transformer_engine_layer
    return {
        "BF16": megatron_layer,
        "TE delayed": functools.partial(te, recipe="DelayedScaling"),
        TE_CURRENT: functools.partial(te, recipe="Float8CurrentScaling"),
        "TE blockwise": functools.partial(te, recipe="Float8BlockScaling"),
        "ours": ours,
        "ours, all fast": functools.partial(ours, fast_accumulation="all"),
        "ours, gradients E4M3": functools.partial(ours, backward_format="e4m3"),
        "ours, fastest": functools.partial(ours, **FASTEST),
        "ours, saved E4M3": functools.partial(ours, saved_format="e4m3"),
        "ours, both E4M3": functools.partial(ours, saved_format="e4m3", backward_format="e4m3"),
        "ours, 8-bit attention": functools.partial(ours, attention_format="sqrt8"),
        "ours, recomputed attention": functools.partial(ours, attention_format="recompute"),
    }


def trained_samples(setting: Setting, steps: int, seed: int) -> tuple[LayerShape, list[Sample]]:
    """All layers of a partly trained GPT, on text that it has not seen."""
    model, _, held_out = train_gpt(setting, steps, seed)
    config, layers = model.config, model.decoder.layers
    samples = {
        layer: Sample({name: p.detach().bfloat16() for name, p in layer.named_parameters()}, [])
        for layer in layers
    }

    def keep(layer, args, kwargs, output):
        x = (args[0] if args else kwargs["hidden_states"]).detach().bfloat16()
        output[0].register_hook(lambda grad: samples[layer].batches.append(Batch(x, grad.bfloat16())))

    for layer in layers:
        layer.register_forward_hook(keep, with_kwargs=True)
    for first in range(0, BATCHES * BATCH, BATCH):
        loss_of(model, held_out.batch(range(first, first + BATCH))).backward()
    shape = LayerShape(
        config.hidden_size,
        config.ffn_hidden_size,
        config.num_attention_heads,
        config.num_query_groups,
        BATCH,
        setting.seq_length,
    )
    return shape, list(samples.values())


def with_outliers(sample: Sample) -> Sample:
    """A few channels of the input much larger than the others, as models grow them."""
    factors = torch.ones_like(sample.batches[0].x[0, 0])
    for channel, factor in OUTLIERS.items():
        factors[channel] = factor
    return sample._replace(batches=[batch._replace(x=batch.x * factors) for batch in sample.batches])


def random_sample(sample: Sample, seed: int) -> Sample:
    """Normal values of the same sizes."""
    # no two of them start alike
    weights = random_weights(sample.weights, 2 * seed)
    generator = torch.Generator(device()).manual_seed(2 * seed + 1)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, device=device()).bfloat16()

    return Sample(
        {name: w.bfloat16() for name, w in weights.items()},
        [Batch(normal(batch.x), normal(batch.grad)) for batch in sample.batches],
    )


def exact_results(shape: LayerShape, sample: Sample) -> list[Result]:
    """What FP64 makes of each batch, in Megatron's order of rows."""
    reference = torch_layer(shape, dtype=torch.float64)
    reference.load(sample.weights)
    with sdpa_kernel(SDPBackend.MATH):
        results = [result_of(reference, x.double(), grad.double()) for x, grad in sample.batches]
    order = reference.qkv_rows.argsort()
    for exact in results:
        for name in exact.parameters:
            if "linear_qkv" in name:
                exact.parameters[name] = exact.parameters[name][order]
    return results


def errors_of(
    make: Callable[[LayerShape], Layer], shape: LayerShape, sample: Sample, exact: list[Result]
) -> list[Errors]:
    """Relative RMS errors of a layer's output and gradients in each batch, by the names of its parts."""
    layer = make(shape)
    layer.load(sample.weights)
    # delayed scaling takes its scales from an earlier pass
    result_of(layer, *sample.batches[-1])
    found = [
        result_of(layer, *batch).errors(expected, layer)
        for batch, expected in zip(sample.batches, exact, strict=True)
    ]
    # makers list their parameters in orders of their own
    tensors = ("y", "dx", *sample.weights)
    return [{k.split(".")[-2] if "." in k else k: errors[k] for k in tensors} for errors in found]


def errors_by_layer(
    data: str, shape: LayerShape, samples: list[Sample], chosen: list[str], table: Table
) -> dict[str, list[list[Errors]]]:
    """Errors of each chosen layer, for every sample and batch; adds their root mean squares to the table."""
    exact = [exact_results(shape, sample) for sample in samples]
    errors: dict[str, list[list[Errors]]] = {}
    for name, make in rows().items():
        if name not in chosen:
            continue
        try:
            errors[name] = [errors_of(make, shape, *pair) for pair in zip(samples, exact, strict=True)]
        # whatever a peer stumbles over, the others go on
        except Exception as error:
            if name == "BF16":
                raise
            table.add(data=data, layer=name, note=reason(error))
            continue
        finally:
            forget()
        table.add(data=data, layer=name, figure=ERROR, **root_mean_squares(errors[name]))
    return errors


def root_mean_squares(errors: list[list[Errors]]) -> Errors:
    """Over layers and their batches."""
    flat = [of_batch for of_layer in errors for of_batch in of_layer]
    return {k: statistics.fmean(e[k] ** 2 for e in flat) ** 0.5 for k in flat[0]}


def mean_ratios(errors: list[list[Errors]], others: list[list[Errors]]) -> tuple[Errors, Errors]:
    """Geometric means over layers of the ratios of `errors` to `others`, and their standard errors.

    Ratios are of the same layer, batch and tensor. Batches of one layer share its weights, and so their
    rounding: only layers count as independent, each with the mean logarithm r of its batches. Of n layers the
    standard error is that of the mean of r, its standard deviation over sqrt(n), times the ratio.
    """
    means, deviations = {}, {}
    for k in errors[0][0]:
        logarithms = [
            statistics.fmean(math.log(own[k] / other[k]) for own, other in zip(*of_layer, strict=True))
            for of_layer in zip(errors, others, strict=True)
        ]
        means[k] = math.exp(statistics.fmean(logarithms))
        deviations[k] = means[k] * statistics.stdev(logarithms) / len(logarithms) ** 0.5
    return means, deviations


def plot(rows: list[dict], path: Path) -> None:
    """Ratios to another layer's errors, if there are any, with two standard errors either way: panels are
    kinds of data, clusters tensors, colours layers."""
    figures = {(row["data"], row["layer"], row["figure"]): row for row in rows if "figure" in row}
    samples, layers, kinds = (list(dict.fromkeys(keys)) for keys in zip(*figures, strict=True))
    tensors = [k for k in rows[0] if k not in ("data", "layer", "figure")]
    if not (compared := [kind for kind in kinds if kind.startswith(TO)]):
        return
    (kind,) = compared
    figure, panels = plt.subplots(len(samples), 1, figsize=(11, 3 * len(samples)), layout="constrained")
    for data, axes in zip(samples, panels, strict=True):
        for i, layer in enumerate(layers):
            if (row := figures.get((data, layer, kind))) is None:
                continue
            places = [place + (i - len(layers) / 2) * 0.8 / len(layers) for place in range(len(tensors))]
            spread = [2 * figures[data, layer, STANDARD_ERROR][t] for t in tensors]
            style = {"fmt": "o", "markersize": 4, "color": plt.cm.tab20(i), "label": layer}
            axes.errorbar(places, [row[t] for t in tensors], spread, **style)
        axes.set_xticks(range(len(tensors)), tensors, fontsize="small")
        axes.set(title=data, ylabel=f"error, {kind}", ylim=SHOWN_RATIOS)
        axes.grid(axis="y")
    panels[0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    save(figure, path)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="training steps before the layers are taken")
    parser.add_argument("--models", type=int, default=2, help="models, each from a seed of its own")
    parser.add_argument("--to", default=TE_CURRENT, choices=rows(), help="layer to compare the others with")
    parser.add_argument(
        "--layers", nargs="+", choices=rows(), default=list(rows()), help="rows (default: all)"
    )


@benchmark(needs_gpu=False, options=options)
def numerics(arguments, table: Table) -> None:
    """Relative RMS errors of a decoder layer's output and of every gradient, against FP64.

    The reference has the same BF16 weights, input and output gradient. `y` and `dx` are what the layer adds
    to its input and to the gradient of its output; the other columns are the gradients of the weights.
    What BF16's own row shows in `y` is mostly the rounding of that sum, which all share, and which brings
    ratios nearer to 1. `TE delayed` has the scales of one pass over another batch, where training gives it
    those of many: its row shows the worst of it.
    Data: trained, layers of GPTs that have learned real text for --steps steps; outliers, the same with
    some channels of the input 30 to 100 times as large; random. The small model without a GPU or with
    --quick. A row's `figure` is one of
    - RMS error: root mean square over all layers of --models models, with two batches each;
    - to TE current: geometric mean over these of the ratio of this error to that of TransformerEngine's
      current scaling in the same layer and batch (--to names another layer in its place);
    - standard error: of that ratio, over layers; batches of a layer share its weights and are averaged first.
      Where in its binade a large value falls is chance, and changes the error of single layers by some
      percent either way: a ratio within two standard errors of 1 may be no more than that. What falls
      alike in all layers of one size, such as a norm's largest output, is not averaged out.
    """
    small = arguments.quick or not torch.cuda.is_available()
    setting, seeds = (SMALL if small else LARGE), range(SEED, SEED + arguments.models)
    # training, where layers come from, is most of the time; nothing that is compared has FP32 GEMMs
    torch.set_float32_matmul_precision("high")
    with one_process():
        trained: list[Sample] = []
        for seed in seeds:
            shape, of_model = trained_samples(setting, arguments.steps, seed)
            trained += of_model
        samples = {
            "trained": trained,
            "outliers": [with_outliers(sample) for sample in trained],
            "random": [random_sample(sample, seed) for seed, sample in enumerate(trained)],
        }
        for data, of_layers in samples.items():
            errors = errors_by_layer(data, shape, of_layers, arguments.layers, table)
            if (others := errors.pop(arguments.to, None)) is None:
                continue
            for name, own in errors.items():
                ratios, deviations = mean_ratios(own, others)
                table.add(data=data, layer=name, figure=TO + arguments.to, **ratios)
                table.add(data=data, layer=name, figure=STANDARD_ERROR, **deviations)
    plot(table.rows, table.path.with_stem(f"{table.path.stem}_ratios").with_suffix(".png"))
