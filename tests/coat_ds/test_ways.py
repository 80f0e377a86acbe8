"""The ways in which people train: Hugging Face's Trainer, Accelerate, TRL, PEFT, DeepSpeed itself, for real.

What is COAT's stands in the JSON, or, without DeepSpeed, in two lines.
"""

import math
import warnings

import pytest

import coat_ds
from tests.coat_ds.ways import BLOCK, STAGES, STEPS, by_stages, cached, trainer, work
from tests.hosts import TEST_ALL
from tests.util import listening, run_distributed

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_distributed(work, 2, str(tmp_path_factory.mktemp("ways")))


HOSTED = ["Trainer", "Trainer with sections", "Accelerate", *(["SFT"] if TEST_ALL else [])]
WHOLE = "14 of 15 linear layers in FP8 (e4m3, gradients in e5m2)"


@pytest.mark.parametrize("name", HOSTED)
def test_trainer_needs_the_json_alone(two, name):
    for number, rank in enumerate(two):
        found = rank[name]
        assert WHOLE in found["coat"] and "2 feed-forwards in 8 bits (sqrt8)" in found["coat"]
        assert "(lm_head): the output head" in found["coat"] and "in log8" in found["coat"]
        assert len(found["losses"]) == STEPS and found["losses"][-1] < found["losses"][0] - 0.05
        # on rank 0 one line, and the table of states
        said = [line for line in found["lines"] if "linear layers in FP8" in line]
        assert len(said) == (number == 0) and all(line.endswith(found["coat"]) for line in said)
        assert len(found["lines"]) == 2 * (number == 0), found["lines"]


def test_trainer_losses_are_stock(two):
    """Layers in FP8 change a loss by less than a hundredth, and a block without them is what it was."""
    for rank in two:
        states, layers = rank["states alone"], rank["Trainer"]
        assert layers["losses"] == pytest.approx(states["losses"], rel=1e-2)
        assert layers["losses"] != states["losses"]
        assert "linear layers" not in states["coat"] and states["left"] is None


def test_trainer_with_lora(two):
    """Frozen weights have no states, and multiply in FP8; adapters are trained as they are."""
    for rank in two:
        found = rank["LoRA"]
        assert 0 <= found["states"]["parameters"] - found["trains"] // 2 <= 8
        assert "14 of 43 linear layers in FP8" in found["coat"]
        assert sum("lora_" in name for name in found["left"]) == 28
        assert found["losses"][-1] < found["losses"][0]


def test_trainer_with_reference_models(two):
    """In FP8 too: the policy is the reference until its first step, to the bit."""
    for rank in two:
        found = rank["DPO"]
        assert found["losses"][0] == pytest.approx(math.log(2), abs=1e-6)
        assert found["losses"][-1] < 0.6
        assert WHOLE in found["coat"] and WHOLE in found["reference"]
        # frozen layers of a model without any trained layer, too
        assert found["reference"].endswith("ZeRO-3 gathers 2 of 2 layers whole")


def test_trainer_without_deepspeed(two):
    for rank in two:
        found = rank["without DeepSpeed"]
        assert found["used"] and found["keys"] and {"ratio8", "log8", "fp32"} == set(found["bytes"])
        assert found["summary"].startswith("14 of 15 linear layers in FP8")
        assert found["losses"] == pytest.approx(rank["Trainer"]["losses"], rel=2e-2)


def test_trainer_reads_the_compressed_layout(two):
    """It reads data only."""
    for rank in two:
        whole, again = rank["resumed without DeepSpeed"]
        assert again == whole


def test_accelerate_trains_without_deepspeed(two):
    for rank in two:
        before, after, again = rank["Accelerate alone"]["losses"]
        assert again == after and sum(after) < sum(before)
        assert {"ratio8", "log8", "fp32"} == set(rank["Accelerate alone"]["bytes"])


def work_gpu(folder):
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed("nccl")
    coat_ds.install()
    with listening() as lines:
        out = {"stages": by_stages(lines), "cached": [cached(folder, stage3_param_persistence_threshold=100)]}
        lines.clear()
        return out | {"Trainer": trainer(f"{folder}/trainer", BLOCK, 2), "lines": list(lines)}


@pytest.mark.gpu
def test_trainer_on_a_gpu(tmp_path):
    ranks = run_distributed(work_gpu, 1, str(tmp_path), gpus=True)
    for converted in (True, False):
        check_stages(ranks, converted)
    check_codes(ranks)
    found = ranks[0]["Trainer"]
    assert WHOLE in found["coat"] and found["losses"][-1] < found["losses"][0] - 0.05
    layers, states = (ranks[0]["stages"][1, converted][0] for converted in (True, False))
    assert layers == pytest.approx(states, rel=1e-2) and layers != states


def test_zero_stages_agree(two):
    check_stages(two, True)


def check_stages(ranks, converted):
    for rank in ranks:
        base = rank["stages"][1, converted][0]
        for stage in set(STAGES) - {1} if converted else (3,):
            losses, said, was, is_ = rank["stages"][stage, converted]
            # stage 0 clips and rounds in another order
            assert losses == pytest.approx(base, rel=2e-2 if stage == 0 else 1e-3)
            assert ("14 of 15 linear layers in FP8" in said) == converted == was
            assert not is_
            assert ("ZeRO-3 gathers 2 of 2 layers whole" in said) == (stage == 3 and converted)


def test_zero3_weights_partitioned_from_the_start(two):
    for number, rank in enumerate(two):
        found = rank["zero.Init"]
        assert WHOLE in found["coat"] and "ZeRO-3 gathers 2 of 2 layers whole" in found["coat"]
        assert found["losses"][-1] < found["losses"][0] - 0.05
        # of all ranks' parts; no rank holds all
        assert len(found["tables"]) == (number == 0)
        assert all("[64, 64] model.layers.*.self_attn.q_proj.weight" in table for table in found["tables"])


def test_zero3_has_no_stale_codes_of_weights(two):
    check_codes(two)


def check_codes(ranks):
    for rank in ranks:
        for plain, with_codes in rank["cached"]:
            assert plain == with_codes
            assert plain[4:7] == plain[7:]


MEETINGS = {
    "the script's, equal": ["14 of 15 linear layers in FP8", "gradients in e4m3"],
    "the script's, other": ["error: coat.activations.backward_format: found 'e5m2'", "convert with 'e4m3'"],
    "the script's, off": ["error: coat.activations.enabled: found False", "coat_ds.convert with True"],
    "FP16": ["0 of 15 linear layers in FP8", "15 not converted", "fp16.enabled is true"],
    "loaded in FP16": ["14 of 15 linear layers in FP8"],
    "loaded in FP16, DeepSpeed's old key": ["14 of 15 linear layers in FP8"],
}


@pytest.mark.parametrize("name", MEETINGS)
def test_engine_beside_layers_that_the_script_converted(two, name):
    for rank in two:
        found = rank["meetings"][name]
        assert all(word in found for word in MEETINGS[name]), found
