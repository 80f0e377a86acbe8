"""Files that nobody meant to be read: each is used as it should be, or refused by a message that names it."""

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coat_ds import CoatConfig, CoatConfigError
from coat_launch import checkpoints, output_lock, preflight, pretrain_gpt, report
from coat_launch.args import SHAPE_FLAGS
from coat_launch.data import load_corpus
from coat_launch.deepspeed_config import read_deepspeed_config, set_batch_sizes
from coat_launch.errors import DataError, LaunchError
from coat_launch.model import load_model_shape
from coat_launch.settings import KINDS, ClusterError, Settings
from coat_launch.tokenizer import Tokenizer
from tests.hostile.conftest import EXAMPLES, share
from tests.util import run_distributed

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = [0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def tries(part: float = 0.06):
    """Settings of a test that takes `part` of all inputs."""
    return settings(
        max_examples=max(5, share(part)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """The bytes with bits flipped, parts cut out, put in or repeated, and numbers in the place of others."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 5)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at:]
            case 2:
                del data[at : at + draw(st.integers(1, 9))]
            case 3:
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case 4:
                data[at:at] = data[draw(st.integers(0, len(data))) :][:64]
            case 5:
                kind = draw(st.sampled_from(["<B", "<I", "<Q"]))
                value = draw(st.sampled_from(NUMBERS)) % 256 ** struct.calcsize(kind)
                data[at : at + struct.calcsize(kind)] = struct.pack(kind, value)
    return bytes(data)


HOSTILE_TEXT = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "auto", "1e-3", "nan", "AdamW", "adam", "../x", "a" * 300, "\0", "é"]),
)
HOSTILE_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from([0, 1, 2, 3, 128, -1, 1e-3, 2**80, 10**400]),
        HOSTILE_TEXT,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(HOSTILE_TEXT, inner, max_size=3)),
    max_leaves=6,
)


def changed(whole):
    """A JSON value with some of its parts exchanged, missing, or under other names."""
    if isinstance(whole, dict):
        parts = {key: st.one_of(st.just(value), changed(value)) for key, value in whole.items()}
        more = st.dictionaries(HOSTILE_TEXT, HOSTILE_VALUES, max_size=1)
        return st.one_of(
            st.builds(lambda old, new: {**old, **new}, st.fixed_dictionaries({}, optional=parts), more),
            st.fixed_dictionaries(parts),
            HOSTILE_VALUES,
        )
    return HOSTILE_VALUES


def json_files(whole) -> st.SearchStrategy[bytes]:
    return st.one_of(
        changed(whole).map(lambda value: json.dumps(value).encode()),
        damaged(json.dumps(whole).encode()),
        st.binary(max_size=30),
        st.sampled_from([b"[" * 10**5, b'{"a":' * 10**5, b"9" * 6000, b"\xff\xfe", b"", b"\0" * 20]),
    )


# indexed datasets


def indexed(documents: list[list[list[int]]], dtype=np.uint16) -> tuple[bytes, bytes]:
    """An .idx and a .bin as Megatron writes them."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    begins = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    code = {np.uint16: 8, np.int32: 4}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(firsts))
    tokens = np.concatenate([np.array(sequence, dtype) for sequence in sequences])
    return header + lengths.tobytes() + begins.tobytes() + firsts.tobytes(), tokens.tobytes()


IDX, BIN = indexed([[[1, 2, 3], [4]], [[5, 6, 7, 8, 9]], [], [[10, 11], [12, 13, 14]]])


def all_tokens(split) -> list[int]:
    """Of a corpus of samples of one token and its label, which the next one begins with."""
    return [int(split.sample(i)[0]) for i in range(len(split))] + [int(split.sample(len(split) - 1)[1])]


@tries()
@given(damaged(IDX) | st.just(IDX) | st.binary(max_size=120), damaged(BIN) | st.just(BIN))
def test_indexed_datasets(folder, idx, tokens):
    prefix = folder / "indexed"
    prefix.with_suffix(".idx").write_bytes(idx)
    prefix.with_suffix(".bin").write_bytes(tokens)
    try:
        corpus = load_corpus([prefix], seq_length=1, seed=0, vocab_size=2**16)
        found = all_tokens(corpus.train) + all_tokens(corpus.validation)
    except DataError as error:
        assert str(prefix) in str(error) or "part of the corpus has" in str(error), error
        return
    # each token of the file once, whatever the documents are
    dtype = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}[idx[17]]
    assert sorted(found) == sorted(np.frombuffer(tokens, dtype).tolist())


# text

RECORDS = (
    b'{"text": "one and two"}\n\n{"id": 3, "text": "\\u00e9\\ud83d\\ude00 \xc3\xa9"}\n'
    b'{"text": ""}\n{"text": "x y"}\n'
)


@tries()
@given(
    st.one_of(
        damaged(RECORDS),
        st.lists(json_files({"text": "some words", "id": 1}), min_size=1, max_size=4).map(b"\n".join),
        st.lists(
            st.text(st.characters(), max_size=5).map(lambda t: json.dumps({"text": t}).encode()), max_size=5
        ).map(b"\n".join),
    )
)
def test_json_lines(folder, data):
    path = folder / "lines.jsonl"
    path.write_bytes(data)
    try:
        corpus = load_corpus([path], seq_length=1, seed=0)
    except DataError as error:
        message = str(error)
        assert str(path) in message or "part of the corpus has" in message, message
        assert not ("not JSON" in message or "expected an object" in message) or ", line " in message
        return
    texts = [json.loads(line)["text"] for line in data.split(b"\n") if line.strip()]
    # bytes and the end of each document
    expected = sorted(x for text in texts if text for x in [*text.encode(), 256])
    assert sorted(all_tokens(corpus.train) + all_tokens(corpus.validation)) == expected


@tries(0.03)
@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_plain_text(folder, data):
    path = folder / "plain.txt"
    path.write_bytes(data)
    try:
        corpus = load_corpus([path], seq_length=1, seed=0)
    except DataError as error:
        assert str(path) in str(error) or "part of the corpus has" in str(error)
        return
    assert all_tokens(corpus.train) + all_tokens(corpus.validation) == [*data, 256]


def tokenizer_file() -> dict:
    from tokenizers import Tokenizer as Fast
    from tokenizers import models

    return json.loads(Fast(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a")).to_str())


@tries(0.03)
@given(json_files(tokenizer_file()))
def test_tokenizers(folder, data):
    path = folder / "tokenizer.json"
    path.write_bytes(data)
    try:
        tokenizer = Tokenizer.from_file(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    assert 0 <= tokenizer.end_of_document < tokenizer.vocab_size


# what the entry point and the launchers read

HOST = json.loads((ROOT / "configs/ds_zero1_coat.json").read_text())
BLOCK = {
    "enabled": True,
    "optimizer": {
        "enabled": True,
        "exp_avg_format": "fp8_expanded",
        "group_size": 128,
        "keep_fp32": ["*norm*"],
    },
    "activations": {"saved_format": "sqrt8", "weight_cache": "none", "group_size": 16, "fallback": False},
    "checkpointing": {"compress": False},
    "report": True,
}


@tries()
@given(json_files({**HOST, "coat": BLOCK}))
def test_deepspeed_configs(folder, data):
    from coat_ds.zero import deepspeed_config

    path = folder / "ds.json"
    path.write_bytes(data)
    args = argparse.Namespace(deepspeed_config=str(path), variant=None, lr=1e-3)
    try:
        config = read_deepspeed_config(args)
        set_batch_sizes(dict(config), argparse.Namespace(micro_batch_size=None, global_batch_size=None), 1)
        coat = deepspeed_config.check(config, None)
    except LaunchError as error:
        assert str(path) in str(error) or "train_" in str(error) or "gradient_acc" in str(error), error
        return
    except CoatConfigError as error:
        key, _, rest = str(error).partition(":")
        top = key.split(".")[0]
        assert top == "coat" or top in config, error
        assert rest
        return
    # what was taken is what was asked for
    assert isinstance(coat, CoatConfig) and coat.enabled == (config.get("coat") or {}).get("enabled", False)


SHAPE = json.loads((ROOT / "configs/model_quickstart.json").read_text())


@tries()
@given(json_files(SHAPE))
def test_model_configs(folder, data):
    path = folder / "model.json"
    path.write_bytes(data)
    flags = dict.fromkeys(SHAPE_FLAGS)
    shape = None
    try:
        shape = load_model_shape(argparse.Namespace(model_config=str(path), **flags))
    except LaunchError as error:
        assert str(path) in str(error)
    try:
        env = {"MODEL_CONFIG": str(path), "GPUS_PER_NODE": "2", "TENSOR_SIZE": "2", "OUTPUT": str(folder)}
        Settings.from_environment("torchrun", env)
    except ClusterError as error:
        assert str(path) in str(error)
    if shape is not None:
        assert json.loads(data).items() <= dataclasses.asdict(shape).items()


@tries()
@given(
    st.one_of(
        damaged(b"# hosts\nnode-a slots=8\n\nnode-b.example slots=8 # two\n10.0.0.1 slots=8\n"),
        st.binary(max_size=40),
        st.lists(HOSTILE_TEXT.map(lambda t: f"{t} slots={len(t)}".encode("utf-8", "replace"))).map(
            b"\n".join
        ),
    )
)
def test_hostfiles(folder, data):
    path = folder / "hosts"
    path.write_bytes(data)
    try:
        env = {"HOSTFILE": str(path), "OUTPUT": str(folder), "GPUS_PER_NODE": "1"}
        hosts = Settings.from_environment("deepspeed", env).hosts
    except ClusterError as error:
        assert str(path) in str(error)
        return
    assert hosts and all(
        host and not host.startswith("-") and not set(host) & set(" ;$&`'\"") for host in hosts
    )


VARIABLES = ["NODES", "NODE_RANK", "GPUS_PER_NODE", "LAUNCHER", "MASTER_ADDR", "MASTER_PORT", "TENSOR_SIZE"]
VARIABLES += ["PIPELINE_SIZE", "DATA_SIZE", "SEQ_LENGTH", "STEPS", "SAVE_INTERVAL", "MAX_RESTARTS", "JOB"]
VARIABLES += ["SLURM_NNODES", "SLURM_NODEID", "MODEL_CONFIG", "HOSTFILE", "INTERFACE"]


@tries()
@given(
    st.sampled_from(KINDS),
    st.dictionaries(
        st.sampled_from(VARIABLES),
        st.one_of(
            HOSTILE_TEXT, st.sampled_from(["0", "1", "2", "-1", "99999999", "9" * 5000, "²", "١", " 1"])
        ),
        max_size=3,
    ),
)
def test_variables(folder, kind, env):
    env = {name: value.replace("\0", "") for name, value in env.items()}
    try:
        found = Settings.from_environment(kind, {"OUTPUT": str(folder), "MEGATRON_PATH": "/m", **env})
    except ClusterError as error:
        assert any(name in str(error) for name in (*env, "NODES", "MASTER_ADDR", "HOSTFILE")), error
        return
    assert 0 < found.master_port < 2**16 and 0 <= found.node_rank < found.nodes


NODE = {
    "host": "a",
    "versions": dict.fromkeys(("python", *preflight.PACKAGES), "1"),
    "sources": "x",
    "gpus": [["old", 8, 0]],
    "free_bytes": 2**50,
    "sees_token": True,
    "mpirun": "none",
    "interfaces": ["lo"],
    "nccl": {},
}


@tries()
@given(json_files({**HOST, "coat": BLOCK}))
def test_preflight(folder, data):
    path = folder / "preflight.json"
    path.write_bytes(data)
    env = {"OUTPUT": str(folder), "DEEPSPEED_CONFIG": str(path), "GPUS_PER_NODE": "1"}
    try:
        found = preflight.problems(Settings.from_environment("torchrun", env), [NODE])
    except ClusterError as error:
        assert str(path) in str(error)
        return
    assert len(found) <= 1


# what a run leaves behind


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


# checkpoints


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
    """One rank with an engine saves once; then it meets what becomes of the files. Counts what came of it."""
    import coat_ds
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
            "report": False,
        },
    }

    def built():
        return coat_ds.initialize(model=torch.nn.Linear(16, 16), config=config)[0]

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
        """With a manifest that says that they are as they should be."""
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
            # what it holds of a file that was refused is of no use to the next attack
            engine = built()
            checkpoints.load(engine, checkpoint, layout, folder)

    @tries()
    @given(NAMES | st.just(checkpoints.MANIFEST), st.data())
    def damage(name, data):
        files = {**whole, name: data.draw(damaged(whole[name]))}
        renew(files)
        # a manifest may be written in another way and say the same
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

    @tries(0.02)
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

    @tries(0.02)
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
    """What is pickled as a stored moment of these arguments."""

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
    """A copy of dicts and lists with something else in one place, however deep."""
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
