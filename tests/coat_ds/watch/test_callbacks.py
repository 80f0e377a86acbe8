"""Where readings go, what `coat watch` prints of them, and errors of a wrong block."""

import resource

import pytest
import torch

import coat_ds
from coat_ds import CoatAdamW, CoatConfigError, cli
from coat_ds.watch import Callback, Watch
from coat_ds.watch.readings import FILE, Reading, append, read
from coat_kernels.autograd import observers
from tests.coat_ds.watch.parts import llama, model


def reading(step, error):
    groups = {"layers.*.weight": {"update_error": error, "stalled": 0.25}, "layers.*": {"input_flushed": 0.5}}
    return Reading(step, groups)


@pytest.fixture
def run(tmp_path):
    # step 4 is run again after a checkpoint is loaded
    for step, error in ((2, 0.01), (4, 0.9), (4, 0.03), (6, 0.02)):
        append(tmp_path / "run", reading(step, error))
    return tmp_path / "run"


def test_watch_command_prints_a_table_and_draws(run, tmp_path, capsys):
    assert cli.main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    first, _, *rows = out.splitlines()
    assert first == "3 readings, steps 2 to 6"
    assert rows[0].split() == ["update_error", "2.00%", "3.00%", "4", "layers.*.weight"]
    assert rows[1].split() == ["stalled", "25.00%", "25.00%", "2", "layers.*.weight"]
    assert rows[2].split() == ["input_flushed", "50.00%", "50.00%", "2", "layers.*"]
    assert (run / "errors.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert cli.main(["watch", str(run / FILE), "--pictures", str(tmp_path / "a/new")]) == 0
    assert [p.name for p in (tmp_path / "a/new").iterdir()] == ["errors.png"]
    capsys.readouterr()
    # the output of `coat train`, which has the run's folder in it
    assert cli.main(["watch", str(run.parent)]) == 2
    assert f"Name {run}." in capsys.readouterr().err


@pytest.mark.each_value
@pytest.mark.parametrize("figure", ["update_error", "input_flushed", "gradient_flushed"])
@pytest.mark.parametrize("value", [0.5, 0.51, float("nan")])
def test_watch_command_ends_with_a_verdict(tmp_path, capsys, figure, value):
    append(tmp_path, Reading(8, {"a": {figure: 0.1, "saved_flushed": 1.0}, "b.*": {figure: value}}))
    assert cli.main(["watch", str(tmp_path)]) == 0
    verdict = capsys.readouterr().out.splitlines()[-2]
    if value == 0.5:
        assert verdict.startswith("verdict: healthy")
        return
    fix = "coat.optimizer.keep_fp32" if figure == "update_error" else "coat_ds.convert"
    assert verdict.startswith("verdict: NOT healthy") and f"{figure} of b.*" in verdict and fix in verdict


def test_watch_refuses_a_folder_that_cannot_be_written_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CoatConfigError, match="coat.watch.folder: .*Not a directory"):
        Watch(model(), None, {"every": 100, "folder": str(tmp_path / "file/run")})
    assert observers.current() is None


def test_watch_ends_no_run_when_the_disk_is_full_or_out_raises(tmp_path, caplog):
    """It may be one rank's, and the others would wait for it."""

    def unreachable(reading):
        if reading.step == 2:
            raise ConnectionError("no route")

    made, got = model(), []
    watch = Watch(made, None, {"every": 1, "folder": str(tmp_path)}, [unreachable, got.append])
    file, (soft, hard) = tmp_path / FILE, resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 6):
        made(torch.ones(16, 64)).sum().backward()
        # the kernel writes what fits below the limit, as on a full disk; a reading is given in the next step
        full = file.stat().st_size + 10 if step in (3, 4) else soft
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, hard))
        try:
            watch.end_step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    watch.close()
    assert [r.step for r in got] == [1, 2, 3, 4, 5]
    unreached, *full = caplog.records
    # what was cut off is left out
    assert [r.step for r in read(tmp_path)] == [1, 4, 5]
    assert all(word in unreached.message for word in ("coat.watch: ", "unreachable", "no route", "step 2"))
    assert unreached.exc_info[0] is ConnectionError
    assert [("No space" in r.message or "File too large" in r.message) for r in full] == [True, True]
    # the run is interrupted all the same
    watch = Watch(made, None, {"every": 1}, [interrupt])
    with pytest.raises(KeyboardInterrupt):
        watch.end_step()
        watch.close()


def interrupt(reading):
    raise KeyboardInterrupt


@pytest.mark.parametrize("kept", [-1, 20, 1])
def test_watch_command_leaves_out_a_line_that_was_cut_off(run, kept, caplog):
    """As of a machine that lost its power. A run that resumes does not write on in that line."""
    path = run / FILE
    *before, last = path.read_bytes().splitlines(keepends=True)
    # where the end of the line alone is lost, the reading is whole
    steps = [2, 4, 6] if kept == -1 else [2, 4]
    path.write_bytes(b"".join(before) + last[:kept])
    assert [r.step for r in read(run)] == steps
    append(run, reading(8, 0.05))
    assert [r.step for r in read(run)] == [*steps, 8] and read(run)[-1] == reading(8, 0.05)
    assert [f"{path}: line 4" in line for line in caplog.messages] == [True] * (0 if kept == -1 else 3)


@pytest.mark.parametrize("content", ["", "{}\n", "no\n", "[" * 10**5], ids=lambda text: text[:3])
def test_watch_command_names_what_is_wrong_in_the_file(tmp_path, capsys, content):
    (tmp_path / FILE).write_text(content)
    assert cli.main(["watch", str(tmp_path)]) == 2
    # no file: tests/test_mistakes.py
    assert f"RUN: {tmp_path}/{FILE}: " in capsys.readouterr().err


def trainer_of(folder, watch=None, **arguments):
    """A Trainer of a converted Llama that takes a reading every two steps unless told otherwise."""
    from transformers import Trainer, TrainingArguments

    made = coat_ds.convert(llama())
    rows = [(torch.arange(32) + i) % 64 for i in range(32)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(folder),
        max_steps=5,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        logging_steps=100,
        **arguments,
    )
    optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = Trainer(made, arguments, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.add_callback(Callback(trainer, watch or {"every": 2}))
    return trainer, optimizer


def logged_by(trainer):
    return [entry for entry in trainer.state.log_history if "coat/step" in entry]


def test_watch_callback_logs_readings_of_trainer(tmp_path):
    trainer, optimizer = trainer_of(tmp_path)
    for _ in range(2):
        trainer.train()
        logged = logged_by(trainer)
        assert [entry["coat/step"] for entry in logged] == [2, 4]
    # it has ended
    assert not optimizer._optimizer_step_post_hooks
    name = "coat/update_error/model.layers.*.mlp.up_proj.weight"
    assert all(0 < entry[name] < 0.1 for entry in logged)


def test_watch_callback_goes_on_counting_after_an_interruption(tmp_path):
    from transformers import TrainerCallback

    class Interrupts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise KeyboardInterrupt

    # after step 3, and in the reading of step 4
    trainer, optimizer = trainer_of(tmp_path, save_steps=3, gradient_accumulation_steps=2)
    trainer.callback_handler.callbacks.insert(0, Interrupts())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.callback_handler.callbacks.pop(0)
    trainer.train(resume_from_checkpoint=True)
    assert [entry["coat/step"] for entry in logged_by(trainer)] == [2, 4]
    assert not optimizer._optimizer_step_pre_hooks and observers.current() is None


def test_watch_callback_without_our_optimizer():
    callback = Callback(object())
    with pytest.raises(ValueError, match="expected a CoatAdamW, found AdamW"):
        callback.on_train_begin(None, None, None, model(), torch.optim.AdamW(model().parameters()))
