"""What FP8 costs one decoder layer in accuracy, on weights and inputs of a model that is being trained."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.decoder_layers import (
    Layer,
    LayerShape,
    Result,
    device,
    megatron_layer,
    random_weights,
    result_of,
    torch_layer,
    transformer_engine_layer,
)
from benchmarks.harness import Table, benchmark, reason
from benchmarks.training import LARGE, SMALL, Setting, loss_of, one_process, train_gpt

TE_CURRENT = "TE current"
# delayed scaling takes its scales from earlier passes
WARMUP = 3
BATCH = 8
# of the model, from all depths
LAYERS = 6
# channels of the input and what they are multiplied by
OUTLIERS = {0: 30, 1: 50, 2: 70, 3: 100}


class Sample(NamedTuple):
    """A layer's weights by Megatron's names, its input and its output's gradient [s, b, h], all BF16."""

    weights: dict[str, torch.Tensor]
    x: torch.Tensor
    grad: torch.Tensor


def rows() -> dict[str, Callable[[LayerShape], Layer]]:
    ours = functools.partial(megatron_layer, spec="coat_layer_spec")
    te = transformer_engine_layer
    return {
        "BF16": megatron_layer,
        "TE delayed": functools.partial(te, recipe="DelayedScaling"),
        TE_CURRENT: functools.partial(te, recipe="Float8CurrentScaling"),
        "TE blockwise": functools.partial(te, recipe="Float8BlockScaling"),
        "ours": ours,
        "ours, gradients E4M3": functools.partial(ours, backward_format="e4m3"),
        "ours, saved E4M3": functools.partial(ours, saved_format="e4m3"),
        "ours, both E4M3": functools.partial(ours, saved_format="e4m3", backward_format="e4m3"),
        "ours, 8-bit attention": functools.partial(ours, attention_format="sqrt8"),
        "ours, E4M3 attention": functools.partial(ours, attention_format="e4m3"),
    }


def trained_samples(setting: Setting, steps: int) -> tuple[LayerShape, list[Sample]]:
    """Layers from all depths of a partly trained GPT, on text that it has not seen."""
    model, _, data = train_gpt(setting, steps)
    config, layers = model.config, model.decoder.layers
    chosen = layers[:: max(len(layers) // LAYERS, 1)][:LAYERS]
    seen = {layer: {} for layer in chosen}

    def keep(module, args, kwargs, output):
        seen[module]["x"] = args[0] if args else kwargs["hidden_states"]
        output[0].register_hook(lambda grad: seen[module].update(grad=grad))

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in chosen]
    first = steps * setting.batch_size
    loss_of(model, data.batch(range(first, first + BATCH))).backward()
    for handle in handles:
        handle.remove()
    shape = LayerShape(
        config.hidden_size,
        config.ffn_hidden_size,
        config.num_attention_heads,
        config.num_query_groups,
        BATCH,
        setting.seq_length,
    )
    samples = []
    for layer in chosen:
        weights = {name: p.detach().bfloat16() for name, p in layer.named_parameters()}
        samples.append(Sample(weights, seen[layer]["x"].detach().bfloat16(), seen[layer]["grad"].bfloat16()))
    return shape, samples


def with_outliers(sample: Sample) -> Sample:
    """A few channels of the input much larger than the others, as models grow them."""
    factors = torch.ones_like(sample.x[0, 0])
    for channel, factor in OUTLIERS.items():
        factors[channel] = factor
    return sample._replace(x=sample.x * factors)


def random_sample(sample: Sample) -> Sample:
    """Normal values of the same sizes."""
    weights = {name: w.bfloat16() for name, w in random_weights(sample.weights).items()}
    generator = torch.Generator(device()).manual_seed(1)
    x, grad = (torch.randn(sample.x.shape, generator=generator, device=device()).bfloat16() for _ in range(2))
    return Sample(weights, x, grad)


def exact_result(shape: LayerShape, sample: Sample) -> Result:
    """What FP64 makes of a sample, in Megatron's order of rows."""
    reference = torch_layer(shape, dtype=torch.float64)
    reference.load(sample.weights)
    with sdpa_kernel(SDPBackend.MATH):
        exact = result_of(reference, sample.x.double(), sample.grad.double())
    order = reference.qkv_rows.argsort()
    for name in exact.parameters:
        if "linear_qkv" in name:
            exact.parameters[name] = exact.parameters[name][order]
    return exact


def errors_of(
    make: Callable[[LayerShape], Layer], shape: LayerShape, sample: Sample, exact: Result
) -> dict[str, float]:
    """Relative RMS errors of a layer's output and gradients, by the names of its parts."""
    layer = make(shape)
    layer.load(sample.weights)
    for _ in range(WARMUP):
        result = result_of(layer, sample.x, sample.grad)
    errors = result.errors(exact, layer)
    # makers list their parameters in orders of their own
    return {k.split(".")[-2] if "." in k else k: errors[k] for k in ("y", "dx", *sample.weights)}


def plot(rows: list[dict], path: Path) -> None:
    """Bars of the errors: panels are kinds of data, clusters tensors, colours layers."""
    measured = [row for row in rows if "y" in row]
    samples = list(dict.fromkeys(row["data"] for row in measured))
    layers = list(dict.fromkeys(row["layer"] for row in measured))
    tensors = [k for k in measured[0] if k not in ("data", "layer", "to_te_current")]
    figure, panels = plt.subplots(len(samples), 1, figsize=(11, 3 * len(samples)), layout="constrained")
    for data, axes in zip(samples, panels, strict=True):
        for i, layer in enumerate(layers):
            row = next(r for r in measured if (r["data"], r["layer"]) == (data, layer))
            places = [place + (i - len(layers) / 2) * 0.8 / len(layers) for place in range(len(tensors))]
            heights = [100 * row[t] for t in tensors]
            axes.bar(places, heights, 0.8 / len(layers), label=layer, color=plt.cm.tab10(i))
        axes.set_xticks(range(len(tensors)), tensors, fontsize="small")
        axes.set(title=data, ylabel="relative RMS error, %", yscale="log")
    panels[0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="training steps before the layer is taken")


@benchmark(needs_gpu=False, options=options)
def numerics(arguments, table: Table) -> None:
    """Relative RMS errors of a decoder layer's output and of every gradient, against FP64.

    The reference has the same BF16 weights, input and output gradient. `y` and `dx` are what the layer adds
    to its input and to the gradient of its output; the other columns are the gradients of the weights.
    What BF16's own row shows in `y` is mostly the rounding of that sum, which all share. Errors are root
    mean squares over layers from all depths of the model: with outliers a norm's weight has as many large
    gradients as there are outlier channels, too few for one layer to tell formats apart.
    `to_te_current` is the largest ratio to TransformerEngine's current scaling among y and these.
    Data: trained, layers of a GPT that has learned real text for --steps steps; outliers, the
    same with some channels of the input 30 to 100 times as large; random.
    The small model without a GPU or with --quick.
    """
    small = arguments.quick or not torch.cuda.is_available()
    with one_process():
        shape, trained = trained_samples(SMALL if small else LARGE, arguments.steps)
        samples = {
            "trained": trained,
            "outliers": [with_outliers(sample) for sample in trained],
            "random": [random_sample(sample) for sample in trained],
        }
        for data, of_layers in samples.items():
            exact = [exact_result(shape, sample) for sample in of_layers]
            te_current = None
            for name, make in rows().items():
                try:
                    errors = [errors_of(make, shape, *pair) for pair in zip(of_layers, exact, strict=True)]
                # whatever a peer stumbles over, the others go on
                except Exception as error:
                    if name == "BF16":
                        raise
                    table.add(data=data, layer=name, note=reason(error))
                    continue
                columns = {k: (sum(e[k] ** 2 for e in errors) / len(errors)) ** 0.5 for k in errors[0]}
                row = {"data": data, "layer": name, **columns}
                weights = {k: e for k, e in columns.items() if k != "dx"}
                if name == TE_CURRENT:
                    te_current = weights
                if te_current is not None:
                    row["to_te_current"] = max(e / te_current[k] for k, e in weights.items())
                table.add(**row)
    table.path.parent.mkdir(parents=True, exist_ok=True)
    plot(table.rows, table.path.with_suffix(".png"))
