"""Files that a run writes: used correctly, or refused by a message that names the file."""

import contextlib
import dataclasses
import hashlib
import io
import json
import shutil
from pathlib import Path

import deepspeed
import torch
from hypothesis import given
from hypothesis import strategies as st

from coat_launch import checkpoints, output_lock, pretrain_gpt, report
from tests.hostile.conftest import EXAMPLES
from tests.hostile.files import HOSTILE_TEXT, HOSTILE_VALUES, damaged, json_files, tries
from tests.util import run_distributed


@tries()
@given(json_files(dataclasses.asdict(output_lock.Owner.this())))
def test_locks(folder, data):
    path = folder / "some.lock"
    path.write_bytes(data)
    try:
        owner = output_lock.Owner.read(path)
    except report.OutputError as error:
        assert str(path) in str(error)
        return
    assert dataclasses.asdict(owner) == json.loads(data)
    owner.has_ended(output_lock.Owner.this())


METRICS = (
    b'{"run": "coat", "step": 1, "loss": 2.5}\n{"run": "bf16", "step": 2, "loss": 2.25}\n{"run": "coat", "st'
)


@tries()
@given(damaged(METRICS) | json_files({"run": "coat", "step": 1, "loss": 2.5}).map(lambda line: line + b"\n"))
def test_metrics(folder, data):
    path = folder / "metrics.jsonl"
    path.write_bytes(data)
    try:
        report.MetricsWriter(path, "coat", 1).close()
    except report.OutputError as error:
        assert f"{path}, line " in str(error)
        assert path.read_bytes() == data
        return
    assert all(record["run"] != "coat" or record["step"] <= 1 for record in report.read_metrics(path))


SUMMARY = {key: 1.5 for key, *_ in report._ROWS} | {"peak_kind": "process", "steps": 3}


@tries(0.02)
@given(json_files(SUMMARY))
def test_summaries(folder, data):
    (folder / "metrics.jsonl").write_bytes(b"")
    (folder / "coat").mkdir(exist_ok=True)
    (folder / "coat/summary.json").write_bytes(data)
    with contextlib.suppress(ModuleNotFoundError):
        try:
            pretrain_gpt.conclude(folder)
        except report.OutputError as error:
            assert str(folder / "coat/summary.json") in str(error)


class Call:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


STEP = "step3"
NAMES = st.sampled_from(["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
LAYOUT = {"data_parallel_size": 1, "tensor_parallel_size": 1, "zero_stage": 1}


def attack_checkpoints(where: str) -> dict[str, int]:
    """One rank with an engine saves once; then it loads damaged files. Counts the outcomes."""
    from megatron_ext import cpu

    cpu.enable()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "coat": {
            "enabled": True,
            "optimizer": {"checkpoint_layout": "compressed", "min_numel": 0},
        },
    }

    def built():
        return deepspeed.initialize(model=torch.nn.Linear(16, 16), config=config)[0]

    engine = built()
    engine.backward(engine(torch.ones(1, 16, dtype=torch.bfloat16)).sum())
    engine.step()
    layout = checkpoints.Layout(**LAYOUT)
    good = Path(where) / "good"
    checkpoints.save(engine, good, 3, layout, {"step": 3})
    whole = {path.name: path.read_bytes() for path in (good / STEP).iterdir()}
    manifest = json.loads(whole[checkpoints.MANIFEST])
    state = torch.load(good / STEP / "mp_rank_00_model_states.pt", weights_only=False)
    optimizer = torch.load(good / STEP / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    folder, executed = Path(where) / "attacked", Path(where) / "executed"
    counts = dict.fromkeys(("loaded", "found damaged", "refused"), 0)

    def renew(files: dict[str, bytes]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / STEP).mkdir(parents=True)
        for name, data in files.items():
            (folder / STEP / name).write_bytes(data)

    def found() -> checkpoints.Checkpoint | None:
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                return checkpoints.find(folder)
        except checkpoints.CheckpointError as error:
            assert str(folder) in str(error) and str(folder / STEP) in said.getvalue()
            counts["found damaged"] += 1
            return None

    def signed(files: dict[str, bytes]) -> dict[str, bytes]:
        """The files with a manifest that declares them as valid."""
        said = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
            if name != checkpoints.MANIFEST
        }
        content = {name: manifest[name] for name in ("step", "layout")} | {"files": said}
        return {**files, checkpoints.MANIFEST: json.dumps(checkpoints.sealed(content)).encode()}

    def load() -> None:
        nonlocal engine
        checkpoint = checkpoints.Checkpoint(folder / STEP, layout)
        try:
            checkpoints.load(engine, checkpoint, layout, folder)
            counts["loaded"] += 1
        except checkpoints.CheckpointError as error:
            assert str(folder / STEP) in str(error)
            counts["refused"] += 1
        assert not executed.exists()
        renew(whole)
        try:
            checkpoints.load(engine, checkpoint, layout, folder)
        except checkpoints.CheckpointError:
            # the values of a refused file would not help the next attack
            engine = built()
            checkpoints.load(engine, checkpoint, layout, folder)

    @tries()
    @given(NAMES | st.just(checkpoints.MANIFEST), st.data())
    def damage(name, data):
        files = {**whole, name: data.draw(damaged(whole[name]))}
        renew(files)
        # a manifest may be spelled differently and mean the same
        same = files == whole or name == checkpoints.MANIFEST and _same(files[name], manifest)
        assert (found() is not None) == same

    @tries()
    @given(json_files(manifest))
    def manifests(data):
        renew({**whole, checkpoints.MANIFEST: data})
        if (checkpoint := found()) is not None:
            read = json.loads(data)
            assert read["files"] == manifest["files"] and read["step"] == 3
            assert dataclasses.asdict(checkpoint.layout) == read["layout"]

    @tries()
    @given(NAMES, st.data())
    def signed_damage(name, data):
        renew(signed({**whole, name: data.draw(damaged(whole[name]) | st.binary(max_size=64))}))
        assert found() is not None
        load()

    hostile = st.recursive(
        st.one_of(
            HOSTILE_VALUES,
            st.just(Call(executed)),
            st.sampled_from(
                [torch.zeros(3), torch.zeros(1).expand(2**40), torch.nn.Parameter(torch.ones(2))]
            ),
            st.builds(Moved, st.lists(HOSTILE_VALUES, max_size=3).map(tuple)),
        ),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(HOSTILE_TEXT, inner, max_size=2),
        max_leaves=3,
    )

    @tries()
    @given(st.booleans(), st.data())
    def signed_contents(is_model, data):
        name = "mp_rank_00_model_states.pt" if is_model else next(n for n in whole if "optim" in n)
        value = data.draw(with_one_part_changed(state if is_model else optimizer, hostile))
        file = io.BytesIO()
        torch.save(value, file)
        renew(signed({**whole, name: file.getvalue()}))
        load()

    for attack in (damage, manifests, signed_damage, signed_contents):
        attack()
    return counts


class Moved:
    """Pickled as a stored moment with these arguments."""

    def __init__(self, arguments: tuple):
        self.arguments = arguments

    def __reduce__(self):
        from coat_ds.optim.stored_moment import _rebuild

        return _rebuild, self.arguments


def _same(data: bytes, value) -> bool:
    try:
        return json.loads(data) == value
    except (ValueError, RecursionError):
        return False


@st.composite
def with_one_part_changed(draw, value, hostile):
    """A copy of dicts and lists with another value in one place, at any depth."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(list(value)))
        if draw(st.integers(0, 9)) == 0:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: draw(with_one_part_changed(value[key], hostile))}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(with_one_part_changed(value[at], hostile)), *value[at + 1 :]]
    return draw(hostile)


def test_checkpoints(folder):
    (counts,) = run_distributed(attack_checkpoints, 1, str(folder))
    assert counts["found damaged"] > 0.05 * EXAMPLES and counts["refused"] and counts["loaded"]
