"""The FP8 optimizer inside of Megatron's own optimizers, and its states in Megatron's own checkpoints.

One spawn of two processes serves all tests of training and checkpoints.
"""

import re
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.optimizer import distrib_optimizer

from coat_ds.config import CoatConfigError
from megatron_ext import cpu
from megatron_ext.optimizer import parameter_order
from megatron_ext.optimizer.adamw import linked
from tests.megatron_ext.ranks import join
from tests.megatron_ext.trainer import MODES, SHARDINGS, H, Trainer, installed, plain_states
from tests.util import rel_rms, run_distributed

# without Transformer Engine, Megatron's own AdamW cannot load the other format
STOCK = {"distributed": "dp_reshardable", "plain": "fully_reshardable"}
# and at other sizes, and from other formats, a precision-aware optimizer has the distributed one's states
SIZES = {"tp2": {"tensor_model_parallel_size": 2}, "pp2": {"pipeline_model_parallel_size": 2}}
# with these weights frozen, the border of two data-parallel ranks cuts a group of linear_proj's weight;
# otherwise it is between tensors
CUT = "word_embeddings"


MOMENTS = ("exp_avg", "exp_avg_sq")


def _train_in_papers_formats(folder):
    """By mode: losses of a run in the paper's formats that resumes a run in today's formats, and of a run in
    today's formats that resumes the former."""
    results = {}
    for mode in STOCK:
        sharding = SHARDINGS[mode][0]
        with installed(optimizer={"exp_avg_sq_format": "fp8_expanded"}):
            old = Trainer(mode).load(f"{folder}/{mode}-{sharding}", sharding)
            old.save(f"{folder}/{mode}-papers", sharding)
        with installed():
            new = Trainer(mode).load(f"{folder}/{mode}-papers", sharding)
            results[mode] = old.steps(2, 3), new.steps(2, 3)
    return results


def _train_as_if_fused(folder):
    """Step counts and states of a run and of its resumption, where Megatron treats the optimizer as
    FusedAdam."""
    sharding, results = "dp_reshardable", []
    with (
        mock.patch.multiple(megatron_optimizer, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
        installed(),
    ):
        for mode in ("distributed", "plain"):
            first = Trainer(mode)
            first.steps(0, 1)
            first.save(f"{folder}/{mode}-fused", sharding)
            again = Trainer(mode).load(f"{folder}/{mode}-fused", sharding)
            counts = {int(s["step"]) for t in (first, again) for s in t.inner.state.values()}
            results.append((counts, first.steps(2), again.steps(2), first.tensors(), again.tensors()))
    return results


def _kept_by_size():
    """For each tensor with a part on this rank: elements of the part and of the whole, and the formats
    of its first moment. The smallest compressed tensor is as large as linear_proj's weight."""
    with installed(optimizer={"min_numel": H * H, "keep_fp32": []}):
        part = Trainer("distributed", frozen=CUT).optimizer.chained_optimizers[0]
    return [
        (own.numel(), p.numel(), {piece.codec.name for piece in part.optimizer.state[own]["exp_avg"].pieces})
        for _, p, own, _ in linked(part)
    ]


def _train_and_resume(mode, folder):
    """A run, and those that resume it from each layout of its states."""
    first, result = Trainer(mode), {}
    losses = first.steps(0, 1)
    for sharding in SHARDINGS[mode]:
        first.save(f"{folder}/{mode}-{sharding}", sharding)
    result["saved"] = plain_states(f"{folder}/{mode}-fully_reshardable")
    held = first.inner.state.values()
    result["bytes"] = sum(t.nbytes for s in held for n in MOMENTS for t in s[n].stored())
    result["numel"] = sum(s[MOMENTS[0]].numel() for s in held)
    result["step"] = {int(s["step"]) for s in first.inner.state.values()}
    # Megatron does this before it reads a checkpoint; it changes nothing
    first.optimizer.load_state_dict(first.optimizer.state_dict())
    losses += first.steps(2, 3)
    result["losses"], result["end"] = losses, first.tensors()
    for sharding in SHARDINGS[mode]:
        again = Trainer(mode).load(f"{folder}/{mode}-{sharding}", sharding)
        arrived = again.inner.pop_load_summary()
        result["again", sharding] = arrived, again.steps(2, 3), again.tensors()
    return result


def _at_other_sizes(folder, results):
    """Saves the checkpoints of the runs at other sizes, and one whose tensors a border cuts."""
    cut = Trainer("distributed", frozen=CUT)
    cut.steps(0, 1)
    cut.save(f"{folder}/cut", "fully_reshardable")
    for name, sizes in SIZES.items():
        parallel_state.destroy_model_parallel()
        join(**sizes)
        for mode in STOCK:
            other = Trainer(mode).load(f"{folder}/{mode}-fully_reshardable", "fully_reshardable")
            other.save(f"{folder}/{mode}-{name}", "fully_reshardable")
            results[mode][name] = plain_states(f"{folder}/{mode}-{name}")
    # at the last sizes a rank has whole tensors
    whole = Trainer("distributed", frozen=CUT).load(f"{folder}/cut", "fully_reshardable")
    whole.save(f"{folder}/whole", "fully_reshardable")
    parallel_state.destroy_model_parallel()
    join()
    return [plain_states(f"{folder}/cut"), plain_states(f"{folder}/whole")]


def _train(folder):
    join()
    with installed():
        results = {mode: _train_and_resume(mode, folder) for mode in MODES}
        results["cut"] = _at_other_sizes(folder, results)
    results["formats"] = _train_in_papers_formats(folder)
    results["kept by size"] = _kept_by_size()
    results["fused"] = _train_as_if_fused(folder)
    for mode, sharding in STOCK.items():
        with cpu.no_cuda():
            stock = Trainer(mode)
            # without Transformer Engine, Megatron's distributed optimizer loads only into an optimizer that
            # has stepped
            stock.steps(0)
            stock.load(f"{folder}/{mode}-{sharding}", sharding)
            stock.save(f"{folder}/{mode}-in-stock", sharding)
            stock.steps(2)
            stock.save(f"{folder}/{mode}-of-stock", sharding)
            count = {int(s["step"]) for s in stock.inner.state.values()}
            results[mode]["stock"] = type(stock.inner), count, stock.steps(3)
        with installed():
            ours = Trainer(mode).load(f"{folder}/{mode}-of-stock", sharding)
            ours.save(f"{folder}/{mode}-back", sharding)
            count = {int(s["step"]) for s in ours.inner.state.values()}
            results[mode]["ours"] = count, ours.steps(3)
        for name in (sharding, "in-stock", "of-stock", "back"):
            results[mode][name] = plain_states(f"{folder}/{mode}-{name}")
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_distributed(_train, 2, str(tmp_path_factory.mktemp("optimizer")))


@pytest.mark.parametrize("mode", MODES)
def test_optimizer_states_have_8_bits(ranks, mode):
    # two codes, and twice five bytes per group of 128; the last group of a rank's part may be smaller. Norms,
    # 5 of 64 elements among 61,760, keep 8 bytes. The other 16 bits of a master are not counted
    sizes = {rank[mode]["bytes"] / rank[mode]["numel"] for rank in ranks}
    assert all(2 + 10 / 128 <= size < 2.15 for size in sizes), sizes
    assert all(rank[mode]["step"] == {2} for rank in ranks)


@pytest.mark.parametrize("mode, sharding", [(m, s) for m in MODES for s in SHARDINGS[m]])
def test_optimizer_resumes_to_the_bit(ranks, mode, sharding):
    for rank in ranks:
        arrivals, losses, tensors = rank[mode]["again", sharding]
        assert losses == rank[mode]["losses"][2:]
        assert all(torch.equal(a, b) for a, b in zip(tensors, rank[mode]["end"], strict=True))
        # the codes are recovered from FP32 values
        assert "restored to the bit" in arrivals and "encoded" not in arrivals


@pytest.mark.parametrize("mode", STOCK)
def test_optimizer_loads_states_of_other_formats(ranks, mode):
    for rank in ranks:
        for losses in rank["formats"][mode]:
            expected = rank[mode]["losses"][2:]
            # masters are equal, and the first loss does not depend on the moments
            assert losses[0] == expected[0] and losses[1] == pytest.approx(expected[1], rel=1e-2)


def test_optimizer_groups_follow_the_whole_tensor(ranks):
    """Also in a tensor that two ranks share: only the group that their border cuts is re-encoded."""
    saved, found = ranks[0]["cut"]
    assert saved.keys() == found.keys()
    changed = {key: (found[key] != wanted).sum().item() for key, wanted in saved.items()}
    cut = {key for key, count in changed.items() if count}
    assert cut and max(changed.values()) <= 128 and all("exp_avg" in key for key in cut), changed


def test_optimizer_min_numel_counts_the_whole_tensor(ranks):
    """Otherwise the two parts of a shared tensor would have different formats."""
    found = [entry for rank in ranks for entry in rank["kept by size"]]
    assert all(formats == ({"fp32"} if whole < H * H else {"ratio8"}) for _, whole, formats in found)
    assert any(part < whole == H * H for part, whole, _ in found)


def test_precision_aware_optimizer_saves_exact_masters(ranks):
    # the same 32 bits of each parameter, in different tensors
    wanted, found = (ranks[0][mode]["saved"] for mode in ("distributed", "precision_aware"))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_optimizer_resumes_where_megatron_expects_fused_adam(ranks):
    for rank in ranks:
        for counts, losses, losses_again, tensors, tensors_again in rank["fused"]:
            assert counts == {2} and losses == losses_again
            assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_again, strict=True))


# the error is half a step of E4M3, 2^-4 of the value, if a group is stretched by 1 or more: it spans 2^16.6
ENCODED_ONCE = 2**-4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", STOCK)
def test_optimizer_states_at_other_parallel_sizes(ranks, mode, size):
    saved, found = ranks[0][mode]["saved"], ranks[0][mode][size]
    assert saved.keys() == found.keys()
    for key, wanted in saved.items():
        if "param" in key or size == "pp2":
            # pipeline stages hold whole parameters, whose groups and masters stay equal
            assert torch.equal(found[key], wanted), key
        else:
            assert rel_rms(found[key], wanted) < ENCODED_ONCE, key


@pytest.mark.parametrize("mode", STOCK)
def test_optimizer_exchanges_checkpoints_with_stock_adamw(ranks, mode):
    result = ranks[0][mode]
    cls, count, losses = result["stock"]
    assert cls is torch.optim.AdamW
    ours, stock = result[STOCK[mode]], result["in-stock"]
    assert ours.keys() == stock.keys()
    assert all(torch.equal(stock[key], ours[key]) for key in ours)

    for key, wanted in result["of-stock"].items():
        if "exp_avg" in key:
            assert rel_rms(result["back"][key], wanted) < ENCODED_ONCE, key
        else:
            assert torch.equal(result["back"][key], wanted), key
    # Megatron's own AdamW counts wrong after it has loaded a distributed state
    assert mode == "distributed" or count == {3}
    # the weights are equal, and the first loss does not depend on the moments
    assert result["ours"] == (count, losses)


@pytest.mark.parametrize("mode", MODES)
def test_optimizer_resumes_before_the_first_step(megatron, tmp_path, mode):
    """This happens if FP16's loss scale is still too large: Megatron leaves a count of 0 out of its
    checkpoints."""
    with installed():
        first = Trainer(mode)
        first.save(str(tmp_path / "saved"), SHARDINGS[mode][0])
        again = Trainer(mode).load(str(tmp_path / "saved"), SHARDINGS[mode][0])
        assert {int(state["step"]) for state in again.inner.state.values()} == {0}
        assert first.steps(0, 1) == again.steps(0, 1)


def test_precision_aware_optimizer_takes_fp32_parameters(megatron):
    with installed():
        trainers = [Trainer(mode, bf16=False) for mode in ("distributed", "precision_aware")]
        wanted, found = ((t.steps(0, 1), t.tensors()) for t in trainers)
    assert found[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


def test_parameter_order_with_other_frozen_parameters_is_refused(megatron, tmp_path):
    """Two layers have equal shapes, by which `dp_reshardable` identifies parameters."""
    with installed():
        first = Trainer("distributed", frozen="layers.0")
        first.steps(0)
        first.save(str(tmp_path / "saved"), "dp_reshardable")
        again = Trainer("distributed", frozen="layers.0").load(str(tmp_path / "saved"), "dp_reshardable")
        assert first.steps(1, 2) == again.steps(1, 2)
        other = Trainer("distributed", frozen="layers.1")
        with pytest.raises(CoatConfigError, match=r"layers\.0\.\S+ is trained, and was frozen"):
            other.load(str(tmp_path / "saved"), "dp_reshardable")


def test_parameter_order_of_another_length_is_refused(megatron):
    """Megatron pads its buffers, so their sizes may be equal."""
    with installed():
        (optimizer,) = Trainer("distributed").optimizer.chained_optimizers
        *others, last = own = parameter_order._shapes(optimizer)
        for saved, number, here, there in (
            (others, len(others), last, "none"),
            ([*own, [3]], len(own), "none", [3]),
        ):
            state = {
                "param_state_sharding_type": parameter_order.SHARDING,
                "optimizer": {parameter_order.SHAPES: saved},
            }
            said = re.escape(f"expected parameter {number} of a rank to be {here}, found {there},")
            with pytest.raises(CoatConfigError, match=said):
                optimizer.load_state_dict(state)
