"""The table of gradient formats on docs/numerics.md."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.tables.blocks import Results, between, block, data, percent, table

ERRORS, TUNED, LEARNED, LAYER = "gradients_h200.csv", "sensitivity.csv", "memorize.csv", "layer_h200.csv"
E5M2, ENDS = "E5M2", "first and last layer in BF16"
PRETRAINED = {"converge.csv": "125M, 150M tokens", "converge_1b_warmup.csv": "1B, 46M tokens"}
# decoder layers of Llama-2-7B, and the first and the last one of them
LAYERS, AT_ENDS = 32, 2
LINEARS = "qkv", "o", "gate_up", "down"


class Trained(NamedTuple):
    """Where the losses of a variant are."""

    error: str | None
    """Layer in numerics.csv."""
    run: str | None
    """In converge.csv and converge_1b_warmup.csv."""
    tuned: str
    learned: str | None


TRAINED = {
    E5M2: Trained("ours", "coat", "coat", "COAT"),
    "E4M3": Trained("ours, gradients E4M3", "coat-e4m3", "coat-e4m3", "COAT, E4M3 gradients"),
    f"E5M2, {ENDS}": Trained(None, None, f"coat, {ENDS}", None),
}


class Times:
    """Milliseconds of a decoder layer of Llama-2-7B, mean over all layers.

    Measured: the layer in E5M2 and in BF16, and each GEMM. Quantizing with row scales or stochastically moves
    the bytes of E5M2's, so the time of E5M2's is assumed.
    """

    def __init__(self, results: Results, rows: list[dict]):
        self.e5m2, self.bf16 = (results.row(LAYER, layer=name)["ms"] for name in ("ours", "BF16"))
        self.rows = {(row["linear"], row["way"]): row for row in rows}

    def more(
        self, way: str, *gemms: str, linears: tuple[str, ...] = ("qkv", "o", "gate_up", "down")
    ) -> float:
        """What GEMMs of a layer take more than in E5M2."""
        return sum(
            self.rows[linear, way][f"{gemm}_ms"] - self.rows[linear, E5M2][f"{gemm}_ms"]
            for linear in linears
            for gemm in gemms
        )

    def of(self, name: str) -> float:
        ends = AT_ENDS / LAYERS
        left = {E5M2: 0.0, f"E5M2, {ENDS}": ends * (self.bf16 - self.e5m2), "BF16": self.bf16 - self.e5m2}
        if name in left:
            return self.e5m2 + left[name]
        e4m3 = self.more("E4M3", "dgrad", "wgrad", "quantize")
        of_name = {
            "E4M3": e4m3,
            "E4M3, row scales in dgrad": e4m3
            + self.more("E4M3, row scales", "dgrad")
            - self.more("E4M3", "dgrad"),
            "E4M3, row and column scales": self.more("E4M3, row scales", "dgrad", "wgrad"),
            "E5M2, stochastic": 0.0,
            "E4M3, stochastic": e4m3,
            "E5M2, length restored": 0.0,
            "E5M2, wgrad of qkv in BF16": self.more("BF16", "wgrad", linears=("qkv",)),
            "E5M2, wgrad in BF16": self.more("BF16", "wgrad"),
            "E5M2, wgrad of first and last layer in BF16": ends * self.more("BF16", "wgrad"),
            f"E4M3, {ENDS}": (1 - ends) * e4m3 + left[f"E5M2, {ENDS}"],
            "E5M2, down_proj in BF16": self.more("BF16", "forward", "dgrad", "wgrad", linears=("down",))
            - self.rows["down", E5M2]["quantize_ms"],
        }
        return self.e5m2 + of_name[name]


@block("numerics.md", "gradients")
def gradients(results: Results) -> str:
    """A line for each variant: errors of gradients, time, and losses above BF16 of the same seed."""
    errors, times = results.rows(ERRORS, what="errors"), Times(results, results.rows(ERRORS, what="time"))
    lines = []
    for name in dict.fromkeys(row["variant"] for row in errors):
        of_name = [row for row in errors if row["variant"] == name]
        line = [name, *_errors(of_name), f"{times.of(name):.2f}"]
        lines.append(line + _losses(results, TRAINED.get(name)))
    head = [
        "gradients in",
        data(ERRORS, "error of weight gradients, E5M2's is 1"),
        "with the forward's error",
        "of dx",
        "gradients that become zero",
        data(LAYER, "ms of a layer"),
        data("numerics.csv", "error of weight gradients, TransformerEngine's is 1"),
        *(data(name, title) for name, title in PRETRAINED.items()),
        data(TUNED, "SmolLM2, 10M tokens"),
        "in stock layers",
        data(LEARNED, "one batch, Mistral's layers"),
        "Qwen3's",
    ]
    return table(head, *lines)


def _errors(rows: list[dict]) -> list[str]:
    """Between models."""
    names = "backward_to_e5m2", "total_to_e5m2", "dx_to_e5m2"
    ratios = [between([row[name] for row in rows], "{:.2f}") for name in names]
    return [*ratios, f"up to {percent(max(row['flushed'] for row in rows), 2)}"]


def _losses(results: Results, where: Trained | None) -> list[str]:
    """Cells of what was trained; empty ones for what was not."""
    if where is None:
        return [""] * 7
    line = ["", "", ""]
    if where.error:
        row = results.row("numerics.csv", data="trained", layer=where.error, figure="to TE current")
        line = [between([row[f"linear_{name}"] for name in ("qkv", "proj", "fc1", "fc2")], "{:.2f}")]
        line += [_over_bf16(results, name, run=where.run) for name in PRETRAINED]
    line += [_over_bf16(results, TUNED, loss, system=where.tuned) for loss in ("val_loss", "val_loss_bf16")]
    for family in ("Mistral", "Qwen3"):
        rows = results.rows(LEARNED, family=family, system=where.learned) if where.learned else []
        line.append(_signed(rows, lambda row: row["over_bf16"]))
    return line


def _over_bf16(results: Results, name: str, loss: str = "val_loss", **system: str | None) -> str:
    """Of the same seed."""
    (column,) = system
    bf16 = {row["seed"]: row[loss] for row in results.rows(name, **{column: "bf16"})}
    return _signed(results.rows(name, **system), lambda row: row[loss] - bf16[row["seed"]])


def _signed(rows: list[dict], value: Callable[[dict], float]) -> str:
    """The mean over rows, and the number of seeds."""
    if not rows:
        return ""
    return f"{statistics.mean(map(value, rows)):+.4f} ({len(rows)})"
