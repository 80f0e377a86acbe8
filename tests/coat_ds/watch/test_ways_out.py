"""Where readings go, what `coat watch` prints of them, and errors of a wrong block."""

import json
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import coat_ds
from coat_ds import CoatAdamW, CoatConfig, CoatConfigError, cli
from coat_ds.config import WatchConfig
from coat_ds.watch import Watch, jsonl, writer
from coat_ds.watch.outs import Reading, read
from coat_kernels.autograd import watching
from tests.coat_ds.watch.parts import model
from tests.util import hooks_of_watch, run_distributed


def reading(step, error):
    groups = {"layers.*.weight": {"update_error": error, "stalled": 0.25}, "layers.*": {"input_flushed": 0.5}}
    return Reading(step, 8 * step, groups, {"weights": 4_000_000, "saved": 1_500_000}, [])


@pytest.fixture
def run(tmp_path):
    write = jsonl(tmp_path / "run")
    # step 4 is run again after a checkpoint is loaded
    for step, error in ((2, 0.01), (4, 0.9), (4, 0.03), (6, 0.02)):
        write(reading(step, error))
    return tmp_path / "run"


def test_the_command_prints_a_table_and_draws(run, capsys):
    assert cli.main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    first, _, *rows = out.splitlines()
    assert first == "3 readings, steps 2 to 6"
    assert rows[0].split() == ["update_error", "2.00%", "3.00%", "4", "layers.*.weight"]
    assert rows[1].split() == ["stalled", "25.00%", "25.00%", "2", "layers.*.weight"]
    assert rows[2].split() == ["input_flushed", "50.00%", "50.00%", "2", "layers.*"]
    assert rows[3] == "MB of one rank: weights 4.0, saved 1.5" and rows[4] == "fallen back: nothing"
    for name in ("errors.png", "memory.png"):
        written = run / name
        assert f"wrote {written}" in out and written.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("figure", ["update_error", "input_flushed", "gradient_flushed"])
@pytest.mark.parametrize("value", [0.5, 0.51, float("nan")])
def test_the_command_ends_with_a_verdict(tmp_path, capsys, figure, value):
    groups = {"a": {figure: 0.1, "wrong_scales": 1.0}, "b.*": {figure: value}}
    jsonl(tmp_path)(Reading(8, 0, groups, {}, []))
    assert cli.main(["watch", str(tmp_path), "--no-pictures"]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    if value == 0.5:
        assert verdict.startswith("verdict: healthy")
        return
    assert verdict.startswith("verdict: NOT healthy") and f"{figure} of b.*" in verdict
    # the key that it names is one of the block
    key = "coat.optimizer.keep_fp32" if figure == "update_error" else "coat.watch.act"
    assert key in verdict


def test_the_command_as_json_and_elsewhere(run, tmp_path, capsys):
    assert cli.main(["watch", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reading(6, 0.02)._asdict()
    assert cli.main(["watch", str(run / "watch.jsonl"), "--pictures", str(tmp_path / "a/new")]) == 0
    assert sorted(p.name for p in (tmp_path / "a/new").iterdir()) == ["errors.png", "memory.png"]
    assert not (run / "errors.png").exists()
    group = {"update_error": float("nan"), "amax": float("-inf")}
    jsonl(run / "nan")(Reading(8, 0, {"a": group}, {}, []))
    assert cli.main(["watch", str(run / "nan"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert found["groups"] == {"a": {"update_error": None, "amax": None}}
    # the output of `coat train`, which has the run's folder in it
    assert cli.main(["watch", str(run.parent)]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"found none in {str(run.parent)!r}. Name {run}.\n")


def refused(folder):
    made = model()
    with pytest.raises(CoatConfigError, match=r"coat.watch.folder: .*run', .* \(Not a directory\)"):
        Watch(made, CoatAdamW(made.named_parameters()), {"every": 100, "folder": folder})
    return len(made._forward_pre_hooks)


def refused_of_two(folder):
    dist.init_process_group("gloo")
    # a folder of its own that can be written, though nothing is
    return refused(folder if dist.get_rank() == 0 else str(Path(folder).parents[1] / "run"))


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file/run")
    assert refused(folder) == 0 and run_distributed(refused_of_two, 2, folder) == [0, 0]


def test_a_full_disk_costs_a_reading_and_not_the_run(tmp_path, caplog):
    made = model()
    optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
    watch = Watch(made, optimizer, {"every": 1, "folder": str(tmp_path)})

    def train(steps):
        for _ in range(steps):
            made(torch.ones(16, 64)).sum().backward()
            optimizer.step()
            watch.end_step()

    train(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the kernel writes what fits below the limit, as on a full disk
    limit = (tmp_path / "watch.jsonl").stat().st_size + 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        train(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    train(1)
    watch.close()
    # nothing is left of what was cut off
    assert [r.step for r in read(tmp_path)] == [1, 4, 5] and watch.last.step == 5
    assert (tmp_path / "watch.jsonl").read_bytes().count(b"\n") == 3
    said = [r.message for r in caplog.records if "coat.watch.folder" in r.message]
    assert len(said) == 2 and said[0].endswith("the reading of step 2 is not there. Make room.")


def test_an_out_that_raises_ends_no_run(caplog):
    """It is one rank's, and the others would wait for it. What acts on readings does so on all of them."""

    def unreachable(reading):
        if reading.step == 2:
            raise ConnectionError("no route")

    made, got = model(), []
    optimizer = CoatAdamW(made.named_parameters(), min_numel=0)
    watch = Watch(made, optimizer, {"every": 1}, outs=[unreachable, got.append])
    judged = []
    with mock.patch.object(watch.fallback, "judge", lambda step, *_: judged.append(step)):
        for _ in range(3):
            made(torch.ones(16, 64)).sum().backward()
            optimizer.step()
            watch.end_step()
        watch.close()
    assert [reading.step for reading in got] == judged == [1, 2, 3]
    (said,) = (record for record in caplog.records if "raised" in record.message)
    assert (
        said.message.startswith("coat.watch: ")
        and "unreachable raised ConnectionError('no route')" in said.message
    )
    assert said.message.endswith("has not got the reading of step 2.") and said.exc_info[0] is ConnectionError
    # the run is interrupted all the same
    watch = Watch(made, optimizer, {"every": 1}, outs=[mock.Mock(side_effect=KeyboardInterrupt)])
    made(torch.ones(16, 64)).sum().backward()
    optimizer.step()
    with pytest.raises(KeyboardInterrupt):
        watch.end_step()
        watch.close()


@pytest.mark.parametrize("kept", [-1, 20, 1])
def test_a_line_that_was_cut_off_costs_that_reading_alone(run, kept, capsys, caplog):
    """As of a machine that lost its power. A run that resumes does not write on in that line."""
    path = run / "watch.jsonl"
    *before, last = path.read_bytes().splitlines(keepends=True)
    # where the end of the line alone is lost, the reading is whole
    whole, steps = kept == -1, [2, 4, 6] if kept == -1 else [2, 4]
    path.write_bytes(b"".join(before) + last[:kept])
    assert [r.step for r in read(run)] == steps
    jsonl(run)(reading(8, 0.05))
    assert [r.step for r in read(run)] == [*steps, 8] and read(run)[-1] == reading(8, 0.05)
    said = [line for line in caplog.messages if line == f"{path}: line 4 was cut off: left out"]
    assert len(said) == len(caplog.messages) == (0 if whole else 3)
    assert cli.main(["watch", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reading(8, 0.05)._asdict()


@pytest.mark.parametrize("content", ["", "{}\n", "no\n", "[" * 10**5], ids=lambda text: text[:3])
def test_the_command_says_what_is_wrong_in_the_file(tmp_path, capsys, content):
    (tmp_path / "watch.jsonl").write_text(content)
    assert cli.main(["watch", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    # no file: tests/test_mistakes.py
    assert f"RUN: {tmp_path}/watch.jsonl: " in error and "Correct the file" in error


def test_writers_as_megatrons():
    scalars, logged = [], []

    class Board:
        def add_scalar(self, *args):
            scalars.append(args)

    class Wandb:
        def log(self, numbers, step):
            logged.append((step, numbers))

    writer(Board(), Wandb())(reading(6, 0.02))
    writer()(reading(6, 0.02))
    numbers = reading(6, 0.02).flat()
    assert numbers["coat/update_error/layers.*.weight"] == 0.02 and numbers["coat/bytes/saved"] == 1.5e6
    assert logged == [(6, numbers)] and scalars == [(name, value, 6) for name, value in numbers.items()]


def test_booleans_and_defaults():
    assert CoatConfig.from_dict({"enabled": True}).watch == WatchConfig()
    assert CoatConfig.from_dict({"enabled": True, "watch": True}).watch.every == 100
    assert CoatConfig.from_dict({"enabled": True, "watch": False}).watch.every == 0
    assert WatchConfig(flushed=1).flushed == 1


def trainer_of(folder, watch=None, **arguments):
    """A Trainer of a converted Llama that takes a reading every two steps unless told otherwise."""
    from transformers import Trainer, TrainingArguments

    from coat_ds.watch import Callback
    from tests.coat_ds.watch.test_engine import llama

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


def test_trainer_logs_readings(tmp_path):
    trainer, optimizer = trainer_of(tmp_path)
    for _ in range(2):
        trainer.train()
        logged = logged_by(trainer)
        assert [entry["coat/step"] for entry in logged] == [2, 4]
    # it has ended
    assert not hooks_of_watch(trainer.model)
    assert not optimizer._optimizer_step_post_hooks
    name = "coat/update_error/model.layers.*.mlp.up_proj.weight"
    assert all(0 < entry[name] < 0.1 for entry in logged)
    assert logged[-1]["coat/bytes/states"] == coat_ds.state_bytes(optimizer)["bytes"]


def test_trainer_goes_on_counting_after_an_interruption(tmp_path):
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
    assert not hooks_of_watch(trainer.model)
    assert not optimizer._optimizer_step_pre_hooks and watching.observer() is None


def test_trainer_resumes_with_what_has_fallen_back(tmp_path, caplog):
    caplog.set_level("INFO", "coat_ds")
    # a reading of the step that is saved
    limits = {"every": 3, "act": "act", "readings": 1, "update_error": 1e-6}
    trainer, _ = trainer_of(tmp_path, limits, save_steps=3)
    trainer.train()
    fallen = trainer.state.stateful_callbacks["coat_watch"]
    assert "lm_head.weight" in fallen["states"] and not fallen["layers"]
    for act, formats, said in (
        ("act", ["fp32", "fp32"], "as in the checkpoint's run"),
        ("off", ["ratio8", "log8"], "coat.watch.act is 'off'"),
    ):
        caplog.clear()
        trainer, optimizer = trainer_of(tmp_path, {"act": act})
        trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
        state = optimizer.state[trainer.model.lm_head.weight]
        assert [state[name].codec.name for name in ("exp_avg", "exp_avg_sq")] == formats
        assert any(said in line and "lm_head.weight" in line for line in caplog.messages)


def test_trainer_without_our_optimizer():
    from coat_ds.watch import Callback

    callback = Callback(object())
    with pytest.raises(ValueError, match="expected a CoatAdamW, found AdamW"):
        callback.on_train_begin(None, None, None, model(), torch.optim.AdamW(model().parameters()))
