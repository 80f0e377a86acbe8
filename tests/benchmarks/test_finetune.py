"""Pretrained weights compute the same on both paths, the task can measure a difference, and the dry run
trains both."""

import argparse

import pytest
import torch

from benchmarks import finetune as benchmark
from benchmarks.finetune import pretrained
from benchmarks.finetune.table import parse
from coat_ds import CoatConfig
from coat_launch.batches import Batch
from tests.benchmarks.dry import rows_of, run_here

ENDINGS = ("river", "mountain", "village", "garden", "harbour")
PROSE = "".join(
    f"The {color} house of the old man stood for many years beside the {end}. "
    for color in ("white", "brown")
    for end in ENDINGS
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for i in range(100):
        (root / f"{i:03}.md").write_text(
            f"Chapter {i}\n\n{PROSE.replace('old', f'old number {chr(97 + i % 26)}')}\n"
        )
    return root


@pytest.fixture(scope="module")
def tiny():
    return pretrained.tiny()


def batch_of(tiny, rows=2, tokens=48):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(tiny.config.vocab_size, (rows, tokens + 1), generator=generator)
    positions = torch.arange(tokens).expand(rows, -1)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return Batch(tokens, labels, torch.ones_like(positions), positions)


def megatron_of(weights):
    setup = argparse.Namespace(recipe=benchmark.QUICK)
    text = argparse.Namespace(vocab_size=weights.config.vocab_size)
    off = CoatConfig.from_dict({"enabled": False})
    return pretrained.build(weights, setup, parse("megatron-bf16"), off, text)


def test_both_paths_compute_the_same(megatron, tiny):
    batch = batch_of(tiny)
    theirs, ours = pretrained.hugging_face(tiny), megatron_of(tiny)
    with torch.no_grad():
        expected = theirs.float()(batch.tokens, None, None, labels=batch.labels)
        found = ours.float()(batch.tokens, batch.position_ids, None, labels=batch.labels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # transformers' own loss is the mean of these losses
    labels = {"labels": batch.labels, "shift_labels": batch.labels}
    assert theirs.model(input_ids=batch.tokens, **labels).loss.item() == pytest.approx(expected.mean().item())


@torch.no_grad()
def test_an_upcycled_model_computes_what_the_dense_one_does(tiny):
    """Noise in three matrices of an expert: below twice sqrt(3) NOISE of what the feed-forwards add."""
    mixture = pretrained.hugging_face(pretrained.upcycled(tiny, 4)).float().model
    dense = pretrained.hugging_face(tiny).float().model
    tokens = batch_of(tiny).tokens

    def hidden(model) -> torch.Tensor:
        return model.model(input_ids=tokens).last_hidden_state

    found, expected = hidden(mixture), hidden(dense)
    for layer in dense.model.layers:
        layer.mlp.down_proj.weight.zero_()
    added = (expected - hidden(dense)).norm()
    assert 0 < (found - expected).norm() < 2 * 3**0.5 * pretrained.NOISE * added
    used = {index for layer in mixture.model.layers for index in layer.mlp.gate(found)[2].unique().tolist()}
    assert used == {0, 1, 2, 3}


def dry_run(text, folder, names, *options) -> dict[str, dict[str, str]]:
    """Rows by path and system."""
    how = ["--quick", "--text", str(text), "--work", str(folder / "work"), "--gpus", "2", *options]
    found = rows_of(folder / "finetune.csv", "finetune", *how, "--runs", *names)
    rows = {f"{r['path']}-{r['system']}": r for r in found}
    assert list(rows) == names
    for row in rows.values():
        assert float(row["val_loss"]) < float(row["val_loss_start"]) - 0.01
        assert 0 <= float(row["cloze"]) <= 1 and int(row["questions"]) > 0
        # of the layers used in training, and of the other ones
        same, other = ("bf16", "fp8") if row["system"] == "bf16" else ("fp8", "bf16")
        for end in ("", "_start"):
            own, alike, apart = (float(row[f"val_loss{name}{end}"]) for name in ("", f"_{same}", f"_{other}"))
            assert alike == own and 0 < abs(apart - own) < 0.01
        assert row["weights"] == rows["hf-bf16"]["weights"]
    return rows


@pytest.mark.long("a benchmark's dry run")
def test_the_dry_run(text, tmp_path):
    rows = dry_run(text, tmp_path, ["hf-bf16", "hf-coat", "megatron-bf16", "megatron-coat"])
    learned = float(rows["hf-bf16"]["val_loss_start"]) - float(rows["hf-bf16"]["val_loss"])
    starts = [float(row["val_loss_start"]) for row in rows.values()]
    assert max(starts) - min(starts) < 2**-4 * learned
    for path in ("hf", "megatron"):
        bf16, coat = rows[f"{path}-bf16"], rows[f"{path}-coat"]
        assert 0 < abs(float(coat["over_bf16_same_seed"])) < 2**-4 * learned
        assert float(coat["saved_bytes_per_token_layer"]) < 0.4 * float(bf16["saved_bytes_per_token_layer"])
        assert float(coat["state_bytes_per_param"]) < 3 < float(bf16["state_bytes_per_param"])
    assert (tmp_path / "finetune.png").stat().st_size > 0


def test_an_upcycled_model_has_two_experts_or_more_and_no_path_by_megatron(text, tmp_path):
    for experts, name in (("1", "hf-bf16"), ("4", "megatron-bf16")):
        result = run_here(
            "finetune", "--quick", "--upcycle", experts, "--work", str(tmp_path), "--runs", name
        )
        assert result.returncode == 1 and "--upcycle" in result.stderr
