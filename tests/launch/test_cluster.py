"""The scripts across two "hosts": network namespaces of this machine joined by a cable that can be pulled."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.ranks import HIDDEN, measured, run_ranks
from tests.util import free_port

pytestmark = pytest.mark.long("hosts of real network namespaces and Slurm")

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.99.7.1", "10.99.7.2")
NAMES = ("coat0", "coat1")
# both ends of the cable are named like interfaces of real machines
INTERFACE = "eth0"
EXTRA = ["--global-batch-size=8", "--micro-batch-size=4", "--eval-batches=1", "--distributed-timeout=10"]
EXTRA += ["--seq-length=32", "--steps=6", "--save-interval=1"]


def ip(*arguments, check=True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts():
    """Command prefixes that run a command on the first and on the second host."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2 for network namespaces")
    if ip("netns", "add", NAMES[0], check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    try:
        ip("netns", "add", NAMES[1])
        ends = [[INTERFACE, "netns", name] for name in NAMES]
        ip("link", "add", "name", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in NAMES]
    finally:
        for name in NAMES:
            ip("netns", "del", name, check=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"line {n} of {n * n}\n" for n in range(3000)))
    return path


@pytest.fixture(scope="module")
def one_host(tmp_path_factory, corpus):
    """The measurements of two ranks without scripts and networks."""
    folder = tmp_path_factory.mktemp("one")
    ended = run_ranks([*EXTRA, "--data", corpus, "--output", folder / "run"], folder, ranks=2)
    assert ended.codes == [0, 0], ended.text
    return measured(folder)


def variables(folder: Path, **more) -> dict:
    own = {**HIDDEN, "PYTHON": sys.executable, "GPUS_PER_NODE": "1", "OUTPUT": str(folder / "run")}
    return {**os.environ, **own, "INTERFACE": INTERFACE, **more}


@contextlib.contextmanager
def running(hosts, script, folder, corpus):
    """Runs the script on both hosts; their output goes to files in the folder."""
    processes = []
    try:
        for rank, inside in enumerate(hosts):
            env = variables(folder, NODES="2", NODE_RANK=str(rank), MASTER_ADDR=ADDRESSES[0])
            with (folder / f"host{rank}.log").open("a") as log:
                processes.append(
                    subprocess.Popen(
                        [*inside, "bash", str(ROOT / "launch" / script), *EXTRA, f"--data={corpus}"],
                        env=env,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def printed(folder) -> str:
    return "".join((folder / f"host{rank}.log").read_text() for rank in (0, 1))


def test_torchrun_across_hosts_and_a_lost_one(tmp_path, hosts, corpus, one_host):
    """The cable is pulled after two steps: both sides end. After a restart they continue as if without the
    failure."""
    with running(hosts, "torchrun_multinode.sh", tmp_path, corpus) as processes:
        step2 = tmp_path / "run/coat/checkpoints/step2"
        eventually(lambda: step2.exists() or processes[0].poll() is not None, lambda: printed(tmp_path))
        ip("-n", NAMES[0], "link", "set", INTERFACE, "down")
        try:
            # ranks give up after --distributed-timeout, and so does the agent that has the store; the other
            # agent waits for the store until a scheduler ends it
            assert processes[0].wait(120) == 1, printed(tmp_path)
            eventually(lambda: "[rank1]: RuntimeError" in printed(tmp_path), lambda: printed(tmp_path), 60)
        finally:
            ip("-n", NAMES[0], "link", "set", INTERFACE, "up")
    assert max(measured(tmp_path)) < 6
    with running(hosts, "torchrun_multinode.sh", tmp_path, corpus) as processes:
        assert [process.wait(240) for process in processes] == [0, 0], printed(tmp_path)
    assert "going on from" in printed(tmp_path)
    assert measured(tmp_path) == one_host


def eventually(happens, what, seconds=200):
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm from the packages of the distribution, with two nodes that are both this machine."""
    wanted = ("munged", "slurmctld", "slurmd", "sbatch")
    if os.geteuid() or not all(map(shutil.which, wanted)):
        pytest.skip("needs root and Slurm: apt-get install slurmctld slurmd slurm-client munge")
    name = socket.gethostname().split(".")[0]
    # the first, MASTER_ADDR, can be resolved, as node names can
    nodes = (name, f"{name}2")
    config, wire = tmp_path / "slurm.conf", tmp_path / "munge.socket"
    options = {
        "ClusterName": "test",
        "SlurmctldHost": f"{name}(127.0.0.1)",
        "AuthInfo": f"socket={wire}",
        "SlurmUser": "root",
        "SlurmctldPort": free_port(),
        "StateSaveLocation": tmp_path / "state",
        "SlurmdSpoolDir": tmp_path / "spool-%n",
        "SlurmctldPidFile": tmp_path / "slurmctld.pid",
        "SlurmdPidFile": tmp_path / "slurmd-%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MailProg": "/bin/true",
        "PartitionName": "main Nodes=ALL Default=YES State=UP",
    }
    lines = [f"{key}={value}" for key, value in options.items()]
    place = f"NodeHostname={name} NodeAddr=127.0.0.1 CPUs={os.cpu_count()}"
    lines += [f"NodeName={node} {place} Port={free_port()}" for node in nodes]
    config.write_text("\n".join(lines) + "\n")
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    (tmp_path / "munge.key").chmod(0o400)
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("SLURM_CONF", str(config))
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    munged = ["munged", "--foreground", "--force", *(f"--{o}={tmp_path}/munge.{f}" for o, f in files.items())]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons = [subprocess.Popen(munged, **quiet)]
    try:
        eventually(wire.exists, lambda: (tmp_path / "munge.log").read_text(), 10)
        slurmds = [["slurmd", "-N", node, "-D"] for node in nodes]
        daemons += [subprocess.Popen(daemon, **quiet) for daemon in (["slurmctld", "-D"], *slurmds)]
        eventually(lambda: output("sinfo", "-Nh").count("idle") == 2, lambda: output("sinfo"), 30)
        yield
        output("scancel", "--me")
        eventually(lambda: not output("squeue", "-h"), lambda: output("squeue"), 60)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def test_slurm_stops_by_a_checkpoint_and_puts_the_job_back(tmp_path, slurm, corpus):
    log = tmp_path / "job.log"
    env = variables(tmp_path, GPUS_PER_NODE="2", INTERFACE="lo")
    sizes = ["--nodes=1", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={log}"]
    script = [str(ROOT / "launch/slurm.sbatch"), *EXTRA, "--steps=100000", f"--data={corpus}"]
    done = subprocess.run(
        ["sbatch", "--parsable", *sizes, *script], env=env, cwd=ROOT, stdout=subprocess.PIPE
    )
    job = done.stdout.decode().strip()
    checkpoints = tmp_path / "run/coat/checkpoints"
    eventually((checkpoints / "step2").exists, log.read_text)
    # what `--signal=B:USR1@300` does five minutes before the end
    output("scancel", "--batch", "--signal=USR1", job)
    eventually(lambda: "Reason=BeginTime" in output("scontrol", "show", "job", job), log.read_text)
    # the step from which the job continues when Slurm starts it again
    stopped = re.search(r"stopped by a signal after (step) (\d+)", log.read_text())
    assert "".join(stopped.groups()) == (checkpoints / "latest").read_text()
