"""How trainers pass packed batches to a model, and what runs. Tests read `FORMS` and `ROWS`.

python docs/packing.py prints the table of docs/huggingface.md.
"""

from typing import NamedTuple


class Form(NamedTuple):
    passed: str
    runs: str
    masked: bool = False
    """Whether attention reads a mask of tokens x tokens."""
    inside: bool = True
    """Whether tokens attend inside of their document only."""


NO_MASK = "no mask, fused layers"
FORMS = {
    "positions": Form("`position_ids` that begin again, in one row", NO_MASK),
    "borders": Form("`cu_seq_lens_q` and `position_ids`", NO_MASK),
    "numbers": Form("numbers of documents in `attention_mask`", NO_MASK),
    "mask": Form("a mask of tokens × tokens", "that mask, fused layers", masked=True),
    "nothing": Form("rows without borders", "documents attend to one another, as without COAT", inside=False),
    "padded": Form("padded rows", "a mask, fused layers", masked=True),
}


class Row(NamedTuple):
    trainer: str
    option: str
    form: str
    package: str = ""
    """The package whose own code makes the batch in the test; else the test makes a batch as it does."""


ROWS = (
    Row("transformers Trainer", "`DataCollatorWithFlattening`", "positions", "transformers"),
    Row(
        "transformers Trainer",
        "`DataCollatorWithFlattening(return_flash_attn_kwargs=True)`",
        "borders",
        "transformers",
    ),
    Row("TRL SFT", "`padding_free=True`", "borders", "trl"),
    Row("TRL SFT", "`packing=True`", "borders", "trl"),
    Row("TRL SFT", '`packing=True, packing_strategy="wrapped"`', "nothing", "trl"),
    Row("TRL DPO, GRPO", "none in TRL 1.16", "padded", "trl"),
    Row("LLaMA-Factory", "`neat_packing: true`, `flash_attn: fa2`", "numbers"),
    Row("LLaMA-Factory", "`neat_packing: true`, `flash_attn: sdpa`", "mask"),
    Row("LLaMA-Factory", "`packing: true`", "nothing"),
    Row("Axolotl", "`sample_packing: true`, FlashAttention", "numbers"),
    Row("ms-swift", "`--padding_free true`, `--packing true`", "borders"),
    Row("verl", "`use_remove_padding=True`", "positions"),
    Row("OpenRLHF", "`--packing_samples`", "positions"),
)


def text() -> str:
    """The table of the page."""
    lines = ["| trainer | option | passes | what runs | checked |", "|---|---|---|---|---|"]
    for row in ROWS:
        form, checked = FORMS[row.form], "its own batches" if row.package else "batches like its own"
        lines.append(f"| {row.trainer} | {row.option} | {form.passed} | {form.runs} | {checked} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")
