"""What a load into an engine of ZeRO holds, and what one that is refused leaves."""

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from coat_ds.optim import loading
from coat_ds.optim.options import MOMENTS
from tests.coat_ds.cells import cell
from tests.coat_ds.checkpointed import NEW, Given, full_states, start
from tests.coat_ds.optimizers import assert_equal
from tests.util import run_distributed

# stages 1 and 2 are loaded by one class
CASES = (1, "stock"), (2, "compressed"), (3, "stock"), (3, "compressed")


def refusing(*_):
    raise ValueError("refused")


def load(folder, stage, layout):
    """Whether a moment's old codes were alive when the loaded one was made, of all moments; and states before
    before and after a load, and after one that is refused."""
    engine = start(cell(stage, model=Given), layout=layout, second=NEW)
    optimizer, set_moment = engine.basic_optimizer, loading.set_moment
    engine.backward(engine(0))
    engine.step()
    engine.save_checkpoint(folder, tag="a")
    held = [
        [
            StorageWeakRef(piece.storage.codes.untyped_storage())
            for name in MOMENTS
            for piece in state[name].pieces
        ]
        for state in optimizer.state.values()
    ]
    alive = []

    def noted(*args):
        # both moments of one tensor after the other
        alive.append(not all(ref.expired() for ref in held[len(alive) // len(MOMENTS)]))
        return set_moment(*args)

    states = [full_states(engine)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "set_moment", noted)
        engine.load_checkpoint(folder, tag="a")
        states.append(full_states(engine))
        patch.setattr(loading, "check_groups", refusing)
        with pytest.raises(ValueError, match="refused"):
            engine.load_checkpoint(folder, tag="a")
    states.append(full_states(engine))
    return alive, states


def load_all(folder):
    return {case: load(f"{folder}/{case}", *case) for case in CASES}


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    return run_distributed(load_all, 1, str(tmp_path_factory.mktemp("loads")))[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_load_state_dict_frees_an_old_moment_before_the_loaded_one_comes(case, loads):
    """A GPU has no room for both."""
    alive, _ = loads[case]
    assert len(alive) >= 2 and not any(alive)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_load_state_dict_gives_states_of_the_checkpoint_or_none(case, loads):
    before, *later = ([t for one in found for t in one] for found in loads[case][1])
    assert len(before) > 6
    for found in later:
        assert_equal(before, found)
