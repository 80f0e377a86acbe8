"""Values of any characters on their way to the ranks: they arrive unchanged, or are refused before the start.

DeepSpeed's and torchrun's own code makes the command lines. These run for real, up to programs that take the
place of pdsh, ssh, mpirun and srun and treat their arguments as those do; at the other end of pdsh and ssh is
a real shell. In place of Python something prints what it was given.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from deepspeed.launcher import runner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed import run as torchrun
from torch.distributed.elastic.utils import macros

from coat_launch import cluster, preflight
from coat_launch.settings import Settings

ROOT = Path(__file__).parents[2]
EXAMPLES = int(os.environ.get("COAT_HOSTILE_EXAMPLES", 8))
NASTY = [
    "price$5",
    "a&b",
    "a;b",
    "a b",
    " a",
    "b ",
    'say "a"',
    "it's",
    "a\\b",
    "a\\",
    "a b\\",
    "`id`",
    "$(id)",
]
NASTY += ["a\nb", "*", "?[a]", "~", "~root", "#a", "a|b", "a>b", "(a)", "{a,b}", "!a", "100%", "%n", "%%h %u"]
NASTY += [
    "--lr=1",
    "-",
    "--",
    "$$",
    "$local_rank",
    "${local_rank}",
    "a$HOME b",
    '"',
    '\\" $a',
    "é",
    "語",
    "\t",
    "",
]
# after a name that is none, so that Megatron's and our parser leave it
EXTRA = [f"--note={text}" for text in NASTY] + [text for text in NASTY if text != "--"]
# the rank's arguments and variables, each ended by a zero
PYTHON = """#!/bin/sh
for word; do printf '%s\\0' "$word"; done
printf '\\0VARIABLES\\0'
exec env -0
"""
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
exec env -i PATH=/usr/bin:/bin sh -c "$*"
"""
# -S, -f n and -w hosts; in the rest %h, %u, %n and %% are exchanged, and an empty argument ends it
PDSH = f"""#!{sys.executable} -SE
import os, re, sys
assert sys.argv[1] == "-S" and sys.argv[2] == "-f" and sys.argv[4] == "-w"
values = {{"%h": "node-a", "%u": "root", "%n": "0", "%%": "%"}}
words = [re.sub("%.?", lambda found: values.get(found[0], found[0]), w, flags=re.S) for w in sys.argv[6:]]
words = words[: words.index("")] if "" in words else words
os.execvp("ssh", ["ssh", "-o", "x", "node-a", *words])
"""
# the program begins after the options; ":" begins another one; variables are those of -x
MPIRUN = f"""#!{sys.executable} -SE
import os, sys
words, env = sys.argv[1:], {{"PATH": "/usr/bin:/bin"}}
while words[0].startswith("-"):
    if words[0] == "-x":
        env.update([words[1].split("=", 1)])
    del words[: 3 if words[0] == "--mca" else 2]
words = words[: words.index(":")] if ":" in words else words
os.execve(words[0], words, env)
"""
SRUN = f"""#!{sys.executable} -SE
import os, sys
words, env = sys.argv[1:], {{"PATH": "/usr/bin:/bin"}}
while words[0].startswith("-"):
    if words[0].startswith("--export="):
        env.update(part.split("=", 1) for part in words[0].removeprefix("--export=ALL,").split(","))
    del words[: 2 if words[0] == "-n" else 1]
os.execve(words[0], words, env)
"""
PROGRAMS = {"python": PYTHON, "ssh": SSH, "pdsh": PDSH, "mpirun": MPIRUN, "srun": SRUN}
PROGRAMS |= {
    "ompi_info": "#!/bin/sh\n",
    "sinfo": "#!/bin/sh\n",
    "scontrol": "#!/bin/sh\necho node-a node-b\n",
}
SCRIPTS = {
    "torchrun": ("torchrun", {}),
    "megatron": ("megatron", {"MEGATRON_PATH": "/megatron", "TOKENIZER": "t"}),
    "one node": ("deepspeed", {"GPUS_PER_NODE": "1"}),
    "pdsh": ("deepspeed", {"HOSTFILE": "hosts"}),
    "openmpi": ("deepspeed", {"HOSTFILE": "hosts", "LAUNCHER": "openmpi"}),
    "slurm": ("deepspeed", {"LAUNCHER": "slurm", "SLURM_JOB_NODELIST": "node-[a-b]", "GPUS_PER_NODE": "1"}),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A folder with the programs, first on PATH, and a hostfile."""
    folder = tmp_path_factory.mktemp("bench")
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    return folder


class Stopped(Exception):
    """In the place of an exec."""


def started(bench: Path, script: str, variables: dict[str, str], extra: list[str]):
    """What the script would become: its words and variables. Raises SystemExit where it refuses."""
    kind, own = SCRIPTS[script]
    env = {"PATH": f"{bench}:/usr/bin:/bin", **own, **variables}
    if "HOSTFILE" in env:
        env["HOSTFILE"] = str(bench / "hosts")
    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(sys, "executable", str(bench / "python")),
        mock.patch.object(preflight, "check"),
        mock.patch.object(signal, "signal"),
        mock.patch.object(os, "execvpe", side_effect=Stopped) as execute,
    ):
        with pytest.raises(Stopped):
            cluster.main([kind, *extra])
        _, words, env = execute.call_args.args
    return words, env


def by_deepspeed(bench: Path, words: list[str], env: dict[str, str]):
    """What DeepSpeed's launcher starts."""
    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(sys, "executable", str(bench / "python")),
        # read when it is imported
        mock.patch.object(runner, "DEEPSPEED_ENVIRONMENT_NAME", env.get("DS_ENV_FILE", "none")),
        mock.patch.object(runner.signal, "signal"),
        mock.patch.object(runner, "subprocess") as subprocesses,
    ):
        popen = subprocesses.Popen
        popen.return_value.returncode = 0
        runner.main(words[words.index("deepspeed.launcher.runner") + 1 :])
    return popen.call_args.args[0], popen.call_args.kwargs["env"]


def by_torchrun(bench: Path, words: list[str], env: dict[str, str]):
    """What an agent of torchrun starts."""
    with mock.patch.object(sys, "executable", str(bench / "python")):
        given = torchrun.parse_args(words[words.index("torch.distributed.run") + 1 :])
        _, command, arguments = torchrun.config_from_args(given)
    return macros.substitute([command, *arguments], "0"), env


def arrived(command: list[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    done = subprocess.run(command, env=env, capture_output=True, check=True, cwd=ROOT)
    words, _, rest = done.stdout.partition(b"\0\0VARIABLES\0")
    variables = dict(os.fsdecode(line).split("=", 1) for line in rest.split(b"\0") if b"=" in line)
    return [os.fsdecode(word) for word in words.split(b"\0")], variables


# zero is in no argument, and half a character in none that anybody types
texts = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.sampled_from("a$&;'\"\\`*%! \n~(#{-=,:"), max_size=12),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
)
names = texts.filter(lambda text: "/" not in text and len(text.encode()) < 100)


@pytest.mark.parametrize("script", SCRIPTS)
@given(
    output=names,
    data=st.lists(texts, max_size=3),
    value=st.one_of(st.just("1"), texts),
    extra=st.lists(texts),
)
@example(output="price$5 %n 'a' \\", data=["a&b", "a b", "-a", "c$d"], value="1", extra=EXTRA)
@example(output="x", data=[], value="$(id) `id` \"a\" \\ % %n ; 'b'", extra=[])
@example(output="x", data=[], value="a,b", extra=[":"])
@example(output="x", data=[], value="1", extra=["--=a"])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_values_arrive_or_are_refused(bench, script, output, data, value, extra):
    kind, _ = SCRIPTS[script]
    paths = [f"{text}/c".replace(":", "") for text in data]
    # argparse, of whichever script, has its own idea of this word
    extra = [word for word in extra if word not in ("--", "-h", "--help", "--dry-run")]
    output = str(bench / "outputs" / f"o{output}")
    variables = {"OUTPUT": output, "DATA": ":".join(paths), "NCCL_NOTE": value, "PYTHONPATH": "/p"}
    try:
        words, env = started(bench, script, variables, extra)
    except SystemExit as end:
        message = str(end.code)
        spoilt = re.search(r" by LAUNCHER=(\w+), for ('.+'|\".+\") in it\. \w", message)
        assert spoilt and spoilt[1] == script, message
        if message.startswith("error: argument"):
            assert script == "openmpi" and ":" in extra
        else:
            assert message.startswith(f"error: NCCL_NOTE: {value!r} would not reach")
            # pdsh takes all but what a line of a file cannot hold
            assert script != "pdsh" or value != value.strip() or re.search(r"[\r\n]", value)
            assert not re.fullmatch(r"[\w./-]*", value)
        return
    after = by_deepspeed if kind == "deepspeed" else by_torchrun
    if any(word.startswith("--=") for word in extra):
        # the launchers' argparse takes it for a short form of each of their options
        with pytest.raises(SystemExit, match="^2$"):
            after(bench, words, env)
        return
    words, found = arrived(*after(bench, words, env))
    words = words[next(i for i, word in enumerate(words) if word.endswith("/pretrain_gpt.py")) + 1 :]
    assert words[len(words) - len(extra) :] == extra
    if kind == "megatron":
        assert words[words.index("--save") + 1] == f"{output}/megatron"
    else:
        assert f"--output={output}" in words
    if paths:
        at = words.index("--data-path" if kind == "megatron" else "--data") + 1
        assert words[at : at + len(paths)] == [f"./{p}" if p.startswith("-") else p for p in paths]
    assert found["NCCL_NOTE"] == value
    assert found["PYTHONPATH"] == ("/megatron:/p" if kind == "megatron" else "/p")


@given(output=names, value=texts)
@example(output="price$5 'a' \\", value="$(id) `id` \"a\" \\ % %n ; 'b'")
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_questions_by_ssh_arrive(bench, output, value):
    """What preflight asks the hosts of a hostfile."""
    env = {
        "OUTPUT": str(bench / "outputs" / f"o{output}"),
        "PYTHONPATH": value,
        "HOSTFILE": str(bench / "hosts"),
    }
    asked = []

    def run(command):
        asked.append(arrived(command, {"PATH": f"{bench}:/usr/bin:/bin"}))
        return subprocess.CompletedProcess(command, 0, stdout="{}\n", stderr="")

    with (
        mock.patch.object(sys, "executable", str(bench / "python")),
        mock.patch.object(preflight, "_run", run),
    ):
        preflight.reports_by_ssh(Settings.from_environment("deepspeed", env), env)
    assert len(asked) == 2
    for words, found in asked:
        assert words[:3] == ["-m", "coat_launch.preflight", env["OUTPUT"]]
        assert (found["OUTPUT"], found["PYTHONPATH"]) == (env["OUTPUT"], value)


@pytest.mark.parametrize("folder, name", [("a b", "folder to start in"), ("p", "PYTHON")])
def test_what_deepspeed_does_not_quote_for_pdsh(bench, monkeypatch, tmp_path, folder, name):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    if name == "PYTHON":
        bench = tmp_path / "py $x"
        bench.mkdir()
        (bench / "hosts").write_text("a slots=1\nb slots=1\n")
    with pytest.raises(
        SystemExit, match=f"{name}: .* would not reach the ranks as it is by LAUNCHER=pdsh, for ' '"
    ):
        started(bench, "pdsh", {"OUTPUT": str(tmp_path)}, [])
