"""`"offload": "cpu"` in DeepSpeed's engines on two ranks: the bits of resident states, and checkpoints."""

import warnings

import pytest
import torch

from coat_ds.optim import host_states
from tests.coat_ds.cells import MASTER16, STEPS, Wide, cell, ds_config, train_step
from tests.hosts import TEST_ALL
from tests.util import run_distributed

CELLS = {
    "1": cell(1, accumulation=2),
    "2": cell(2),
    "2, BF16 masters": cell(2, model=Wide, clip=0.0, section=MASTER16),
    "3": cell(3, zero={"sub_group_size": 5000}),
    "3, some stay": cell(3, zero={"sub_group_size": 5000}) | {"offload": 2e-5},
}


if not TEST_ALL:
    # these stages have another cell each
    del CELLS["2"], CELLS["3"]


def start(cell, offload):
    import deepspeed

    torch.manual_seed(0)
    config = ds_config(cell)
    config["coat"]["optimizer"]["offload"] = offload
    engine, *_ = deepspeed.initialize(model=cell["model"](), config=config)
    return engine


def moments(engine, streamed=False):
    optimizer = engine.basic_optimizer
    states = [s for p, s in optimizer.state.items() if not streamed or optimizer.is_offloaded(p)]
    return [t for s in states for name in ("exp_avg", "exp_avg_sq") for t in s[name].unpaired().stored()]


def stored(engine):
    states = engine.basic_optimizer.state.values()
    return [t.clone() for t in (*moments(engine), *(s["remainder"] for s in states if "remainder" in s))]


def full(engine):
    from deepspeed.utils import safe_get_full_optimizer_state

    return [
        safe_get_full_optimizer_state(p, name).cpu()
        for p in engine.module.parameters()
        if p.requires_grad
        for name in ("exp_avg", "exp_avg_sq")
    ]


def same(xs, ys):
    return len(xs) == len(ys) > 0 and all(map(torch.equal, xs, ys))


def run(cell, folder):
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

    where = cell.get("offload", "cpu")
    resident, host = start(cell, "none"), start(cell, where)
    losses = [[train_step(engine) for _ in range(STEPS)] for engine in (resident, host)]
    found = {"losses": losses[0] == losses[1], "states": same(stored(resident), stored(host))}
    found["full"] = same(full(resident), full(host))
    found["one allocation"] = len(host.basic_optimizer._host._pages) == 1
    host.save_checkpoint(folder)
    before = [t.data_ptr() for t in moments(host, streamed=True)]
    host.offload_states(include=[Kind.optim_states], pin_memory=False)
    host.reload_states()
    found["stay"] = before == [t.data_ptr() for t in moments(host, streamed=True)] != []
    found["all stream"] = (len(before) == len(moments(host))) == (where == "cpu")
    after = [train_step(host) for _ in range(2)]
    for offload in ("none", where):
        resumed = start(cell, offload)
        resumed.load_checkpoint(folder)
        again = [train_step(resumed) for _ in range(2)]
        found[f"resumed, {offload}"] = again == after and same(stored(resumed), stored(host))
        if offload == where:
            found["one allocation after a load"] = len(resumed.basic_optimizer._host._pages) == 1
    return found


def work(backend, folder):
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed(backend)
    host_states.CHUNK = 13 * 256
    return {name: run(cell, f"{folder}/{name}") for name, cell in CELLS.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_distributed(work, 2, "gloo", str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("name", CELLS)
def test_host_states_of_engines_step_as_resident_ones(found, name):
    for rank in found:
        assert rank[name] == dict.fromkeys(rank[name], True)
