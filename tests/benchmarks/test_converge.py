"""The convergence benchmark trains, stops and resumes, and refuses comparisons of unlike runs."""

import csv
import math

import numpy as np
import pytest

from benchmarks.converge import corpus, recipe
from coat_launch.report import read_metrics
from tests.benchmarks.dry import run

TRAINED = ["bf16-seed1", "coat-seed1", "bf16-to-coat-seed1"]
TEXT = "".join(f"line {i} of the text\n" for i in range(40))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("converge")


@pytest.fixture(scope="module")
def converge_on(text):
    """Runs the benchmark; returns its output and the rows of its table."""

    def call(folder, output, *arguments, fails=False):
        paths = ["--text", str(text), "--work", str(folder / "work"), "--output", str(output)]
        result = run("converge", "--quick", *paths, *arguments)
        assert result.returncode == fails, result.stderr
        assert ("some runs failed" in result.stderr) == fails
        return result.stdout, list(csv.DictReader(output.open())) if output.exists() else []

    return call


def lines(folder, name):
    """The log lines of a run, without its speed."""
    found = {(r["step"], "loss" in r): r for r in read_metrics(folder / f"{name}.jsonl")}
    for record in found.values():
        record.pop("tokens_per_s", None)
    return found


@pytest.fixture(scope="module")
def trained(work, converge_on):
    """Runs that were not interrupted."""
    return converge_on(work, work / "converge.csv", "--runs", *TRAINED)


@pytest.mark.long("a benchmark's dry run")
def test_runs_learn_alike_and_a_change_goes_on_where_the_other_stopped(work, trained):
    _, rows = trained
    rows = {f"{row['run']}-seed{row['seed']}": row for row in rows}
    assert list(rows) == TRAINED
    for row in rows.values():
        # ln(384) is the loss of an untrained model with 384 ids
        assert float(row["val_loss_start"]) == pytest.approx(math.log(384), abs=0.3)
        assert float(row["val_loss"]) < float(row["val_loss_start"]) - 0.05
    # FP8 rounds by 2^-4 of the loss that the run has gained
    learned = float(rows[TRAINED[0]]["val_loss_start"]) - float(rows[TRAINED[0]]["val_loss"])
    bf16, coat, changed = (float(rows[name]["val_loss"]) for name in TRAINED)
    # the loss in the layers of the training is that of the run; in the other layers it is rounded
    in_stock, in_fp8 = ([rows[name][f"val_loss_{x}"] for name in TRAINED] for x in ("bf16", "fp8"))
    assert in_stock[0] == rows[TRAINED[0]]["val_loss"] != in_fp8[0]
    assert in_fp8[1:] == [rows[name]["val_loss"] for name in TRAINED[1:]] and in_stock[1] != in_fp8[1]
    for loss in map(float, (*in_stock, *in_fp8)):
        assert abs(loss - bf16) < 2**-4 * learned
    assert 0 < abs(coat - bf16) < 2**-4 * learned and 0 < abs(changed - bf16) < 2**-4 * learned
    assert float(rows["coat-seed1"]["to_bf16_same_seed"]) == pytest.approx(coat / bf16 - 1)
    states = [float(rows[name]["state_bytes_per_param"]) for name in TRAINED]
    assert states[0] == pytest.approx(8, rel=1e-3) and states[1] == states[2] < 2.1
    before, after = (lines(work / "converge", name) for name in (TRAINED[0], TRAINED[2]))
    half = recipe.TINY.steps // 2
    assert all(before[key]["run"] for key in before)
    for step in range(1, half + 1):
        assert after[step, True]["loss"] == before[step, True]["loss"]
    # the same weights in other layers, which round by 2^-4 of the loss gained so far
    found, expected = after[half + 1, True]["loss"], before[half + 1, True]["loss"]
    assert 0 < abs(found - expected) < 2**-4 * (before[1, True]["loss"] - expected)
    assert (work / "converge.png").stat().st_size > 0


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    (root / "package").mkdir()
    for i in range(100):
        (root / "package" / f"{i:03}.py").write_text(f"# file {i}\n{TEXT}")
    (root / "package/equal.py").write_text(f"# file 7\n{TEXT}")
    (root / "package/binary.py").write_bytes(b"\xff\xfe")
    (root / "package/empty.md").write_text("")
    (root / "package/image.png").write_text(TEXT)
    (root / "large.py").write_text("x" * (corpus.LARGEST + 1))
    return root


def test_documents_are_split_by_content_alone(text, tmp_path):
    folder = tmp_path / "data"
    corpus.prepare(folder, [text], 300, 1 << 30)
    manifest = list(csv.DictReader((folder / "manifest.csv").open()))
    assert len(manifest) == 100 and {row["part"] for row in manifest} == {"train", "held_out"}
    for row in manifest:
        held_out = int(row["sha256"][:8], 16) % corpus.HELD_OUT == 0
        assert row["part"] == ("held_out" if held_out else "train")
        assert (text / row["path"]).stat().st_size == int(row["bytes"])
    one, two = (corpus.load(folder, 16, seed) for seed in (1, 2))
    # another order of the same training data, and the same held-out text
    assert not np.array_equal(one.train.batch([0]).tokens, two.train.batch([0]).tokens)
    assert np.array_equal(one.held_out.batch([0, 1]).tokens, two.held_out.batch([0, 1]).tokens)
    assert one.identity == two.identity

    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.load(folder / "train.npy")
    ends = np.cumsum(np.load(folder / "train_lengths.npy"))
    first = [row["path"] for row in manifest if row["part"] == "train"][0]
    assert tokenizer.decode(ids[: ends[0] - 1].tolist()) == (text / first).read_text()
    assert ids[ends - 1].tolist() == [tokenizer.token_to_id(corpus.END_OF_DOCUMENT)] * len(ends)
    again = tmp_path / "again"
    corpus.prepare(again, [text], 300, 1 << 30)
    assert corpus.load(again, 16, 1).identity == one.identity
