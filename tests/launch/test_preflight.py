"""What the scripts refuse to start, and the commands that they print before a start."""

import json
import os
import shlex
import socket
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed.launcher import runner
from torch.distributed.elastic.utils import macros

from coat_launch import config_path, preflight
from coat_launch.args import parse_args
from coat_launch.commands import check_handed_on, command, environment
from coat_launch.settings import ClusterError, Settings
from tests.util import free_port

ROOT = Path(preflight.__file__).parents[1]


def settings(tmp_path, kind="torchrun", **variables) -> Settings:
    return Settings.from_environment(kind, {"OUTPUT": str(tmp_path), "GPUS_PER_NODE": "1", **variables})


@pytest.mark.parametrize(
    "variables",
    [
        {"NODES": "two"},
        {"MASTER_ADDR": "", "NODES": "2"},
        {"NODE_RANK": "1"},
        {"TENSOR_SIZE": "3"},
        {"TENSOR_SIZE": "8", "GPUS_PER_NODE": "8"},
        {"TENSOR_SIZE": "4", "GPUS_PER_NODE": "4"},
        {"DATA_SIZE": "2", "GPUS_PER_NODE": "4"},
        {"PIPELINE_SIZE": "2", "GPUS_PER_NODE": "2"},
        {"MODEL_CONFIG": "none.json"},
        {"LAUNCHER": "rsh"},
        {"SLURM_NNODES": "abc"},
        {"SLURM_NODEID": ""},
        {"STEPS": "9" * 5000},
        {"MASTER_PORT": "99999999"},
        {"MASTER_ADDR": "a;id"},
        {"JOB": "a/b"},
    ],
    ids="-".join,
)
def test_settings_are_refused(tmp_path, variables):
    with pytest.raises(ClusterError, match=f"^{next(iter(variables))}"):
        settings(tmp_path, **variables)


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"coat": {"enabled": True, "optimizer": True}},
            "coat.optimizer: expected an object .* found True",
        ),
        ({"coat": True}, "coat: expected an object .* found True"),
    ],
    ids=["activations", "block"],
)
def test_blocks_are_refused_before_the_start(tmp_path, good, config, message):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ClusterError, match=f"DEEPSPEED_CONFIG {path}: {message}"):
        preflight.problems(settings(tmp_path, DEEPSPEED_CONFIG=str(path)), [good])


def test_old_gpus_may_have_fp8_states(tmp_path, good):
    """The fix that the message about FP8 recommends works."""
    path = tmp_path / "ds.json"
    old = {**deepcopy(good), "gpus": [["A100", 8, 0]]}
    for activations, problems in (({}, 1), ({"enabled": False}, 0)):
        path.write_text(json.dumps({"coat": {"enabled": True, "activations": activations}}))
        assert len(preflight.problems(settings(tmp_path, DEEPSPEED_CONFIG=str(path)), [old])) == problems
    for config in ({}, {"coat": {"enabled": False}}):
        path.write_text(json.dumps(config))
        assert preflight.problems(settings(tmp_path, DEEPSPEED_CONFIG=str(path)), [old]) == []
    # the optimizer's name replaces the block
    path.write_text(json.dumps({"optimizer": {"type": "CoatAdamW"}}))
    assert len(preflight.problems(settings(tmp_path, DEEPSPEED_CONFIG=str(path)), [old])) == 1


def test_hostfiles(tmp_path):
    path = tmp_path / "hosts"

    def read(text):
        path.write_text(text)
        return settings(tmp_path, "deepspeed", HOSTFILE=str(path), GPUS_PER_NODE="8")

    found = read("# mine\nnode-a slots=8\n\nnode-b slots=8 # the second\n")
    assert found.hosts == ("node-a", "node-b") and found.nodes == 2 and found.master_addr == "node-a"
    one = settings(tmp_path, "deepspeed", HOSTFILE=str(path), NODES="1")
    assert one.hosts == ("node-a",)
    # MASTER_ADDR may be in another network than the address to which the node's name resolves
    assert (
        settings(tmp_path, "deepspeed", HOSTFILE=str(path), MASTER_ADDR="10.0.0.9").master_addr == "10.0.0.9"
    )
    with pytest.raises(ClusterError, match="NODES: 3, but HOSTFILE .*hosts has 2 hosts"):
        settings(tmp_path, "deepspeed", HOSTFILE=str(path), NODES="3")
    # ssh would read the second as an option
    for wrong in ("node-a\n", "-oProxyCommand=id slots=8\n", "a slots=8\na slots=8\n", "a;id slots=8\n"):
        with pytest.raises(ClusterError, match="expected lines 'host slots=n'"):
            read(wrong)
    path.write_bytes(b"node-a slots=8\n\x80\x00")
    with pytest.raises(
        ClusterError, match="hosts: expected text, found byte 0x80 at 15: give a file of lines"
    ):
        settings(tmp_path, "deepspeed", HOSTFILE=str(path))
    with pytest.raises(ClusterError, match="the same slots on each host"):
        read("a slots=8\nb slots=4\n")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """This machine's own report, as node 0 would write it, with GPUs added."""
    folder = tmp_path_factory.mktemp("report")
    report = preflight.report(settings(folder))
    assert report["versions"]["torch"] and report["interfaces"] and report["free_bytes"] > 0
    return {**report, "host": "a", "gpus": [["H200", 9, 0]], "nccl": {}}


def test_nodes_that_fit_have_no_problems(tmp_path, good):
    assert preflight.problems(settings(tmp_path), [good]) == []
    two = settings(tmp_path, NODES="2", MASTER_ADDR="a")
    other = {**deepcopy(good), "host": "b"}
    assert preflight.problems(two, [good, other]) == []
    # all interfaces except these; and the only interface of a single node
    all_but = [{**node, "nccl": {"NCCL_SOCKET_IFNAME": "^docker0,virbr"}} for node in (good, other)]
    assert preflight.problems(two, all_but) == []
    assert preflight.problems(settings(tmp_path, INTERFACE="lo"), [good]) == []
    (line,) = preflight.problems(two, [{**good, "nccl": {"NCCL_P2P_DISABLE": "1"}}, other])
    assert line.startswith("b: NCCL_P2P_DISABLE is unset, on a it is 1")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"versions": {"torch": "1.0"}}, "b: torch 1.0, but a has "),
        ({"versions": {"deepspeed": None}}, "b: deepspeed is missing, but a has "),
        ({"sources": "0"}, "b: this project's sources differ from a's. Bring both to one commit"),
        ({"gpus": []}, "b: 0 GPUs, a has 1. Leave one out"),
        ({"gpus": [["V100", 7, 0]]}, "b: V100 has compute capability 7.0, FP8 needs 8.9"),
        ({"free_bytes": 2**20}, "b: 0.0 GiB are free in"),
        ({"sees_megatron": False}, "b: MEGATRON_PATH: no pretrain_gpt.py in "),
        ({"sees_token": False}, "b: does not see"),
        ({"interfaces": ["eth1"]}, "b: no network interface lo, there are eth1. Set INTERFACE"),
        ({"nccl": {"NCCL_IB_DISABLE": "1"}}, "b: NCCL_IB_DISABLE is 1, on a it is unset. Set it to the same"),
        ({"nccl": {"NCCL_DEBUG": "LOUD"}}, "b: NCCL_DEBUG is LOUD. Set it to VERSION"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_problems_name_the_host_and_the_way_out(tmp_path, good, change, message):
    other = {**deepcopy(good), "host": "b"}
    for key, value in change.items():
        other[key] = {**other[key], **value} if isinstance(value, dict) else value
    found = preflight.problems(settings(tmp_path, INTERFACE="lo", GPUS_PER_NODE="1"), [good, other])
    assert any(line.startswith(message) for line in found), found
    (*_, alone) = preflight.problems(settings(tmp_path, NODES="2", MASTER_ADDR="a", INTERFACE="lo"), [good])
    assert "the loopback interface reaches no other node" in alone
    (few,) = preflight.problems(settings(tmp_path, GPUS_PER_NODE="2"), [good])
    assert few.startswith("a: 1 GPUs, GPUS_PER_NODE asks for 2. Lower it")


def test_dry_run_prints_what_each_node_runs(tmp_path):
    """Words pass through the shell unchanged, and the training scripts' own parsers accept them."""
    data = tmp_path / 'a $(touch pwned) "b" corpus'
    env = {**os.environ, "PYTHON": sys.executable, "OUTPUT": str(tmp_path / "o u t"), "DATA": f"{data}:/c"}
    env |= {"NODES": "2", "MASTER_ADDR": "10.0.0.1", "GPUS_PER_NODE": "4", "INTERFACE": "eth9"}

    def dry_run(script, **variables):
        done = subprocess.run(
            ["bash", str(ROOT / "launch" / script), "--dry-run", "--lr", "0.5"],
            env={**env, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert not (tmp_path / "pwned").exists()
        return [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]

    for rank, words in enumerate(dry_run("torchrun_multinode.sh", TENSOR_SIZE="2")):
        assert {"NCCL_SOCKET_IFNAME=eth9", "GLOO_SOCKET_IFNAME=eth9"} <= set(words)
        assert f"--rdzv-conf=is_host={int(rank == 0)}" in words and "--nproc-per-node=4" in words
        script = words.index(str(ROOT / "launch/pretrain_gpt.py"))
        # as torchrun's agents do
        args = parse_args(macros.substitute(words[script + 1 :], "0"))
        assert args.data == [str(data), "/c"] and args.resume and args.lr == 0.5
        assert args.output == str(tmp_path / "o u t")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\nb slots=4\n")
    (words,) = dry_run("deepspeed_multinode.sh", HOSTFILE=str(hostfile))
    assert {f"--hostfile={tmp_path}/o u t/deepspeed_hosts", "--launcher=pdsh"} <= set(words)
    first, second = dry_run("megatron_pretrain.sh", MEGATRON_PATH="/megatron", PIPELINE_SIZE="2")
    script = first.index("/megatron/pretrain_gpt.py")
    assert first[script:] == second[second.index("/megatron/pretrain_gpt.py") :]
    assert first[first.index("--spec") :][:3] == ["--spec", "megatron_ext.spec", "coat_layer_spec"]


def test_each_node_is_told_its_part(tmp_path):
    mine = settings(tmp_path, NODES="2", NODE_RANK="1", MASTER_ADDR="a", INTERFACE="lo")
    first, second = (command(mine, rank, []) for rank in range(2))
    assert "--rdzv-conf=is_host=1" in first and "--rdzv-conf=is_host=0" in second
    # only the node itself knows the address of an interface
    assert "--local-addr=127.0.0.1" in second and not any("--local-addr" in word for word in first)


def test_what_was_set_reaches_the_training_scripts(tmp_path):
    given = {"SAVE_INTERVAL": "7", "STEPS": "9", "SEQ_LENGTH": "64", "TOKENIZER": "t.json", "DATA": "-a:b"}
    words = command(settings(tmp_path, MAX_RESTARTS="3", JOB="mine", **given), 0, [])
    assert {"--max-restarts=3", "--rdzv-id=mine"} <= set(words)
    args = parse_args(
        words[1 + next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py")) :]
    )
    assert (args.save_interval, args.steps, args.seq_length, args.tokenizer) == (7, 9, 64, "t.json")
    # otherwise this would be an option
    assert args.data == ["./-a", "b"] and args.resume
    words = command(settings(tmp_path, "megatron", MEGATRON_PATH="/m", **given), 0, [])
    values = dict(zip(words, words[1:], strict=False))
    assert (values["--save-interval"], values["--train-iters"], values["--seq-length"]) == ("7", "9", "64")
    assert values["--load"] == values["--save"] == f"{tmp_path}/megatron"
    # Megatron saves at a signal only with this option
    assert "--exit-signal-handler" in words
    # ranks of other nodes start in other folders
    assert os.path.isabs(settings(tmp_path, OUTPUT="runs/mine").output)


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("untied", [True, False])
def test_megatron_is_told_what_the_model_is(tmp_path, tensor_size, untied):
    shape = json.loads(Path(config_path("model_quickstart.json")).read_text())
    shape |= {"layernorm_epsilon": 1e-3, "rotary_base": 500, "untie_embeddings_and_output_weights": untied}
    (tmp_path / "model.json").write_text(json.dumps(shape))
    sizes = {"GPUS_PER_NODE": "2", "TENSOR_SIZE": str(tensor_size)}
    mine = settings(
        tmp_path, "megatron", MEGATRON_PATH="/m", MODEL_CONFIG=str(tmp_path / "model.json"), **sizes
    )
    words = command(mine, 0, [])
    values = dict(zip(words, words[1:], strict=False))
    assert values["--norm-epsilon"] == "0.001" and values["--rotary-base"] == "500"
    assert ("--untie-embeddings-and-output-weights" in words) == untied
    assert ("--sequence-parallel" in words) == (tensor_size == 2)
    own = environment(mine, {"PYTHONPATH": "/mine", "OMP_NUM_THREADS": "3"})
    assert own["PYTHONPATH"] == f"/m{os.pathsep}/mine" and own["OMP_NUM_THREADS"] == "3"
    assert own.get("CUDA_DEVICE_MAX_CONNECTIONS") == (None if tensor_size == 1 else "1")


@pytest.mark.parametrize("launcher", ["openmpi", "slurm"])
def test_values_that_the_launcher_would_change_are_refused(tmp_path, launcher):
    args = runner.parse_args([f"--launcher={launcher}", "script.py"])
    mine = replace(settings(tmp_path), kind="deepspeed", hosts=("a", "b"), launcher=launcher)
    for character in "x\\\" $'~,:=./-@%+":
        value = f"/a{character}b"
        made = runner.LAUNCHER_CLASSES[launcher](args, "", {})
        made.add_export("PYTHONPATH", value)
        # srun ends a value at a comma
        changed = made.exports["PYTHONPATH"] != value or (launcher, character) == ("slurm", ",")
        for env, own in (({"PYTHONPATH": value}, {}), ({}, {"OWN": value})):
            if changed:
                with pytest.raises(ClusterError) as refused:
                    check_handed_on(mine, env, own, [])
                assert f"by LAUNCHER={launcher}, for {character!r} in it" in str(refused.value)
            else:
                check_handed_on(mine, env, own, [])
        check_handed_on(mine, {"LS_COLORS": value}, {}, [])


def test_two_nodes_compare_themselves_through_the_store(tmp_path):
    """Real processes; the second one has another version of this project."""
    code = (
        "import json, sys; from coat_launch import preflight; from coat_launch.settings import *\n"
        "s = Settings.from_environment('torchrun', json.loads(sys.argv[1]))\n"
        "r = preflight.report\n"
        "preflight.report = lambda *a: r(*a) | ({'sources': 'x', 'host': 'b'} if s.node_rank else {})\n"
        "try: preflight.check(s, {})\n"
        "except ClusterError as e: print(e)\n"
    )
    common = {
        "NODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port() - 1),
        "GPUS_PER_NODE": "1",
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                json.dumps({**common, "NODE_RANK": str(r), "OUTPUT": str(tmp_path)}),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in (0, 1)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=400)
        assert (
            out.splitlines()[0] == "the cluster is not ready:" and "b: this project's sources differ" in out
        )
    assert not list(tmp_path.iterdir())


def test_a_node_0_that_cannot_listen(tmp_path):
    """The port is in use; the address is another node's, whose NODE_RANK is not set; or no machine has the
    address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1] - 1)
        for address, why in (
            ("127.0.0.1", "Address already in use"),
            ("192.0.2.1", "Cannot assign requested address"),
            ("no-host.invalid", ""),
        ):
            two = {"NODES": "2", "MASTER_ADDR": address, "MASTER_PORT": port, "MEGATRON_PATH": "/m"}
            for kind in ("torchrun", "megatron"):
                with pytest.raises(
                    ClusterError, match=f"MASTER_ADDR {address}, MASTER_PORT {port}: .*{why}.* Set NODE_RANK"
                ):
                    preflight.check(settings(tmp_path, kind, **two), {})
