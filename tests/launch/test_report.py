import json
import os
import resource

import pytest

from coat_launch import report

SUMMARY = {
    run: {
        "val_loss_start": 5.5,
        "val_loss": loss,
        "state_bytes_per_param": state,
        "saved_bytes_per_token_layer": saved,
        "peak_bytes": peak,
        "peak_kind": report.GPU_PEAK,
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
    other.close()
    writer = report.MetricsWriter(path, "coat")
    for step in (1, 2, 3):
        writer.write(step, loss=1.0 / step)
        # the line is on the disk at once, without close
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


NO_RECORDS = [b"{", b"[1]", b'{"step": 1}', b'{"run": 1, "step": 1}', b'{"run": "coat", "step": "1"}']


@pytest.mark.parametrize("line", [*NO_RECORDS, b"[" * 10**5], ids=lambda line: line[:30].decode())
def test_metrics_that_cannot_be_read_stay(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"run": "coat", "step": 1}\n' + line + b'\n{"run": "coat", "step": 2}\n')
    before = path.read_bytes()
    with pytest.raises(report.OutputError, match="metrics.jsonl, line 2: expected a record with run"):
        report.MetricsWriter(path, "coat", resume_step=2)
    assert path.read_bytes() == before


def test_summary_and_table(tmp_path):
    report.write_summary(tmp_path / "summary.json", SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY
    lines = report.comparison_table(SUMMARY).splitlines()
    cells = {line[:45].strip(): line[45:].split() for line in lines[2:-2]}
    assert lines[0].split() == ["BF16", "COAT", "ratio"]
    assert cells["validation loss"] == ["2.0000", "2.0100", "1.005"]
    assert cells["optimizer state, bytes per parameter"] == ["8.000", "2.100", "0.263"]
    assert cells["saved for backward, bytes per token and layer"] == ["4,000", "2,000", "0.500"]
    assert cells["peak memory (GPU allocator), MiB"] == ["1,024", "512", "0.500"]
    *rows, empty, note = lines
    assert len({len(row) for row in rows}) == 1 and empty == "" and note.startswith("Losses are of one seed.")
    # a run that had no steps left
    nothing = report.comparison_table({**SUMMARY, "bf16": {**SUMMARY["bf16"], "tokens_per_s": 0.0}})
    assert next(line.split() for line in nothing.splitlines() if "second" in line)[-3:] == ["0", "1,000", "-"]
    alone = report.comparison_table({"coat": SUMMARY["coat"]})
    assert "ratio" not in alone and "seed" not in alone


def test_a_summary_of_something_else(tmp_path):
    path = tmp_path / "summary.json"
    for key, value in (("val_loss", "2.0"), ("tokens_per_s", None), ("peak_kind", 1)):
        path.write_text(json.dumps({**SUMMARY["coat"], key: value}))
        with pytest.raises(report.OutputError, match=f"summary.json: {key}: expected a .*: remove it, or"):
            report.read_summary(path)
    report.write_summary(path, SUMMARY["coat"])
    assert report.read_summary(path) == SUMMARY["coat"]


def test_atomic_write_keeps_the_old_file_when_the_disk_is_full(tmp_path):
    path = tmp_path / "summary.json"
    report.atomic_write(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the kernel refuses to write beyond the limit, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            report.OutputError, match=r"cannot write .*summary.json \(File too large\).*--output"
        ):
            report.atomic_write(path, b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_metrics_of_a_full_disk(tmp_path):
    """The run ends with the error of the first write, and the next run drops the truncated line."""
    writer = report.MetricsWriter(tmp_path / "metrics.jsonl", "coat")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(report.OutputError, match=r"cannot write .*metrics.jsonl \(File too large\)"):
            for step in range(10):
                writer.write(step, loss=1.0)
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    report.MetricsWriter(tmp_path / "metrics.jsonl", "coat", resume_step=9).close()
    assert [record["step"] for record in report.read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(report.OutputError, match="choose another folder with --output"):
        report.prepare_folder(tmp_path / "file" / "run")
    # the folder exists, but no files can be created in it
    with pytest.raises(report.OutputError, match="cannot write /proc"):
        report.prepare_folder("/proc")
    assert report.prepare_folder(tmp_path / "a" / "b").is_dir()
