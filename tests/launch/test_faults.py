"""Faults that end or damage a run. The next run gives the same losses, to the bit."""

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from coat_launch import checkpoints, pretrain_gpt
from coat_launch.files import lock_folder
from tests.launch.ranks import HIDDEN, measured, run_ranks

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[2]
SIZES = {
    "--num-layers": 1,
    "--hidden-size": 64,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 4,
    "--num-query-groups": 2,
    "--seq-length": 32,
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--eval-batches": 1,
    "--eval-interval": 4,
    "--save-interval": 2,
    "--steps": 8,
    "--variant": "coat",
}
ARGUMENTS = [str(item) for pair in SIZES.items() for item in pair]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A small text: tokenizing the standard library would take longer than the training here."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = random.Random(7)
    path.write_text(" ".join(words.choice(["red", "green", "blue", "seven", "eight"]) for _ in range(20000)))
    return path


@pytest.fixture
def train(tmp_path, corpus):
    """Runs ranks with the output in `tmp_path / "run"`."""

    def run(*arguments, ranks=1, **faults):
        argv = [*ARGUMENTS, "--data", corpus, "--output", tmp_path / "run", *arguments]
        return run_ranks(argv, tmp_path, ranks=ranks, faults=faults)

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """Folders of uninterrupted runs by number of ranks, with the states at each save."""
    folders = {}
    for ranks in (1, 2):
        folder = folders[ranks] = tmp_path_factory.mktemp(f"whole{ranks}")
        argv = [*ARGUMENTS, "--data", corpus, "--output", folder / "run"]
        ended = run_ranks(argv, folder, ranks=ranks, faults={"record": [str(folder)]})
        assert ended.codes == [0] * ranks, ended.text
    return folders


def saved(folder: Path) -> set[str]:
    """Names of complete checkpoints."""
    return {path.name for path in folder.glob("run/coat/checkpoints/step*") if path.name[4:].isdigit()}


def test_two_ranks_give_the_losses_of_one(whole):
    one, two = (
        [found["loss"] for step, found in sorted(measured(whole[ranks]).items()) if step] for ranks in (1, 2)
    )
    # the first loss sees the same samples and weights; later losses see gradients that were summed in another
    # order in BF16 (2**-9 relative each), which Adam turns into different small steps. Two ranks also group
    # the samples into passes differently, and the samples of a pass share FP8 scales: FP8 moves the loss of
    # an untrained model by 1.5e-4 of itself, and so may another scale in each run.
    assert two[0] == pytest.approx(one[0], rel=3e-4)
    assert two == pytest.approx(one, rel=5e-3)


@pytest.mark.long("torchrun, which starts two processes that import the frameworks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_rank_is_started_again(tmp_path, corpus, whole, ranks):
    """kill -9 of the last rank at a random step. torchrun restarts all ranks, and they resume without further
    arguments."""
    step = random.Random(20261121).randrange(3, 9)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        # a rank's store listens on a port that torchrun found free; another process may take the port first
        + ["--max-restarts=3", str(ROOT / "tests/launch/faulty.py")]
        + [json.dumps({"kill_at_step": [ranks - 1, step, str(tmp_path / "killed")]})]
        + [*ARGUMENTS, "--data", str(corpus), "--output", str(tmp_path / "run"), "--resume"],
        # torch 2.13 shares the store between restarts; with it, the second start waits for addresses of the
        # first
        env={**os.environ, **HIDDEN, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert (tmp_path / "killed").exists(), text
    assert f"going on from {tmp_path}/run/coat/checkpoints/step{(step - 1) // 2 * 2}" in done.stdout, text
    assert measured(tmp_path) == measured(whole[ranks])


def test_kill_during_save(tmp_path, train, whole):
    """All ranks are killed at later and later points of a save; the next run then ends as if without the
    kill."""
    folder = tmp_path / "run/coat/checkpoints"
    points = [{"kill_in_save": [0, file]} for file in (0, 1)]
    points += [{"kill_at_event": [f"{folder}/", index]} for index in range(10)]
    seen, before = set(), -1
    for point in points:
        ended = train("--resume", "--keep-checkpoints", 1, **point)
        assert ended.codes == [-signal.SIGKILL], ended.text
        steps = [int(name.removeprefix("step")) for name in saved(tmp_path)]
        newest = max(steps, default=-1)
        # no complete checkpoint is lost, and latest is one of them
        assert newest >= before
        before = newest
        latest = folder / "latest"
        latest = int(latest.read_text().removeprefix("step")) if latest.exists() else -1
        assert latest in (*steps, -1)
        seen |= {
            "first cut off": newest < 0 and any(folder.glob("*.partial")),
            "latest behind": latest < newest,
            "old one left": len(steps) > 1,
        }.items()
    assert train("--resume", "--keep-checkpoints", 1).codes == [0]
    assert measured(tmp_path) == measured(whole[1]) and (folder / "latest").read_text() == "step8"
    # every intended point was reached
    assert {("first cut off", True), ("latest behind", True), ("old one left", True)} <= seen


def test_kill_of_another_rank_during_save(tmp_path, train, whole, monkeypatch):
    """Rank 0's files are complete, rank 1's are not: the checkpoint does not count."""
    # a torchrun with restarts would treat a signal's usual exit code as a failure
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    ended = train("--resume", ranks=2, kill_in_save=[1, 0])
    assert ended.codes[1] == -signal.SIGKILL and not saved(tmp_path)
    ended = train("--resume", ranks=2, signal_at_step=[1, 3, signal.SIGUSR1])
    assert ended.codes == [0, 0], ended.text
    # a signal to one rank stops both ranks, after the step in which it came
    assert saved(tmp_path) == {"step2", "step3"} and "stopped by a signal after step 3" in ended.text
    ended = train("--resume", ranks=2)
    assert ended.codes == [0, 0] and measured(tmp_path) == measured(whole[2])


def test_sigterm_of_one_process(tmp_path, train, whole, monkeypatch):
    # a torchrun without restarts
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    ended = train("--save-interval", 100, signal_at_step=[0, 5, signal.SIGTERM])
    assert ended.codes == [pretrain_gpt.STOPPED] and saved(tmp_path) == {"step5"}
    # a new run does not take an older run's checkpoint for its own
    ended = train()
    assert ended.codes == [1] and "step5 is there" in ended.text
    assert train("--resume").codes == [0]
    assert measured(tmp_path) == measured(whole[1])
    # the state after a kill between the last checkpoint and the summary
    summary = tmp_path / "run/coat/summary.json"
    before = json.loads(summary.read_text())
    summary.unlink()
    assert train("--resume").codes == [0]
    after = json.loads(summary.read_text())
    assert (after["val_loss"], after["steps"], after["tokens_per_s"]) == (before["val_loss"], 8, 0)


def test_two_runs_of_one_output(tmp_path, train, whole):
    """The second run is refused on all its ranks and changes nothing. After a kill of the first one the
    output is free."""
    ended = train(kill_at_step=[0, 5])
    assert ended.codes == [-signal.SIGKILL] and saved(tmp_path) == {"step2", "step4"}
    (tmp_path / "run/coat/checkpoints/step6.0.partial").mkdir()
    # this process stands for the other run
    lock = lock_folder(tmp_path / "run")

    def files():
        paths = (tmp_path / "run").rglob("*")
        return {path: path.stat().st_mtime_ns for path in paths if path.is_file()}

    before = files()
    ended = train("--resume", ranks=2)
    assert ended.codes == [1, 1] and "Traceback" not in ended.text and files() == before
    assert ended.text.count(f"--output {tmp_path}/run: in use by process {os.getpid()} on") == 2
    lock.close()
    ended = train("--resume")
    assert ended.codes == [0], ended.text
    assert measured(tmp_path) == measured(whole[1]) and not list((tmp_path / "run").rglob("*.partial"))


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: float):
    folder.mkdir(parents=True)
    options = f"size={int(megabytes * 2**20)}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_disk_full_during_save(tmp_path, train, whole):
    size = sum(p.stat().st_size for p in (whole[1] / "run/coat/checkpoints/step2").iterdir()) / 2**20
    folder = tmp_path / "run/coat/checkpoints"
    with small_disk(folder, 1.5 * size):
        ended = train("--resume")
        assert ended.codes == [1] and "Traceback" not in ended.text
        assert f"error: cannot write a checkpoint to {folder}" in ended.text and "make room" in ended.text
        assert saved(tmp_path) == {"step2"} and (folder / "latest").read_text() == "step2"
        subprocess.run(["mount", "-o", f"remount,size={int(3.5 * size * 2**20)}", folder], check=True)
        # there is room for two checkpoints: the truncated file of the full disk is removed
        ended = train("--resume", "--keep-checkpoints", 1)
        assert ended.codes == [0], ended.text
        assert measured(tmp_path) == measured(whole[1]) and saved(tmp_path) == {"step8"}
        assert not list(folder.glob("*.partial"))


def test_checkpoints_that_cannot_be_loaded(tmp_path, train, whole):
    """A file without its end, and a folder renamed by hand or without files, end the run with an error that
    names the checkpoint. Without the checkpoint the run resumes from the one before it."""
    shutil.copytree(whole[1] / "run", tmp_path / "run")
    folder = tmp_path / "run/coat/checkpoints"
    os.truncate(folder / "step8/mp_rank_00_model_states.pt", 1000)
    shutil.copytree(folder / "step2", folder / "step9")
    (folder / "step12").mkdir()
    for step, why in ((12, "it does not hold"), (9, "the files are of step 2"), (8, "it does not hold")):
        ended = train("--resume")
        assert ended.codes == [1] and "Traceback" not in ended.text
        assert f"error: {folder}/step{step}: " in ended.text and why in ended.text
        # a new run does not overwrite it either
        assert train().codes == [1] and measured(tmp_path) == measured(whole[1])
        shutil.rmtree(folder / f"step{step}")
    ended = train("--resume")
    assert ended.codes == [0] and f"going on from {folder}/step6" in ended.text
    assert measured(tmp_path) == measured(whole[1])


def test_a_named_checkpoint_of_another_output(tmp_path, train, whole):
    ended = train("--resume", whole[1] / "run/coat/checkpoints/step4")
    assert ended.codes == [0], ended.text
    one, other = measured(whole[1]), measured(tmp_path)
    assert other == {step: one[step] for step in range(5, 9)}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def forge(path: Path, **changes) -> None:
    """Writes other contents into a file of a checkpoint."""
    torch.save({**torch.load(path, weights_only=False), **changes}, path)


def test_nothing_in_a_checkpoint_is_executed(tmp_path, train, whole):
    shutil.copytree(whole[1] / "run", tmp_path / "run")
    model = tmp_path / "run/coat/checkpoints/step8/mp_rank_00_model_states.pt"
    forge(model, extra=Payload(tmp_path / "executed"))
    ended = train("--resume", "--steps", 9)
    assert ended.codes == [1]
    # the error does not repeat torch's advice to trust the file
    assert "GLOBAL posix.mkdir" in ended.text and "weights_only=False" not in ended.text
    assert "Traceback" not in ended.text and not (tmp_path / "executed").exists()


class Attribute:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_stages_of_checkpoints_that_older_pythons_wrote(tmp_path):
    path = tmp_path / "states.pt"
    torch.save({"zero_stage": Attribute(ZeroStageEnum, "weights"), "x": torch.ones(2)}, path)
    with checkpoints._data_only():
        assert torch.load(path)["zero_stage"] is ZeroStageEnum.weights
        for other in ((ZeroStageEnum, "mro"), (LossScaler, "__init__"), (torch.ones(1), "data")):
            torch.save(Attribute(*other), path)
            with pytest.raises(pickle.UnpicklingError, match="expected a stage of ZeRO, found"):
                torch.load(path)


def test_a_checkpoint_of_something_else(tmp_path, train, whole):
    """The files belong to another model, step, text or ZeRO stage, or there are none."""
    shutil.copytree(whole[1] / "run", tmp_path / "run")
    folder = tmp_path / "run/coat/checkpoints/step8"
    ended = train("--resume", "--steps", 9, "--ffn-hidden-size", 256)
    assert ended.codes == [1] and "Traceback" not in ended.text
    assert f"error: {folder}: it does not hold" in ended.text and "size mismatch" in ended.text
    for changes, why in (
        ({"step": 7}, "of step 7"),
        ({"identity": {}}, "found no seed, seq-length"),
    ):
        kept = (folder / "mp_rank_00_model_states.pt").read_bytes()
        forge(folder / "mp_rank_00_model_states.pt", **changes)
        ended = train("--resume", "--steps", 9)
        assert ended.codes == [1] and why in ended.text and "Traceback" not in ended.text
        (folder / "mp_rank_00_model_states.pt").write_bytes(kept)
    (tmp_path / "other.txt").write_text(9999 * "other text ")
    config = json.loads((ROOT / "configs/ds_zero1_coat.json").read_text())
    (tmp_path / "ds.json").write_text(json.dumps(config | {"zero_optimization": {"stage": 2}}))
    for arguments, why in (
        (["", "--data", tmp_path / "other.txt"], "Give the --data and --tokenizer of that run"),
        (["", "--deepspeed-config", tmp_path / "ds.json"], "was made with ZeRO stage 1, found 2"),
        ([tmp_path], f"error: --resume {tmp_path}: no checkpoint there"),
        # the run would overwrite the later checkpoints
        ([folder.with_name("step4")], f"{folder} is there"),
    ):
        ended = train("--steps", 9, "--resume", *arguments)
        assert ended.codes == [1] and why in ended.text and "Traceback" not in ended.text


# checkpoint_layout, ZeRO stage, device of the optimizer: every possible pair of values of two of them occurs
LONG = pytest.mark.long("ZeRO's stages with the other layout of checkpoints, in two ranks and in one")
CELLS = [
    pytest.param("stock", 0, "none", marks=LONG),
    pytest.param("compressed", 0, "none", marks=LONG),
    pytest.param("stock", 1, "cpu", marks=LONG),
    pytest.param("compressed", 1, "none", marks=LONG),
    pytest.param("stock", 2, "none", marks=LONG),
    pytest.param("compressed", 2, "cpu", marks=LONG),
    pytest.param("stock", 3, "cpu", marks=LONG),
    ("compressed", 3, "none"),
]


@pytest.mark.parametrize("layout, stage, device", CELLS)
def test_resume_of_every_layout_and_stage(tmp_path, train, layout, stage, device):
    config = json.loads((ROOT / "configs/ds_zero1_coat.json").read_text())
    config["zero_optimization"] = {"stage": stage}
    if device == "cpu":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["coat"]["optimizer"] = {"checkpoint_layout": layout}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    arguments = ["--deepspeed-config", path, "--steps", 4, "--resume"]
    assert (ended := train(*arguments, ranks=2)).codes == [0, 0], ended.text
    before = measured(tmp_path)
    shutil.rmtree(tmp_path / "run/coat/checkpoints/step4")
    if stage:
        ended = train(*arguments)
        assert ended.codes == [1] and "a DP world size of 2" in ended.text and "Traceback" not in ended.text
    assert (ended := train(*arguments, ranks=2)).codes == [0, 0], ended.text
    assert "going on from" in ended.text and measured(tmp_path) == before


def test_loss_that_is_not_finite(tmp_path, train, monkeypatch):
    # a torchrun with restarts has to see a failure
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    # from an earlier run
    earlier = tmp_path / "run/coat/summary.json"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    ended = train(ranks=2, nan_at_step=[1, 3])
    assert 1 in ended.codes and "Traceback" not in ended.text and saved(tmp_path) == {"step2"}
    assert "error: training diverged: loss nan" in ended.text and "at step 3" in ended.text
    assert max(measured(tmp_path)) == 2 and not earlier.exists()


def test_each_step_has_a_batch_of_its_own(tmp_path, train, whole):
    """With constant weights, a loss identifies its batch. The last step ends a run with a checkpoint, also if
    it is not at an interval, and whatever signal comes in it."""
    samples = (whole[1] / "samples0").read_text().split()[1::2]
    assert len(samples) == len(set(samples)) == SIZES["--steps"] * SIZES["--global-batch-size"]
    ended = train("--lr", 0, "--save-interval", 3, signal_at_step=[0, 8, signal.SIGTERM])
    assert ended.codes == [0], ended.text
    assert saved(tmp_path) == {"step3", "step6", "step8"}
    found = measured(tmp_path)
    assert len({found[step]["loss"] for step in range(1, 9)}) == 8
    assert len({found[step]["val_loss"] for step in (0, 4, 8)}) == 1
