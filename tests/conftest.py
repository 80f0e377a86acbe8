"""Without a GPU the Triton kernels run in Triton's interpreter, which is selected before the kernels are
defined.

`make test` leaves out the tests with the marker `long`, and of products with the markers `pairwise` and
`each_value` the rest. It prints at its end how many and why; `make test-all` runs them too.
"""

import atexit
import collections
import gc
import itertools
import os

# objects of the imports that follow are permanent, and collections between them would find nothing
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
else:
    # with "9.0a" DeepSpeed compiles nothing (DeepSpeed #8619); without the variable it queries the GPU
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)

from tests.hosts import TEST_ALL  # noqa: E402
from tests.interpreter import quicken_interpreter  # noqa: E402
from tests.util import RARELY  # noqa: E402

if not GPU:
    quicken_interpreter()

LEFT_OUT = "left to make test-all: "


# of a product: how many of a test's parameters have values that make test combines in every way
COMBINED = {"pairwise": (2, "every pair of values"), "each_value": (1, "every value")}


def covering(rows: list[tuple], together: int) -> set[int]:
    """Indices of a small subset of `rows`, chosen greedily, that has every combination of `together` values
    that occurs in any row.

    If several rows add equally many combinations, the first one is taken: the choice is the same every time.
    """
    places = list(itertools.combinations(range(len(rows[0])), min(together, len(rows[0]))))
    held = [{(place, *(row[i] for i in place)) for place in places} for row in rows]
    missing, chosen = set().union(*held), set()
    while missing:
        best = max(range(len(rows)), key=lambda n: len(held[n] & missing))
        chosen.add(best)
        missing -= held[best]
    return chosen


def pytest_xdist_auto_num_workers() -> int | None:
    """The number of workers for `-n auto`: small with a GPU, whatever the number of cores, since all workers
    use memory of the first GPU."""
    return min(8, os.cpu_count() or 1) if GPU else None


def pytest_collection_modifyitems(items):
    # with --no-loadscope-reorder files start in this order; a long file that started last would run alone at
    # the end
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    products = collections.defaultdict(list)
    for item in items:
        if not GPU and "gpu" in item.keywords:
            reason = "needs a CUDA GPU of compute capability 8.9 or newer"
            item.add_marker(pytest.mark.skip(reason=reason))
        if TEST_ALL:
            continue
        for mark in item.iter_markers("long"):
            item.add_marker(pytest.mark.skip(reason=LEFT_OUT + mark.args[0]))
        for mark in COMBINED.keys() & item.keywords.keys():
            products[mark, item.path, item.originalname].append(item)
    for (mark, *_), tests in products.items():
        together, what = COMBINED[mark]
        # parametrizations share value objects, so ids compare values
        kept = covering([tuple(map(id, test.callspec.params.values())) for test in tests], together)
        for number, test in enumerate(tests):
            if number not in kept:
                test.add_marker(pytest.mark.skip(reason=f"{LEFT_OUT}the product beyond {what}"))


def pytest_collection_finish():
    gc.collect()
    # later collections skip what is there by now
    gc.freeze()
    # some libraries count their remaining objects at exit
    atexit.register(gc.unfreeze)
    if not GPU:
        gc.set_threshold(*RARELY)
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    skipped = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    reasons = collections.Counter(reason.split(LEFT_OUT)[1] for reason in skipped if LEFT_OUT in reason)
    if reasons:
        terminalreporter.section(f"{reasons.total()} tests are left to make test-all")
        for reason, number in reasons.most_common():
            terminalreporter.line(f"{number:5}  {reason}")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which kernels are tested: the GPU if there is one, else the CPU through the interpreter.

    With the index that tensors name: `PredictedScale.on` knows no other name of the same GPU.
    """
    return torch.device("cuda:0" if GPU else "cpu")
