"""The headline figures equal the stored ones, and the gate separates claims that hold from claims that do
not."""

import csv
import math
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import reproduce, verify
from benchmarks.__main__ import build_parser, main
from benchmarks.common import commands
from benchmarks.common.commands import Commands, Needs, NotRunnable, check_machine
from benchmarks.common.harness import BENCHMARKS, RESULTS, read_rows
from benchmarks.layer import row_makers
from tests.benchmarks.test_harness import run

SPEED = next(one for one in verify.load() if one.name == "7b-zero2-speed")
LOSS = next(one for one in verify.load() if one.name == "converge-nats")
LARGEST = next(one for one in verify.load() if one.name == "7b-zero2-80gb-micro-batch")
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


def test_figures_are_taken_from_the_rows_that_are_named():
    def row(system, limited, micro_batch, **figures):
        return {"way": "zero2", "system": system, "limited": limited, "micro_batch": micro_batch} | figures

    oom = "torch.OutOfMemoryError: CUDA out of memory"
    rows = [row("BF16", False, 4, tokens_per_s_gpu=100.0), row("COAT", False, 4, tokens_per_s_gpu=150.0)]
    rows += [row("COAT", True, size, tokens_per_s_gpu=10.0 * size) for size in (7, 8)]
    rows += [row("COAT", True, 9, note=oom), row("BF16", True, 1, note=oom)]
    assert verify.figures(SPEED, rows) == (1.5, 150.0, 100.0)
    assert verify.figures(MEMORY, rows)[0] == "out of memory"
    ran = [*rows[:-1], row("BF16", True, 1, tokens_per_s_gpu=10.0)]
    assert verify.figures(MEMORY, ran)[0] == "no note: it ran"
    assert verify.figures(LARGEST, rows)[0] == 8
    with pytest.raises(LookupError, match="expected one row with .*, found 2"):
        verify.figures(SPEED, [*rows, rows[0]])
    rows[0] = row("BF16", False, 4, note=oom)
    with pytest.raises(RuntimeError, match="out of memory"):
        verify.figures(SPEED, rows)
    rows[0] = row("BF16", False, 4, note="transformer_engine is not installed")
    with pytest.raises(NotRunnable, match="not installed"):
        verify.figures(SPEED, rows)
    losses = [{"run": "bf16", "val_loss": v} for v in (1.0, 1.2)] + [{"run": "coat", "val_loss": 1.25}]
    assert verify.figures(LOSS, losses)[0] == pytest.approx(0.15)
    assert verify.figures(LOSS._replace(how="above"), losses)[0] == pytest.approx(0.05)
    # a diverged run is not within the spread
    losses[2]["val_loss"] = math.nan
    assert math.isnan(verify.figures(LOSS._replace(how="above"), losses)[0])


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_what_cannot_run_here_says_why(tmp_path, monkeypatch, capsys):
    with pytest.raises(NotRunnable, match="needs 2 GPUs, found 0"):
        check_machine(Needs(2))
    check_machine(Needs(0))
    late = Commands(tmp_path, time.monotonic() - 1, False)
    with pytest.raises(NotRunnable, match="no time left"):
        late.rows("state_loop", Needs(0))
    with pytest.raises(NotRunnable, match="run it by hand: torchrun"):
        late.rows("torchrun x", Needs(0))
    command = ["benchmarks", "verify", "--only", "layer-7b", "--output", str(tmp_path / "verify.csv")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "0 pass, 0 fail, 9 not runnable here" in capsys.readouterr().out
    rows = read_rows(tmp_path / "verify.csv")
    assert {(row["result"], row["reason"]) for row in rows} == {("not runnable", "needs 1 GPU, found 0")}
    with pytest.raises(SystemExit, match="--only nothing: expected the start of one of"):
        verify.chosen(["nothing"])


# a benchmark that prints where and when it ran
MEASURE = """
import csv, os, sys, time
begin, gpus, path = time.time(), os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[-1]
time.sleep(1)
if "fail" in sys.argv:
    open(path, "w").write("gpus,begin,end\\n0,1,2\\n")
    sys.exit("it broke")
with open(path, "w") as file:
    csv.writer(file).writerows([("gpus", "begin", "end"), ("GPUs " + gpus, begin, time.time())])
"""


def commands_of(folder, gpus, monkeypatch):
    script = folder / "measure.py"
    script.write_text(MEASURE)
    monkeypatch.setattr(commands, "PROGRAM", (sys.executable, str(script)))
    monkeypatch.setattr(commands, "visible_gpus", lambda: [str(gpu) for gpu in range(gpus)])
    # commands run in another folder
    monkeypatch.chdir(folder)
    # small sizes, which need no GPU
    return Commands(Path("work"), time.monotonic() + 600, True)


def test_gpus_are_filled_and_a_command_of_many_gets_its_turn(tmp_path, monkeypatch, capsys):
    # more GPUs than there are: small sizes use the GPUs that exist
    wanted = {"layer 1": 1, "layer 2": 1, "zero": 4, "train 3": 1}
    with commands_of(tmp_path, 2, monkeypatch) as measured:
        measured.want_all((command, Needs(gpus)) for command, gpus in wanted.items())
        assert measured.waiting["zero"] == 2
        rows = {command: measured.rows(command, Needs(gpus))[0] for command, gpus in wanted.items()}
        assert measured.rows("layer 1", Needs(1)) == [rows["layer 1"]] and not measured.waiting
    first, second, both, last = rows.values()
    assert {first["gpus"], second["gpus"]} == {"GPUs 0", "GPUs 1"}
    assert max(first["begin"], second["begin"]) < min(first["end"], second["end"])
    assert sorted(both["gpus"].removeprefix("GPUs ").split(",")) == ["0", "1"]
    assert max(first["end"], second["end"]) <= both["begin"] and both["end"] <= last["begin"]
    # only a command that stops in time gets the time limit
    printed = capsys.readouterr().out
    assert "layer 1 --quick --output" in printed and "train 3 --minutes 9." in printed
    # a next call reuses existing rows if they are of the same sizes
    with commands_of(tmp_path, 2, monkeypatch) as again:
        assert again.rows("layer 1", Needs(1)) == [first]
        again.quick = False
        assert not again._path("layer 1").exists()


def test_a_part_of_a_measurement_is_not_taken_for_the_whole(tmp_path, monkeypatch):
    with commands_of(tmp_path, 1, monkeypatch) as measured:
        with pytest.raises(RuntimeError, match="exit status 1: it broke"):
            measured.rows("layer fail", Needs(1))
        measured.want("layer 1", Needs(1))
        # a command that the machine interrupts also leaves rows
        measured._advance()
        (process,) = measured.running.values()
    assert process.popen.returncode
    assert {path.suffix for path in (tmp_path / "work").iterdir()} == {".part", ".log"}
    with commands_of(tmp_path, 1, monkeypatch) as again, pytest.raises(RuntimeError, match="it broke"):
        again.rows("layer fail", Needs(1))


def test_a_search_that_time_was_over_in_has_found_no_largest(tmp_path):
    measured, one = Commands(tmp_path, math.inf, False), LARGEST._replace(gpus=0)
    shutil.copy(RESULTS / one.file, measured._path(one.command))
    # the command counts as ended
    measured.failures[one.command] = ""
    assert verify.check_again(one, measured).result == "pass"
    measured.cut.add(one.command)
    assert verify.check_again(one, measured).reason == "no time left to look for the largest"


@pytest.mark.long("a benchmark's dry run")
def test_a_figure_is_measured_again_once(tmp_path):
    arguments = ("verify", "--only", "hf-saved", "--work", str(tmp_path), "--output", str(tmp_path / "v.csv"))
    for measured in (True, False):
        result = run(*arguments)
        assert result.returncode == 0 and "1 pass, 0 fail" in result.stdout, result.stdout
        assert ("measured before" in result.stdout) != measured


def test_the_paper_stands_beside_what_was_measured(tmp_path):
    lines = [line for line in reproduce.load() if (line["table"], line["gpus"]) == ("7", "2")][:3]
    rows = [
        {"system": "BF16", "limited": False, "peak_mb": 70e3, "states_mb": 26e3, "saved_mb": 20e3},
        {"system": "BF16", "limited": True, "micro_batch": 2, "tokens_per_s_gpu": 6e3},
        {"system": "TE FP8", "limited": False, "note": "transformer_engine is not installed"},
        {"system": "COAT", "limited": False, "peak_mb": 42e3, "states_mb": 7e3, "saved_mb": 9e3},
        {"system": "COAT", "limited": True, "micro_batch": 8, "tokens_per_s_gpu": 18e3},
        {"system": "COAT", "limited": True, "micro_batch": 9, "note": "out of memory"},
    ]

    class Measured:
        quick = True

        def rows(self, command, needs):
            return rows

    made = [row for line in lines for row in reproduce.compared(line, Measured())]
    reproduce.add_ratios(made)
    found = {(row["system"], row["figure"]): row for row in made}
    speed = found["COAT", "tokens_per_s_gpu"]
    assert (speed["paper"], speed["here"], speed["here_to_bf16"]) == ("11351", 18e3, 3.0)
    assert speed["paper_to_bf16"] == 11351 / 6130
    assert found["COAT", "largest_micro_batch"]["here"] == 8
    assert found["BF16", "peak_mb"]["paper"] == "out of memory" and found["BF16", "peak_mb"]["here"] == 70e3
    assert found["TransformerEngine", "peak_mb"]["reason"] == "transformer_engine is not installed"
