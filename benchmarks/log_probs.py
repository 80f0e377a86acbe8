"""Log-probabilities of tokens, as RL trainers compute them, in batches of different forms."""

import itertools
import warnings

import torch
from transformers import DataCollatorWithFlattening

import coat_ds
from benchmarks.common.environment import device
from benchmarks.common.harness import RESULTS, Table, benchmark
from benchmarks.finetune import start_of, weights_option
from benchmarks.finetune.pretrained import Pretrained, hugging_face

# the arguments of convert(); None for stock layers
SYSTEMS = {"FP32": None, "BF16": None, "COAT": {}}
FORMS = ("one by one", "padded", "packed")
# tokens of the documents, and tokens of the documents of a quick run
LENGTHS, QUICK = (61, 350, 17, 1001, 128, 245, 7, 512), (61, 17, 128, 7)

Documents = list[list[int]]


def documents(start: Pretrained) -> Documents:
    """Parts of this project's pages; random tokens for a model without a tokenizer."""
    if start.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in QUICK]
    from tokenizers import Tokenizer

    pages = sorted((RESULTS.parents[1] / "docs").glob("*.md"))
    ids = Tokenizer.from_str(start.tokenizer).encode("\n".join(page.read_text() for page in pages)).ids
    ends = itertools.accumulate(LENGTHS)
    return [ids[end - n : end] for n, end in zip(LENGTHS, ends, strict=True)]


def batches(form: str, tokens: Documents) -> list[tuple[dict, Documents]]:
    """The arguments of the model and the documents inside: packed as by verl and by TRL's `padding_free`, or
    padded on the left as by TRL's GRPO."""
    if form == "one by one":
        return [({"input_ids": torch.tensor([ids])}, [ids]) for ids in tokens]
    if form == "packed":
        flat = DataCollatorWithFlattening()([{"input_ids": ids} for ids in tokens], return_tensors="pt")
        return [({name: flat[name] for name in ("input_ids", "position_ids")}, tokens)]
    longest = max(map(len, tokens))
    rows = torch.tensor([[0] * (longest - len(ids)) + ids for ids in tokens])
    real = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in tokens])
    positions = (real.cumsum(1) - 1).clamp(min=0)
    return [({"input_ids": rows, "attention_mask": real, "position_ids": positions}, tokens)]


@torch.no_grad()
def log_probs(model: torch.nn.Module, form: str, tokens: Documents) -> torch.Tensor:
    """The log-probability of each token of each document except its first one, FP32, in the order of
    `tokens`."""
    found = []
    for given, inside in batches(form, tokens):
        logits = model(**{k: v.to(device()) for k, v in given.items()}, use_cache=False).logits
        lengths = [*map(len, inside)]
        if form == "padded":
            parts = [row[-n:] for row, n in zip(logits, lengths, strict=True)]
        else:
            parts = logits[0].split(lengths)
        for part, ids in zip(parts, inside, strict=True):
            following = torch.tensor(ids[1:], device=part.device)[:, None]
            found.append(part[:-1].float().log_softmax(-1).gather(1, following)[:, 0])
    return torch.cat(found)


@benchmark(needs_gpu=False, options=weights_option)
def drift(arguments, table: Table) -> None:
    """How far log-probabilities of FP8 layers are from those of BF16 and FP32, in batches of three forms.

    SmolLM2-135M-Instruct by default, in evaluation, on eight documents of 7 to 1,001 tokens.
    Columns, means of a token's absolute difference in nats:
    - from_fp32, from_bf16: to the log-probabilities of the same weights in that precision, one by one;
    - from_one_by_one: to those of the same system from a batch of each document.
    """
    start = start_of(arguments)
    tokens, exact = documents(start), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for system, activations in SYSTEMS.items():
            model = hugging_face(start).model.eval()
            if system == "FP32":
                model = model.float()
            if activations is not None:
                coat_ds.convert(model, activations)
            for form in FORMS:
                found = log_probs(model, form, tokens)
                own = exact.setdefault(system, found)
                others = {"from_fp32": exact["FP32"], "from_bf16": exact.get("BF16"), "from_one_by_one": own}
                row = {
                    name: (found - other).abs().mean().item()
                    for name, other in others.items()
                    if other is not None
                }
                table.add(system=system, form=form, tokens=len(found), **row)
