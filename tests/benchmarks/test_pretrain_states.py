"""The quickstart with each storage of states: what it hands to the launcher, and a quick run."""

import csv

import pytest

from benchmarks.pretrain_states import ARMS, BASELINE
from coat_ds.config import CoatConfig
from tests.benchmarks.test_harness import run


def test_each_arm_says_what_is_kept_and_nothing_else():
    configs = {arm: arm.config() for arm in ARMS}
    for arm, config in configs.items():
        block = CoatConfig.from_dict(config.pop("coat"))
        assert (block.optimizer.exp_avg_format, block.optimizer.exp_avg_sq_format) == arm[:2]
        assert not block.activations.enabled
        assert config.pop("bf16").get("bf16_master_weights_and_grads", False) == (arm.masters != "fp32")
        assert arm.masters in ("fp32", block.optimizer.bf16_params)
    assert all(config == configs[BASELINE] for config in configs.values())


@pytest.mark.long("a benchmark's dry run")
def test_every_arm_is_trained(tmp_path):
    path = tmp_path / "pretrain_states.csv"
    result = run("pretrain_states", "--quick", "--output", str(path))
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(path.open()))
    assert [tuple(row[k] for k in BASELINE._fields) for row in rows] == list(map(tuple, ARMS))
    assert all(4 < float(row["val_loss"]) < 7 for row in rows)
