import os
import subprocess
import sys
from pathlib import Path

import pytest

from coat_launch import report
from coat_launch.errors import LaunchError
from coat_launch.files import atomic_write, lock_folder
from tests.launch.ranks import full_disk

SUMMARY = {
    run: {
        "val_loss_start": 5.5,
        "val_loss": loss,
        "state_bytes_per_param": state,
        "saved_bytes_per_token_layer": saved,
        "peak_bytes": peak,
        "tokens_per_s": 1000.0,
    }
    for run, loss, state, saved, peak in (
        ("bf16", 2.0, 8.0, 4000.0, 2**30),
        ("coat", 2.01, 2.1, 2000.0, 2**29),
    )
}


def test_metrics_survive_a_crash_and_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    other = report.MetricsWriter(path, "bf16")
    for step in (1, 3):
        other.write(step, loss=5.0)
    writer = report.MetricsWriter(path, "coat")
    for step in (1, 2, 3):
        writer.write(step, loss=1.0 / step)
        # the line is in the file at once
        assert report.read_metrics(path)[-1] == {"run": "coat", "step": step, "loss": 1.0 / step}
    with path.open("a") as file:
        file.write('{"run": "coat", "ste')
    assert len(report.read_metrics(path)) == 5

    resumed = report.MetricsWriter(path, "coat", resume_step=2)
    resumed.write(3, loss=0.25)
    assert [(r["run"], r["step"]) for r in report.read_metrics(path)] == [
        ("bf16", 1),
        ("bf16", 3),
        ("coat", 1),
        ("coat", 2),
        ("coat", 3),
    ]
    assert report.read_metrics(path)[-1]["loss"] == 0.25
    resumed.write(0, val_loss=5.0)
    report.MetricsWriter(path, "coat")
    assert [r["run"] for r in report.read_metrics(path)] == ["bf16", "bf16"]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"run": "coat"}'])
def test_damaged_outputs_of_an_earlier_run_are_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"run": "coat", "step": 1}}\n{line}\n')
    with pytest.raises(LaunchError, match="metrics.jsonl, line 2: expected"):
        report.MetricsWriter(tmp_path / "metrics.jsonl", "coat")
    (tmp_path / "summary.json").write_text(line)
    with pytest.raises(ValueError, match="summary.json: "):
        report.read_summary(tmp_path / "summary.json")


def test_comparison_table():
    lines = report.comparison_table(SUMMARY).splitlines()
    cells = {line[:45].strip(): line[45:].split() for line in lines[2:-2]}
    assert lines[0].split() == ["BF16", "COAT", "ratio"]
    assert cells["validation loss"] == ["2.0000", "2.0100", "1.005"]
    assert cells["optimizer state, bytes per parameter"] == ["8.000", "2.100", "0.263"]
    assert cells["saved for backward, bytes per token and layer"] == ["4,000", "2,000", "0.500"]
    assert cells["peak memory (GPU allocator), MiB"] == ["1,024", "512", "0.500"]
    # a run that had no steps left; runs without a GPU; one run
    nothing = report.comparison_table({**SUMMARY, "bf16": {**SUMMARY["bf16"], "tokens_per_s": 0.0}})
    assert next(line.split() for line in nothing.splitlines() if "second" in line)[-3:] == ["0", "1,000", "-"]
    on_cpu = {run: values | {"peak_bytes": None} for run, values in SUMMARY.items()}
    assert not {"MiB", "second"} & set(report.comparison_table(on_cpu).partition("\n\n")[0].split())
    assert "ratio" not in report.comparison_table({"coat": SUMMARY["coat"]})


def test_atomic_write_keeps_the_old_file_when_the_disk_is_full(tmp_path):
    path = tmp_path / "summary.json"
    atomic_write(path, b"old")
    with pytest.raises(LaunchError, match=r"cannot write .*summary.json .*--output"), full_disk(1000):
        atomic_write(path, b"x" * 2000)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_metrics_of_a_full_disk(tmp_path):
    """The run ends with the error of the first write, and the next run drops the truncated line."""
    writer = report.MetricsWriter(tmp_path / "metrics.jsonl", "coat")
    with full_disk(100), pytest.raises(LaunchError, match=r"cannot write .*metrics.jsonl"):
        for step in range(10):
            writer.write(step, loss=1.0)
    report.MetricsWriter(tmp_path / "metrics.jsonl", "coat", resume_step=9)
    assert [record["step"] for record in report.read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_locked_folder(tmp_path):
    """Another process is refused while this one holds the lock, and takes it after a kill."""
    folder = tmp_path / "run"
    code = (
        f"from coat_launch.files import lock_folder; file = lock_folder({str(folder)!r}); print(1); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout.readline() == "1\n"
        with pytest.raises(LaunchError, match=f"--output {folder}: in use by process {other.pid} on "):
            lock_folder(folder)
        other.kill()
    lock_folder(folder).close()
    # a folder that cannot be made, and one without permission to write
    for wrong in (tmp_path / "run/run.lock/x", Path("/proc")):
        with pytest.raises(LaunchError, match="choose another folder with --output"):
            lock_folder(wrong)
