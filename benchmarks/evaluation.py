"""Models of transformers that are evaluated while COAT trains them, in FP8 and as stock ones."""

import argparse
import functools
import warnings

import torch

import coat_ds
from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, row_or_note
from benchmarks.common.timing import measure
from benchmarks.common.wide_models import SHAPES
from benchmarks.models import TOKENS, build

SYSTEMS = {"BF16": None, "COAT": {}, "COAT, stock in evaluation": {"evaluation": "stock"}}
# sequences that are continued, and tokens before
ROWS, BEFORE = 8, 512


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "llama3-8b"])
    parser.add_argument("--layers", type=int, help="of each")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the whole pass")


def hidden_states(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    return model(**inputs).last_hidden_state


def next_token(model: torch.nn.Module, before: int, ids: torch.Tensor):
    """A call that gives sequences of `before` tokens one more, each time the same place."""
    found = model(input_ids=ids[:, :before], use_cache=True)
    cache = found.past_key_values

    def call() -> torch.Tensor:
        y = model(input_ids=ids[:, before : before + 1], past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return y.last_hidden_state

    return call


def row(name: str, system: str, arguments) -> dict:
    shape, activations = SHAPES[name], SYSTEMS[system]
    tokens, before = (256, 16) if arguments.quick else (arguments.tokens, BEFORE)
    layers = 1 if arguments.quick else arguments.layers or shape.layers
    repeats = (1, 1) if arguments.quick else (5, 30)
    torch.manual_seed(0)
    model = build(shape, layers, device(), arguments.quick)
    model.eval()
    inputs = shape.inputs(device(), tokens)
    with torch.no_grad():
        expected = hidden_states(model, inputs).float()
        if activations is not None:
            coat_ds.convert(model, activations)
        y = hidden_states(model, inputs).float()
        error = ((y - expected).norm() / expected.norm()).item()
        whole = measure(lambda: hidden_states(model, inputs), *repeats)
        ids = inputs["input_ids"][:1, : before + 1].expand(ROWS, -1)
        one = measure(next_token(model, before, ids), *repeats)
    return {
        "layers": layers,
        "tokens": tokens,
        "ms": whole.median,
        "error": error,
        "rows": ROWS,
        "before": before,
        "ms_next_token": one.median,
    }


@benchmark(needs_gpu=False, options=options)
def evaluation(arguments, table: Table) -> None:
    """Models of transformers that are evaluated: the time of a whole pass and of a next token, and the error.

    Random weights, without a head, without gradients, after `model.eval()`.
    Columns:
    - ms: of a pass over `tokens`, by device events, median;
    - error: relative RMS of its last hidden states, against those of the same model before it was converted;
    - ms_next_token: of one more token for each of `rows` sequences that have `before` tokens in a cache.
    With --quick small models of one layer; on a CPU times mean nothing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in arguments.shapes:
            for system in SYSTEMS:
                measured = row_or_note(functools.partial(row, name, system, arguments))
                table.add(shape=name, system=system, **measured)
