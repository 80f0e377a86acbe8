"""Training with moments and weights as they are kept: the arithmetic, pairs of runs, and a quick run."""

import csv

import pytest
import torch

from benchmarks.common.pairs import paired
from benchmarks.common.training import BETAS, EPS, WEIGHT_DECAY
from benchmarks.state_train import ARMS, MASTERS, PHASES, SHORT_PHASES, State, in_24_bits, nearest, update
from tests.benchmarks.test_harness import run


def steps(start, gradients, lr, **kept):
    state = State(start, *torch.zeros(2, start.numel()))
    for g in gradients:
        update(state, g, lr, beta2=BETAS[1], **kept)
    return state.weights


def test_with_nothing_rounded_it_is_adamw():
    torch.manual_seed(0)
    start, gradients = torch.randn(512), torch.randn(20, 512)
    groups = [{"params": [torch.nn.Parameter(start[:384].clone())]}]
    groups += [{"params": [torch.nn.Parameter(start[384:].clone())], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    for g in gradients:
        for group, part in zip(groups, (g[:384], g[384:]), strict=True):
            group["params"][0].grad = part
        optimizer.step()
    expected = torch.cat([group["params"][0].detach() for group in groups])
    torch.testing.assert_close(steps(start, gradients, 1e-2, coded=384), expected)


def test_updates_below_half_a_step_are_lost_to_nearest_alone():
    """1,000 updates of 1e-4 move BF16 weights just below 1, whose steps are 2^-8, by 26 steps or by none."""
    start, gradients = nearest(torch.full((4096,), 0.99)), torch.ones(1000, 1).expand(-1, 4096)
    moved = {
        name: (start - steps(start, gradients, 1e-4, masters=masters, coded=0)).mean().item()
        for name, masters in MASTERS.items()
    }
    assert moved.pop("nearest") == 0
    # what 24 bits round off each time; momentum holds back nine times what was rounded off last
    off = {"24 bits": 1000 * 2**-17, "nearest, to exp_avg": 11 * 2**-9, "stochastic, to exp_avg": 11 * 2**-9}
    for name, distance in moved.items():
        assert distance == pytest.approx(0.1, abs=off.get(name, 2**-9)), name


def test_24_bits_are_off_by_half_a_step_at_most():
    x = torch.randn(10_000)
    kept = in_24_bits(x)
    assert (kept.view(torch.int32) & 0xFF == 0).all()
    assert 2**-19 < ((kept - x) / x).abs().max() <= 2**-16


def test_learning_rates_warm_up_and_end_where_the_phase_says():
    assert PHASES["quickstart"].lr_of(1) == pytest.approx(2e-3 / 12)
    assert PHASES["quickstart"].lr_of(12) == 2e-3
    for phase in PHASES.values():
        assert phase.lr_of(phase.steps) == pytest.approx(phase.lowest)
    assert PHASES["tail"].lr_of(1) == pytest.approx(2e-4, rel=1e-3)


def test_only_runs_of_the_same_seed_and_phase_are_compared():
    def row(phase, arm, seed, val_loss):
        return {"phase": phase, "arm": arm, "seed": seed, "val_loss": val_loss}

    rows = [row("long", "base", 1, 2.0), row("long", "base", 2, 3.0), row("long", "base", 3, 9.0)]
    rows += [row("long", "other", 1, 2.5), row("long", "other", 2, 3.1), row("tail", "other", 1, 1.0)]
    base, other, alone = paired(rows, ("phase",), ("arm",), ("base",))
    assert (base["seeds"], base["to_baseline"], base["error"]) == (3, 0, 0)
    assert other["val_loss"] == pytest.approx(2.8) and other["to_baseline"] == pytest.approx(0.3)
    # of two, half their distance
    assert other["error"] == pytest.approx(0.2)
    assert alone["seeds"] == 1 and "to_baseline" not in alone


@pytest.mark.long("a benchmark's dry run")
def test_every_phase_has_a_row_for_each_arm(tmp_path):
    path = tmp_path / "state_train.csv"
    result = run("state_train", "--quick", "--output", str(path))
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(path.open()))
    arms = {arm for kind in ARMS.values() for arm in kind}
    found = {(row["phase"], row["moments"], row["masters"]) for row in rows}
    assert found == {(phase, *arm) for phase in SHORT_PHASES for arm in arms}
    # a network that has learned nothing is at log(384)
    assert all(5 < float(row["val_loss"]) < 6 for row in rows)
