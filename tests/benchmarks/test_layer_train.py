"""A model that goes on in COAT's layers: which layers compute, what is compared, and a quick run."""

import csv

import pytest
import torch

from benchmarks.layer_train import BF16, LAYERS, SAVED_ALONE, learner, summary
from coat_launch.data import load_corpus
from tests.benchmarks.test_harness import run


@pytest.mark.usefixtures("megatron")
def test_learners_differ_by_their_layers_alone():
    """Of the same weights and text: COAT's gradients are near those of BF16 layers, and no two kinds have the
    same."""
    corpus = load_corpus(seq_length=128, seed=1)
    torch.manual_seed(0)
    made = {name: learner(corpus.vocab_size, name) for name in LAYERS}
    matrices = made[BF16].matrices
    weights = torch.cat([0.02 * torch.randn(matrices), torch.ones(total(made[BF16]) - matrices)])
    gradients = {}
    for name, one in made.items():
        one.show(weights)
        gradients[name] = one.gradients(corpus.train.batch(range(2)))
    stock = gradients.pop(BF16)
    apart = {name: ((g - stock).norm() / stock.norm()).item() for name, g in gradients.items()}
    # what is saved in 8 bits is all that is left then
    assert apart.pop(SAVED_ALONE) < min(apart.values()) / 3, apart
    # one E5M2 code is off by 7 % at most, products of a layer one after the other
    assert all(0.01 < distance < 0.4 for distance in apart.values()), apart
    assert len(set(apart.values())) == len(apart)


def total(one):
    return sum(p.numel() for p in one.parameters)


def test_losses_are_beside_those_that_bf16_layers_trained_and_computed():
    def row(layers, evaluated, seed, loss):
        of = {"layers": layers, "evaluated": evaluated, "seed": seed, "val_loss": loss}
        return {"phase": "tail", "steps": 2} | of

    rows = [row(BF16, BF16, 1, 2.0), row(BF16, BF16, 2, 3.0), row(BF16, "COAT", 1, 2.1)]
    rows += [row("COAT", "COAT", 1, 2.5), row("COAT", "COAT", 2, 3.7), row("COAT", BF16, 2, 3.25)]
    found = {(row["layers"], row["evaluated"]): row["to_baseline"] for row in summary(rows)}
    expected = {(BF16, BF16): 0, (BF16, "COAT"): 0.1, ("COAT", "COAT"): 0.6, ("COAT", BF16): 0.25}
    assert found == pytest.approx(expected)


@pytest.mark.long("a benchmark's dry run")
def test_all_layers_end_and_are_evaluated_in_both(tmp_path):
    path = tmp_path / "layer_train.csv"
    result = run("layer_train", "--quick", "--output", str(path))
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(path.open()))
    assert [(row["layers"], row["evaluated"]) for row in rows] == [
        (name, evaluated) for name in LAYERS for evaluated in (BF16, "COAT")
    ]
    losses = [float(row["val_loss"]) for row in rows]
    # a network that has learned nothing is at log(384)
    assert all(5 < loss < 6 for loss in losses)
    # no two have the same weights and evaluator
    assert len(set(losses)) == len(losses)
