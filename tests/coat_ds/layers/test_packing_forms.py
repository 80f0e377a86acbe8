"""The table of trainers' packed batches: each form runs as it says, and trainers make batches of it."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import coat_ds
from coat_ds.layers.modules import decoder_layer
from coat_kernels.attention import Documents
from tests.coat_ds.layers.measures import fused_calls
from tests.coat_ds.layers.packed import documents, flat, loaded_with_flash, only_attention
from tests.coat_ds.ways import llama, tokenizer
from tests.families import FAMILIES
from tests.util import rel_rms

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = runpy.run_path(str(DOCS / "packing.py"))
FORMS = pytest.mark.parametrize("form", PAGE["FORMS"])
LENGTHS = [5, 33, 2, 17]


def rows_of(package: str):
    """The rows whose batches are made by this package, as parameters of a test."""
    found = [row for row in PAGE["ROWS"] if row.package == package]
    return pytest.mark.parametrize("row", found, ids=lambda row: f"{row.trainer} {row.option}")


def test_packing_table_is_in_the_docs():
    assert PAGE["text"]() in (DOCS / "huggingface.md").read_text(), "run python docs/packing.py"


def batch(form: str) -> dict:
    """Documents of `LENGTHS` in this form, without labels."""
    ids, lengths = flat(LENGTHS)["input_ids"], torch.tensor(LENGTHS)
    packed = Documents.between([0, *lengths.cumsum(0).tolist()], torch.device("cpu"))
    if form == "padded":
        max_seqlen = max(LENGTHS)
        rows = [torch.tensor(document["input_ids"]) for document in documents(LENGTHS)]
        padded = torch.stack([torch.nn.functional.pad(row, (max_seqlen - len(row), 0)) for row in rows])
        real = torch.stack([torch.arange(max_seqlen) >= max_seqlen - n for n in LENGTHS]).long()
        return {"input_ids": padded, "attention_mask": real}
    given = {
        "positions": {"position_ids": packed.positions(len(ids[0]))[None]},
        "borders": {"cu_seq_lens_q": packed.cu_seqlens, "cu_seq_lens_k": packed.cu_seqlens}
        | {"max_length_q": packed.max_seqlen, "max_length_k": packed.max_seqlen}
        | {"position_ids": packed.positions(len(ids[0]))[None]},
        "numbers": {"attention_mask": torch.arange(1, 5).repeat_interleave(lengths)[None]},
        "mask": {"attention_mask": packed.mask(1, len(ids[0]))},
        "nothing": {},
    }
    return {"input_ids": ids, **given[form]}


def form_of(given: dict) -> str:
    """The form of what a model was given."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and mask.dim() == 4:
        return "mask"
    if mask is not None and not mask.all():
        return "padded"
    if mask is not None and mask.max() > 1:
        return "numbers"
    if given.get("cu_seq_lens_q") is not None:
        return "borders"
    begins = positions is not None and (positions.diff() != 1).any()
    return "positions" if begins and mask is None else "nothing"


@FORMS
def test_packing_forms_run_as_the_table_says(form, monkeypatch):
    taken, masked, attend = fused_calls(monkeypatch), [], decoder_layer.any_attention
    monkeypatch.setattr(decoder_layer, "any_attention", lambda *a, **k: masked.append(1) or attend(*a, **k))
    given = batch(form)
    assert form_of(given) == form
    model = coat_ds.convert(loaded_with_flash(FAMILIES["llama"].build()))
    model(**given).logits.sum().backward()
    layers = len(model.model.layers)
    assert (len(taken), len(masked)) == (layers, layers if PAGE["FORMS"][form].masked else 0)


@FORMS
def test_packing_forms_keep_documents_apart_as_the_table_says(form):
    """In FP64, with COAT's attention alone."""
    model = FAMILIES["llama"].build(torch.float64)
    apart = [model(torch.tensor([document["input_ids"]])).logits[0] for document in documents(LENGTHS)]
    coat_ds.convert(loaded_with_flash(model), filter=only_attention)
    found = model(**batch(form)).logits
    if form == "padded":
        found = torch.cat([row[-n:] for row, n in zip(found, LENGTHS, strict=True)])
    # the angles of positions are FP32: 2^-24 of a position of at most 56, in two layers
    inside = rel_rms(found.flatten(0, -2), torch.cat(apart)) < 56 * 2**-22
    assert inside == PAGE["FORMS"][form].inside


def train(cls, config, folder, given: list, **how) -> list:
    """One step of a trainer with a converted model. Returns the forms of what the model was given."""
    model, forms = coat_ds.convert(llama(pad_token_id=0).bfloat16()), []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: forms.append(form_of(kwargs)), with_kwargs=True
    )
    options = {"max_steps": 1, "per_device_train_batch_size": 3, "use_cpu": True, "bf16": True}
    options |= {"report_to": []} | how.pop("options", {})
    arguments = config(output_dir=str(folder), **options)
    cls(model=model, args=arguments, train_dataset=Dataset.from_list(given), **how).train()
    return forms


def sequences() -> list[dict]:
    return [{"input_ids": [3 + (i + j) % 40 for j in range(4 + 3 * i)]} for i in range(9)]


@rows_of("transformers")
def test_packing_forms_of_transformers(row, tmp_path):
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs="flash" in row.option)
    forms = train(Trainer, TrainingArguments, tmp_path, sequences(), data_collator=collator)
    assert forms == [row.form]


@rows_of("trl")
def test_packing_forms_of_trl(row, tmp_path):
    trl = pytest.importorskip("trl")
    if "DPO" in row.trainer:
        assert not {"padding_free", "packing"} & {field.name for field in dataclasses.fields(trl.GRPOConfig)}
        pairs = [{"prompt": "w1 w2", "chosen": "w3", "rejected": " w4" * (1 + i)} for i in range(6)]
        how = {"options": {"padding_free": True}, "ref_model": coat_ds.convert(llama().bfloat16())}
        forms = train(trl.DPOTrainer, trl.DPOConfig, tmp_path, pairs, processing_class=tokenizer(), **how)
        assert forms == [row.form]
        return
    options = eval(f"dict({row.option.strip('`')})")
    # full rows, documents in a row, and documents as they are
    options["max_length"] = 16 if "packing_strategy" in options else 32 if "packing" in options else None
    how = {"options": options, "processing_class": tokenizer()}
    assert train(trl.SFTTrainer, trl.SFTConfig, tmp_path, sequences(), **how) == [row.form]
