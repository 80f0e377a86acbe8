"""Checkpoints through 1, 2, 4 and again 1 processes, and what each number of them stores.

One spawn of each size serves all tests.
"""

import os
import warnings
import weakref
import zipfile

import deepspeed
import pytest
import torch

from coat_ds.optim.moment import Moment
from coat_ds.zero.partitions import partitions
from tests.coat_ds.cells import FP8_BOUND, OFFLOAD, TOLERANCE, Wide, cell, decay_groups, ds_config, train_step
from tests.coat_ds.checkpointed import NEW, OLD, Given, full_states, start, to_universal
from tests.coat_ds.faithful import assert_faithful, assert_ratio_faithful
from tests.util import run_distributed

SIZES = (1, 2, 4, 1)
G = 128
RUNS = {
    "stage1": cell(1, "fp32", groups=decay_groups, zero=OFFLOAD),
    "stage3": cell(3, "fp32"),
    "compressed3": cell(3, "fp32"),
}
# where formats change: the phase, the stage and the layout
CONVERTED = [(0, 1, "stock"), (1, 3, "compressed")]


class Watch:
    """Bytes of decoded moments that are alive at once, at most, while it is entered."""

    def __enter__(self):
        self.decode, self.now, self.peak = Moment.decode, 0, 0

        def died(size):
            self.now -= size

        def decode(moment, *where):
            x = self.decode(moment, *where)
            size = x.untyped_storage().nbytes()
            weakref.finalize(x.untyped_storage(), died, size)
            self.now += size
            self.peak = max(self.peak, self.now)
            return x

        Moment.decode = decode
        return self

    def __exit__(self, *_):
        Moment.decode = self.decode


def watch_saving(folder):
    """Peaks while an engine saves and while its state dict is saved by itself; bytes of moments."""
    engine = start(cell(3, "fp32", zero={"sub_group_size": 5000}))
    train_step(engine)
    with Watch() as saving:
        engine.save_checkpoint(folder, tag="watched")
    with Watch() as at_once:
        torch.save(engine.optimizer.state_dict(), f"{folder}/rank{torch.distributed.get_rank()}.pt")
    flats = [flat.numel() for flat in engine.basic_optimizer.state]
    return saving.peak, at_once.peak, 4 * max(flats), 8 * sum(flats)


def conversions(folder, stage, layout):
    """States and next losses of a run in the paper's formats, of one in today's that goes on from it, of one
    in the paper's that goes on from that, and of the first one's resumption."""
    out = []
    for i, second in enumerate((OLD, NEW, OLD, OLD)):
        engine = start(cell(stage, "fp32"), layout=layout, second=second)
        if i == 0:
            for _ in range(3):
                train_step(engine)
        else:
            engine.load_checkpoint(folder, tag=f"formats{stage}-{layout}-{i - 1 if i < 3 else 0}")
        engine.save_checkpoint(folder, tag=f"formats{stage}-{layout}-{i}")
        out.append((full_states(engine), [train_step(engine) for _ in range(2)]))
    return out


def host_functions(folder, stage):
    """zero_to_fp32, and the safe_get and safe_set functions with what was set and what was then there."""
    from deepspeed import utils
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # ZeRO-3 cannot set a tensor if one rank would hold less of it than the others
    engine = start(cell(stage, "fp32", model=Wide))
    train_step(engine)
    engine.save_checkpoint(folder, tag=f"host{stage}")
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    merged = get_fp32_state_dict_from_zero_checkpoint(folder, tag=f"host{stage}")
    masters = all(
        torch.equal(merged[name], p) for name, (p, *_) in zip(names, full_states(engine), strict=True)
    )
    p = engine.module[2].weight
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(getattr(p, "ds_shape", p.shape), generator=generator)
    utils.safe_set_full_optimizer_state(p, wanted, "exp_avg")
    pairs = [(utils.safe_get_full_optimizer_state(p, "exp_avg").clone(), wanted)]
    if stage == 3:
        local = torch.rand(p.partition_numel(), generator=generator)
        utils.safe_set_local_optimizer_state(p, local, "exp_avg_sq")
        pairs.append((utils.safe_get_local_optimizer_state(p, "exp_avg_sq").clone(), local))
    return masters, pairs


def groups_of(engine):
    """Codes and metadata of each group by (tensor, moment, first and last element)."""
    order = {id(p): i for i, p in enumerate(engine.module.parameters())}
    out = {}
    optimizer = engine.basic_optimizer
    for _, flat, placed in partitions(engine.optimizer, len(optimizer.param_groups)):
        for p, begin, numel, offset in placed:
            total = getattr(p, "ds_numel", p.numel())
            for name in ("exp_avg", "exp_avg_sq"):
                for piece in optimizer.state[flat][name].pieces:
                    for g, scale in enumerate(piece.storage.scale):
                        low = piece.begin + g * G
                        high = min(low + G, piece.end, begin + numel)
                        if begin <= low < begin + numel:
                            first, last = low - begin + offset, min(high - begin + offset, total)
                            codes = piece.storage.codes[g * G : g * G + last - first]
                            exponent = piece.storage.exponent[g : g + 1]
                            stored = (codes.tolist(), scale.item(), exponent.tolist())
                            if first < last:
                                out[order[id(p)], name, first, last] = stored
    return out


def groups_stored(stage):
    """`groups_of` an engine after the same steps."""
    engine = start(cell(stage, "fp32", model=Given, clip=0.0))
    for step in range(2):
        engine.backward(engine(step))
        engine.step()
    return groups_of(engine)


def chain(folder, index):
    """Loads what the phase before has saved, saves it, and goes on from there."""
    out = {}
    for name, run in RUNS.items():
        layout = "compressed" if name.startswith("compressed") else "stock"
        engine = start(run, universal=index > 0, layout=layout, second=NEW)
        where = f"{folder}/{name}"
        if index:
            # into an engine that has stepped, and has gathered what ZeRO-3 keeps
            train_step(engine)
            engine.load_checkpoint(where, tag=f"{index - 1}_universal")
        else:
            for _ in range(3):
                train_step(engine)
        states, groups = full_states(engine), groups_of(engine)
        engine.save_checkpoint(where, tag=str(index))
        if index < 3:
            to_universal(where, str(index))
        files = [e.path for e in os.scandir(f"{where}/{index}") if "optim" in e.name]
        # bytes of tensors; the compressed layout has more names and padding
        size = sum(
            i.file_size for f in files for i in zipfile.ZipFile(f).infolist() if "/data/" in i.filename
        )
        out[name] = {
            "states": states,
            "groups": groups,
            "file": size,
            "steps": engine.global_steps,
            "losses": [train_step(engine) for _ in range(2)],
        }
    if index == 1:
        engine = start({**RUNS["stage1"], "stage": 2}, universal=True, second=NEW)
        engine.load_checkpoint(f"{folder}/stage1", tag="0_universal")
        out["stage1 in stage2"] = {"states": full_states(engine)}
    return out


def is_faithful(stored, exact):
    try:
        assert_faithful(stored, exact)
    except AssertionError:
        return False
    return True


def is_faithful_in_parts(stored, exact):
    """As one group, or as the two that a border between ranks makes of it."""
    return is_faithful(stored, exact) or any(
        is_faithful(stored[:i], exact[:i]) and is_faithful(stored[i:], exact[i:])
        for i in range(1, len(exact))
    )


def assert_groups_faithful(stored, exact, cuts):
    """Each group was rounded once. Of at most `cuts` groups each part was."""
    pairs = list(zip(stored.reshape(-1).split(G), exact.reshape(-1).split(G), strict=True))
    cut = [(a, b) for a, b in pairs if not is_faithful(a, b)]
    assert len(cut) <= cuts and all(is_faithful_in_parts(a, b) for a, b in cut)


def rounded_again(loaded, saved, second):
    """How many groups of a loaded moment are not the saved ones to the bit; each of them is faithful.

    second: what was loaded with it, if it is a first moment that is relative to that.
    """
    pairs = zip(*(x.reshape(-1).split(G) for x in (loaded, saved, second)), strict=True)
    others = [(a, b, v) for a, b, v in pairs if not torch.equal(a, b)]
    for a, b, v in others:
        if second is loaded:
            assert is_faithful_in_parts(a, b)
        else:
            assert_ratio_faithful(a, b, v)
    return len(others)


def work(folder, index):
    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo")
    out = {"chain": chain(folder, index)}
    if index < 2:
        out["watch"] = watch_saving(folder)
        for stage in (1, 3):
            out["host", stage] = host_functions(folder, stage)
    for phase, stage, layout in CONVERTED:
        if phase == index:
            out["formats", stage, layout] = conversions(folder, stage, layout)
    if index < 3:
        out["groups"] = {stage: groups_stored(stage) for stage in (0, 1, 2, 3)}
    return out


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return [run_distributed(work, size, folder, index) for index, size in enumerate(SIZES)]


every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
every_run = pytest.mark.parametrize("name", RUNS)


@every_stage
def test_groups_follow_parameters_at_any_number_of_ranks(phases, stage):
    """The same codes and metadata in every group that no border between ranks cuts, at 1, 2 and 4 ranks."""
    (whole,) = (rank["groups"][stage] for rank in phases[0])
    if stage == 0:
        assert all(rank["groups"][0] == whole for phase in phases[:3] for rank in phase)
        return
    for phase in phases[1:3]:
        found = {key: stored for rank in phase for key, stored in rank["groups"][stage].items()}
        uncut = found.keys() & whole.keys()
        assert all(found[key] == whole[key] for key in uncut)
        # of stage 3's tensors every one is cut, of the others' the flat one of them all; and both moments
        borders = (len(phase) - 1) * 2 * (5 if stage == 3 else 1)
        parts = sorted(found.keys() - uncut)
        assert 0 < len(parts) <= 2 * borders and len(whole) - len(uncut) == len(parts) / 2
        # the parts of a group are neighbours that meet at the border
        for (*a, low, middle), (*b, again, high) in zip(parts[::2], parts[1::2], strict=True):
            assert a == b and middle == again and (*a, low, high) in whole


@every_run
def test_universal_checkpoints_keep_codes_at_any_number_of_ranks(phases, name):
    """The codes and metadata that were saved, in every group that borders between ranks cut neither then nor
    now; the others were rounded once more.
    """
    for before, after in zip(phases[:3], phases[1:], strict=True):
        # a border cuts a group of both moments: of each of stage 3's tensors, or of the flat one of them all
        borders = 2 * (1 if name.endswith("stage1") else 3)
        old, new = (borders * (len(phase) - 1) for phase in (before, after))
        saved, loaded = (
            {key: stored for rank in phase for key, stored in rank["chain"][name]["groups"].items()}
            for phase in (before, after)
        )
        uncut = saved.keys() & loaded.keys()
        assert all(loaded[key] == saved[key] for key in uncut)
        # of a new border there are two parts, of an old one the group that was cut
        assert 0 < len(loaded.keys() - uncut) <= old + 2 * new < len(uncut)
        for rank in after:
            saved, loaded = before[0]["chain"][name], rank["chain"][name]
            assert loaded["steps"] == saved["steps"] == 3
            rounded = 0
            for (p, *moments), (q, *others) in zip(saved["states"], loaded["states"], strict=True):
                assert torch.equal(p, q)
                for a, b in zip(moments, others, strict=True):
                    if a.numel() >= 1000:
                        rounded += rounded_again(b, a, others[1])
                    else:
                        assert torch.equal(a, b)
            assert rounded <= old + new
            # what was cut is rounded once more by each phase
            drop = loaded["losses"][0] - loaded["losses"][1]
            bound = 3 * FP8_BOUND * drop + TOLERANCE[RUNS[name]["dtype"]]
            assert loaded["losses"] == pytest.approx(phases[0][0]["chain"][name]["losses"], abs=bound)


def test_universal_checkpoint_of_zero1_is_loaded_by_zero2(phases):
    for rank in phases[1]:
        same, other = (rank["chain"][name]["states"] for name in ("stage1", "stage1 in stage2"))
        assert all(
            torch.equal(a, b) for p, q in zip(same, other, strict=True) for a, b in zip(p, q, strict=True)
        )


def test_compressed_checkpoints_are_small(phases):
    for phase in (phases[0], phases[3]):
        runs = phase[0]["chain"]
        numel = sum(p.numel() for p, *_ in runs["stage3"]["states"])
        # 8 bytes of moments become 2.1, and a little for what is small; the FP32 masters stay
        assert runs["stage3"]["file"] - runs["compressed3"]["file"] > 5.5 * numel


def test_save_checkpoint_decodes_one_moment_at_a_time(phases):
    for phase in phases[:2]:
        for rank in phase:
            saving, at_once, largest, everything = rank["watch"]
            # a decoded moment, and its copy while a part of it is decoded
            assert 0 < saving <= 2 * largest < everything
            # what is watched is there to be seen
            assert at_once >= everything


@pytest.mark.parametrize("index, stage, layout", CONVERTED)
def test_checkpoints_go_from_the_papers_formats_to_todays_and_back(phases, index, stage, layout):
    for rank in phases[index]:
        (states, expected), *others = rank["formats", stage, layout]
        for found, losses in others:
            for (p, *moments), (q, *loaded) in zip(states, found, strict=True):
                assert torch.equal(p, q)
                for a, b in zip(moments, loaded, strict=True):
                    assert (a - b).norm() <= 0.06 * a.norm()
            drop = expected[0] - expected[1]
            assert losses == pytest.approx(expected, abs=FP8_BOUND * drop + TOLERANCE["fp32"])
        # the same formats: to the bit
        assert others[2][1] == expected


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_state_functions_see_values(phases, stage):
    for phase in phases[:2]:
        for rank in phase:
            masters, pairs = rank["host", stage]
            assert masters
            for found, wanted in pairs:
                assert type(found) is torch.Tensor and found.dtype == torch.float32
                assert_groups_faithful(found, wanted, cuts=len(phase) - 1)


def in_pytorchs_older_format(folder):
    """States, and what a file that was written without zip holds of them."""
    config = ds_config(RUNS["stage1"], True) | {"checkpoint": {"checkpoint_serialization": False}}
    engines = [deepspeed.initialize(model=Given(), config=config)[0] for _ in range(2)]
    for step in range(2):
        engines[0].backward(engines[0](step))
        engines[0].step()
    engines[0].save_checkpoint(folder, tag="older")
    engines[1].load_checkpoint(folder, tag="older")
    return [[t.clone() for _, *states in full_states(engine) for t in states] for engine in engines]


def test_checkpoints_in_pytorchs_older_format(tmp_path):
    """`torch.save` asks for all values at once there: none may be left to it."""
    ((saved, loaded),) = run_distributed(in_pytorchs_older_format, 1, str(tmp_path))
    assert len(saved) > 6 and all(map(torch.equal, saved, loaded))
    assert not zipfile.is_zipfile(next(tmp_path.glob("older/*optim_states.pt")))
