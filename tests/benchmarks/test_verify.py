"""The headline figures equal the stored ones, and the gate separates claims that hold from claims that do
not."""

import csv
import shlex
import shutil

import pytest

from benchmarks import reproduce, verify
from benchmarks.__main__ import build_parser
from benchmarks.common.harness import BENCHMARKS, RESULTS
from benchmarks.layer import row_makers

SPEED = next(one for one in verify.load() if one.name == "7b-zero2-speed")
LOSS = next(one for one in verify.load() if one.name == "converge-nats")
MEMORY = next(one for one in verify.load() if one.name == "7b-zero2-80gb-bf16")


def test_every_headline_figure_is_stored():
    verdicts = {one.name: verify.check_stored(one) for one in verify.load()}
    assert {name: verdict for name, verdict in verdicts.items() if verdict.result != "pass"} == {}


def change(path, pick, **values):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if all(row[k] == v for k, v in pick.items()):
            row.update(values)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_another_stored_figure_fails(tmp_path):
    shutil.copy(RESULTS / SPEED.file, tmp_path)
    assert verify.check_stored(SPEED, tmp_path).result == "pass"
    pick = {"way": "zero2", "system": "COAT", "limited": "False"}
    # the ratio is then 1.650
    change(tmp_path / SPEED.file, pick, tokens_per_s_gpu="16990.0")
    assert "has another" in verify.check_stored(SPEED, tmp_path).reason
    (tmp_path / SPEED.file).unlink()
    assert "no row with way=zero2" in verify.check_stored(SPEED, tmp_path).reason


@pytest.mark.parametrize(
    "one, found, result",
    [
        (SPEED, 1.647 * 0.971, "pass"),
        (SPEED, 1.647 * 0.969, "fail"),
        (SPEED, 1.9, "pass"),
        (SPEED._replace(better=""), 1.9, "fail"),
        (SPEED._replace(better="less"), 1.9, "fail"),
        (SPEED, float("nan"), "fail"),
        (LOSS, 0.0099, "pass"),
        (LOSS, 0.0101, "fail"),
        (LOSS, -0.02, "pass"),
        (MEMORY, "out of memory", "pass"),
        (MEMORY, "no note: it ran", "fail"),
    ],
)
def test_a_figure_may_be_off_by_its_tolerance_and_better(one, found, result):
    assert verify.judged(one, found).result == result


def test_commands_are_those_of_the_benchmarks():
    parser = build_parser()
    lines = {one.command for one in verify.load()}
    lines |= {line["command"] for line in reproduce.load() if "command" in line}
    known = [shlex.split(command) for command in lines]
    known = [words for words in known if words[0] in BENCHMARKS]
    assert len(known) > 20
    for words in known:
        parser.parse_args([*words, "--output", "x.csv", "--quick"])


def test_commands_measure_the_rows_that_they_are_expected_to():
    parser, seen = build_parser(), 0
    for one in verify.load():
        words = shlex.split(one.command)
        if words[0] not in ("layer", "train"):
            continue
        arguments = parser.parse_args(words)
        named = (
            {"layer": row_makers(arguments.rows)} if words[0] == "layer" else {"system": arguments.systems}
        )
        ((column, measured),) = named.items()
        for pick in filter(None, (one.rows, one.base)):
            wanted = dict(part.strip().split("=", 1) for part in pick.split(";"))
            assert wanted[column] in measured, one.name
            seen += 1
    assert seen > 50
