"""Pictures say what their labels say, the scores can tell, and the dry run names what COAT replaced."""

import argparse
import csv

import numpy as np
import pytest
import torch

from benchmarks.converge.recipe import Run
from benchmarks.vlm import model as models
from benchmarks.vlm import pictures
from benchmarks.vlm.sizes import FULL, QUICK, Stack
from tests.benchmarks.test_harness import run

STACK = Stack(64, 128, 1, 2)
SIZES = FULL._replace(train=64, held_out=16, tower=STACK, decoder=STACK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm") / "pictures"
    pictures.prepare(folder, SIZES)
    return folder


@pytest.fixture
def model():
    return models.build(SIZES, None, Run.parse("bf16"), None, None)


def number_of(labels):
    return int("".join(str(int(label) - pictures.ZERO) for label in labels))


def test_no_number_is_trained_on_and_held_out(folder):
    train, held_out = pictures.load(folder, SIZES, seed=1)
    assert (len(train), len(held_out)) == (64, 16)
    for part, expected in ((train, False), (held_out, True)):
        numbers = [number_of(labels) for labels in part.batch(range(len(part))).labels]
        assert all((number % pictures.HELD_OUT == 0) == expected for number in numbers)


def test_pictures_are_of_their_numbers(folder):
    from PIL import Image, ImageDraw, ImageFont

    batch = pictures.load(folder, SIZES, seed=1).train.batch(range(8))
    for pixels, labels in zip(batch.pixels.numpy(), batch.labels, strict=True):
        rows, columns = (np.flatnonzero(pixels.any(axis)) for axis in (1, 0))
        found = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        drawn = []
        for size in SIZES.fonts:
            image = Image.new("L", (2 * SIZES.image, 2 * SIZES.image))
            text = f"{number_of(labels):0{SIZES.digits}}"
            ImageDraw.Draw(image).text((9, 9), text, fill=255, font=ImageFont.load_default(size))
            drawn.append(np.asarray(image.crop(image.getbbox())))
        # whole, in one of the sizes
        assert any(found.shape == one.shape and (found == one).all() for one in drawn)


def test_a_batch_asks_for_the_digits_one_by_one(folder):
    train = pictures.load(folder, SIZES, seed=1).train
    batch = train.batch(range(4))
    assert batch.tokens.shape == (4, SIZES.sequence) == (4, 69)
    assert (batch.tokens[:, :64] == pictures.PATCH).all() and (batch.tokens[:, 64] == pictures.QUESTION).all()
    assert torch.equal(batch.tokens[:, 65:], batch.labels[:, :-1])
    assert batch.labels.min() >= pictures.ZERO and batch.labels.max() < pictures.ZERO + 10
    parts = list(train.micro_batches(4, global_batch_size=8, micro_batch_size=4))
    assert torch.equal(torch.cat([p.labels for p in parts]), train.batch(range(4, 12)).labels)
    # an epoch holds each picture once, in another order for another seed
    other = pictures.load(folder, SIZES, seed=2).train
    first, second = (part.batch(range(64)).labels for part in (train, other))
    assert not torch.equal(first, second)
    assert torch.equal(first.unique(dim=0), second.unique(dim=0))


def test_the_model_sees_the_picture_and_no_later_digit(folder, model):
    batch = pictures.load(folder, SIZES, seed=1).train.batch(range(2))
    with torch.no_grad():
        found = models.logits(model, batch)
        dark = models.logits(model, batch._replace(pixels=torch.zeros_like(batch.pixels)))
        tokens = batch.tokens.clone()
        tokens[:, -1] = pictures.ZERO + (tokens[:, -1] - pictures.ZERO + 1) % 10
        later = models.logits(model, batch._replace(tokens=tokens))
    assert found.shape == (2, SIZES.digits, pictures.VOCABULARY)
    assert (found - dark).abs().max() > 0.01
    assert torch.equal(later[:, :-1], found[:, :-1]) and not torch.equal(later[:, -1], found[:, -1])


@pytest.mark.parametrize("wrong, exact, digits", [(0, 1.0, 1.0), (4, 0.75, 0.95)])
def test_one_wrong_digit_is_a_wrong_number(folder, monkeypatch, wrong, exact, digits):
    data = pictures.load(folder, SIZES, seed=1)

    def logits(model, batch):
        labels = batch.labels.clone()
        labels[:wrong, 2] += 1
        return torch.nn.functional.one_hot(labels, pictures.VOCABULARY).float()

    monkeypatch.setattr(models, "logits", logits)
    setup = argparse.Namespace(recipe=argparse.Namespace(micro_batch=16))
    assert models.scores(setup, None, data, 0) == {"exact": exact, "digits": digits}


def test_coat_replaces_the_layers_of_tower_projector_and_decoder(model):
    import coat_ds

    assert models.replaced(model) == {}
    assert models.replaced(coat_ds.convert(model)) == {
        "tower_replaced": "6 linear, 3 norm, 1 feed_forward, 1 attention",
        "projector_replaced": "2 linear, 1 feed_forward",
        "decoder_replaced": "7 linear, 3 norm, 1 feed_forward, 1 attention, 1 layer",
        "left": "lm_head (the head)",
    }


@pytest.mark.long("a benchmark's dry run")
def test_the_dry_run(tmp_path):
    paths = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "vlm.csv")]
    result = run("vlm", "--quick", *paths)
    assert result.returncode == 0, result.stderr
    bf16, coat = csv.DictReader((tmp_path / "vlm.csv").open())
    assert (bf16["run"], coat["run"]) == ("bf16", "coat") and bf16["pictures"] == coat["pictures"]
    for row in (bf16, coat):
        assert float(row["val_loss_start"]) == pytest.approx(np.log(pictures.VOCABULARY), abs=0.3)
        assert 0 <= float(row["exact"]) <= float(row["digits"]) <= 1
    assert 0 < abs(float(coat["val_loss"]) - float(bf16["val_loss"])) < 0.02
    for stack in ("tower", "decoder"):
        saved = [float(row[f"{stack}_saved_bytes_per_token_layer"]) for row in (bf16, coat)]
        assert saved[1] < 0.6 * saved[0]
    layers = QUICK.tower.layers
    assert coat["tower_replaced"].startswith(f"{6 * layers} linear") and not bf16["tower_replaced"]
    assert (tmp_path / "vlm.png").stat().st_size > 0
