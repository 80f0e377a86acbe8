"""Pictures match their labels, the scores can measure a difference, and the dry run names the modules that
COAT replaced."""

import numpy as np
import pytest

from benchmarks.converge.recipe import Run
from benchmarks.vlm import model as models
from benchmarks.vlm import pictures
from benchmarks.vlm.sizes import FULL, QUICK, Stack
from tests.benchmarks.dry import rows_of

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


def test_coat_replaces_the_layers_of_tower_projector_and_decoder(model):
    import coat_ds

    assert models.replaced(model) == {}
    assert models.replaced(coat_ds.convert(model)) == {
        "tower_replaced": "6 linear, 3 norm, 1 feed_forward, 1 attention",
        "projector_replaced": "2 linear, 1 feed_forward",
        "decoder_replaced": "7 linear, 3 norm, 1 feed_forward, 1 attention, 1 layer",
        "left": "lm_head (the output head)",
    }


@pytest.mark.long("a benchmark's dry run")
def test_the_dry_run(tmp_path):
    bf16, coat = rows_of(tmp_path / "vlm.csv", "vlm", "--quick", "--work", str(tmp_path / "work"))
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
