"""What storing the moments costs in accuracy, on the moments of a model that is being trained.

A GPT of megatron-core learns real text with FP32 moments (`torch.optim.AdamW`). Then its moments are encoded
and decoded by every codec, and compared, kind of tensor by kind of tensor:

- exp_avg, root: relative RMS error of exp_avg and of sqrt(exp_avg_sq);
- update: that of the Adam update, m / (sqrt(v) + eps) with bias-corrected moments. Where a second moment is
  flushed to zero the update is enormous, so `kept` leaves out what plain FP8 (absmax, E4M3) flushes;
- kept_rms_ratio, kept_mse_ratio: `kept` over that of plain FP8 in the same groups, and its square. Table 1 of
  the paper (20.10 without expansion, 12.31 with: 0.61) is in mean squared error;
- flushed: share of the second moments above zero that decode to zero;
- k_05, k_50, k_95: quantiles of the exponent k of the second moment, where it is stored with one.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.plot import save
from benchmarks.common.spawn import one_process
from benchmarks.common.training import BETAS, EPS, KINDS, LARGE, SMALL, kind_of, train_gpt
from coat_kernels.codecs import Stored, expanded, get_codec

GROUP_SIZE = 128
PLAIN = ("fp8", "fp8")
# formats of exp_avg and exp_avg_sq. The measure of the others comes first
PAIRS = (
    PLAIN,
    ("fp8_e5m2", "fp8_e5m2"),
    ("fp8_expanded", "fp8"),
    ("fp8", "fp8_expanded"),
    ("fp8_expanded", "fp8_expanded"),
    ("fp8_expanded", "fp8_expanded_e5m2"),
    ("fp8_expanded_e5m2", "fp8_expanded_e5m2"),
    ("fp8_expanded", "log8"),
    ("ratio8", "log8"),
    ("fp8_expanded", "fp32"),
    ("fp32", "fp8_expanded"),
    ("fp32", "log8"),
    ("bf16", "bf16"),
    ("fp32", "fp32"),
)


class Moments(NamedTuple):
    """FP32 moments of a parameter, flat, and what corrects their bias."""

    kind: str
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int

    def update(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
        """The Adam update by these moments, uncorrected, of the same step; FP64."""
        m = exp_avg.double() / (1 - BETAS[0] ** self.step)
        return m / ((exp_avg_sq.double() / (1 - BETAS[1] ** self.step)).sqrt() + EPS)


def moments_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Moments]:
    """The moments of every parameter after `steps` steps."""
    return [
        Moments(
            kind_of(name),
            *(optimizer.state[p][k].flatten() for k in ("exp_avg", "exp_avg_sq")),
            steps,
        )
        for name, p in model.named_parameters()
    ]


def round_trip(
    name: str, x: torch.Tensor, beside: Stored | None = None
) -> tuple[torch.Tensor, torch.Tensor, Stored]:
    """`x` as the codec gives it back, the k of its groups but those of zeros, empty if it has none, and what
    is stored. beside: the second moment, if `x` is a first one."""
    codec = get_codec(name)
    storage = codec.encode(x, GROUP_SIZE, beside=beside)
    k = storage.exponent[storage.scale > 0].float() / 16 if codec in expanded.CODECS else x.new_empty(0)
    return codec.decode(storage, GROUP_SIZE, beside), k, Stored(codec, storage)


class Tally:
    """Sums over the tensors of one kind."""

    def __init__(self):
        self.squares: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
        self.flushed, self.live = 0, 0
        self.k: list[torch.Tensor] = []

    def compare(self, measure: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        actual, expected = actual.double(), expected.double()
        sums = torch.stack([(actual - expected).square().sum(), expected.square().sum()])
        self.squares[measure] += sums.cpu()

    def row(self) -> dict[str, float | str]:
        """Relative RMS errors, share of flushed values, quantiles of k."""
        row = {name: (error / size).sqrt().item() for name, (error, size) in self.squares.items()}
        row["flushed"] = self.flushed / max(self.live, 1)
        k = torch.cat(self.k)
        for q in (5, 50, 95):
            row[f"k_{q:02}"] = k.kthvalue(1 + (len(k) - 1) * q // 100).values.item() if len(k) else ""
        return row


def measure_pair(moments: list[Moments], pair: tuple[str, str]) -> Iterator[tuple[str, dict]]:
    """Kind and measures, for each kind of tensor and for all together."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for entry in moments:
        v, k, second = round_trip(pair[1], entry.exp_avg_sq)
        m, *_ = round_trip(pair[0], entry.exp_avg, second)
        kept = (round_trip(PLAIN[1], entry.exp_avg_sq)[0] > 0) | (entry.exp_avg_sq == 0)
        expected, actual = entry.update(*entry[1:3]), entry.update(m, v)
        for kind in (entry.kind, "all"):
            tally = tallies[kind]
            tally.compare("exp_avg", m, entry.exp_avg)
            tally.compare("root", v.sqrt(), entry.exp_avg_sq.sqrt())
            tally.compare("update", actual, expected)
            tally.compare("kept", actual[kept], expected[kept])
            tally.flushed += ((v == 0) & (entry.exp_avg_sq > 0)).sum().item()
            tally.live += (entry.exp_avg_sq > 0).sum().item()
            tally.k.append(k.cpu())
    for kind in (*KINDS, "all"):
        yield kind, tallies[kind].row()


def plot(rows: list[dict], path: Path) -> None:
    """Bars of the update's error, a cluster for each kind and a colour for each pair of formats."""
    kinds = [*KINDS, "all"]
    lossy = [pair for pair in PAIRS if pair != ("fp32", "fp32")]
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    for i, (m, v) in enumerate(lossy):
        error = {row["kind"]: row["kept"] for row in rows if (row["m"], row["v"]) == (m, v)}
        places = [place + (i - len(lossy) / 2) * 0.8 / len(lossy) for place in range(len(kinds))]
        heights, color = [100 * error[kind] for kind in kinds], plt.cm.tab20(i)
        axes.bar(places, heights, 0.8 / len(lossy), label=f"{m}, {v}", color=color)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_yscale("log")
    axes.set_ylabel("relative RMS error of the Adam update, %")
    axes.set_title(
        f"Storing both moments in groups of {GROUP_SIZE} (where plain FP8 flushes no second moment)"
    )
    axes.legend(title="exp_avg, exp_avg_sq", loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    save(figure, path)


@benchmark(needs_gpu=False)
def state_error(arguments, table: Table) -> None:
    """Errors of stored moments on a partly trained GPT; the small model without a GPU or with --quick."""
    small = arguments.quick or not torch.cuda.is_available()
    steps = 300 if small else 1000
    with one_process():
        model, optimizer, _ = train_gpt(SMALL if small else LARGE, steps)
        moments = moments_of(model, optimizer, steps)
    plain = {}
    for m, v in PAIRS:
        for kind, row in measure_pair(moments, (m, v)):
            ratio = row["kept"] / plain.setdefault(kind, row["kept"])
            row.update(kept_rms_ratio=ratio, kept_mse_ratio=ratio**2)
            table.add(m=m, v=v, kind=kind, **row)
    plot(table.rows, table.path.with_suffix(".png"))
