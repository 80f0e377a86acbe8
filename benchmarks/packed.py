"""Packed batches: layers of real models over documents of different lengths, COAT and BF16."""

import itertools
from collections.abc import Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import is_flash_attn_2_available

import coat_ds
from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, row_or_note
from benchmarks.common.timing import measure
from benchmarks.common.wide_models import SHAPES
from benchmarks.models import build, saved_bytes
from coat_kernels.attention import Documents, packed_attention

LAYERS = 2
# batches that differ in their documents, and have equally many tokens
BATCHES = 4
# calls that warm up, and calls that are timed. CUDA graphs may be recorded three times; masks take long.
CALLS, GRAPHED_CALLS, MASKED_CALLS = (3, 2 * BATCHES), (16, 2 * BATCHES), (1, BATCHES)


def _log_normal(tokens: int, number: int) -> list[int]:
    """Lengths whose logarithms have a standard deviation of 1, a median of a 32nd of the tokens."""
    generator, lengths = torch.Generator().manual_seed(number), []
    while (left := tokens - sum(lengths)) > 0:
        length = torch.empty(1).log_normal_(generator=generator).item() * tokens / 32
        lengths.append(min(max(int(length), 2), left))
    return lengths


# name: the tokens, and the documents of each of a number of batches. Names with "rows" are not packed.
DOCUMENTS: dict[str, tuple[int, Callable[[int, int], list[int]]]] = {
    "8 rows of 1024": (8192, lambda tokens, _: [tokens // 8] * 8),
    "8 x 1024": (8192, lambda tokens, _: [tokens // 8] * 8),
    "16 rows of 2048": (32768, lambda tokens, _: [tokens // 16] * 16),
    "log-normal": (32768, _log_normal),
}


def _varlen(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **rest):
    """torch's variable-length attention, as a model of transformers calls it."""
    packed = Documents(cu_seq_lens_q, rest["max_length_q"])
    heads = (x.transpose(1, 2) for x in (query, key, value))
    y = packed_attention(*heads, packed, scale=scaling, batch_first=True)
    return y.view(*y.shape[:2], -1, value.shape[-1]), None


def _stock(implementation: str) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """BF16 layers with this attention."""

    def chosen(model: torch.nn.Module) -> torch.nn.Module:
        AttentionInterface.register("varlen", _varlen)
        AttentionMaskInterface.register("varlen", lambda *_, **__: None)
        model.set_attn_implementation(implementation)
        return model

    return chosen


def _coat(**activations) -> Callable[[torch.nn.Module], torch.nn.Module]:
    return lambda model: coat_ds.convert(model, activations)


SYSTEMS = {
    "BF16 sdpa": _stock("sdpa"),
    "BF16 flash_attention_2": _stock("flash_attention_2"),
    "BF16 varlen": _stock("varlen"),
    "COAT": _coat(),
    "COAT with a mask": _coat(),
    "COAT, CUDA graphs": _coat(cuda_graphs=True),
    "COAT, 8-bit attention": _coat(attention_format="sqrt8"),
    "COAT, recomputed attention": _coat(attention_format="recompute"),
}
# systems that read a mask of tokens x tokens
MASKED = ("BF16 sdpa", "COAT with a mask")
# systems for whole rows, which packed documents are compared with
OF_ROWS = ("BF16 sdpa", "COAT", "COAT, CUDA graphs")


def batch(documents: str, system: str, number: int, quick: bool) -> dict:
    """What a model is given. In rows, causal attention needs no borders."""
    tokens, lengths_of = DOCUMENTS[documents]
    tokens = 512 if quick else tokens
    lengths = lengths_of(tokens, number)
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(number))
    found = {"input_ids": ids.to(device()), "use_cache": False}
    if "rows" in documents:
        return found | {"input_ids": found["input_ids"].view(len(lengths), -1)}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    found["position_ids"] = positions.to(device())
    if system == "BF16 sdpa":
        return found
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device())
    if system == "COAT with a mask":
        return found | {"attention_mask": Documents(cu_seqlens, max(lengths)).mask(1, tokens)}
    found |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    return found | {"max_length_q": max(lengths), "max_length_k": max(lengths)}


def packed_row(shape: str, documents: str, system: str, quick: bool) -> dict:
    """Milliseconds and bytes of a layer, forward and backward."""
    if "flash_attention" in system and not is_flash_attn_2_available():
        return {"note": "the package flash-attn is not installed"}
    model = SYSTEMS[system](build(SHAPES[shape], LAYERS, device(), quick))
    batches = itertools.cycle([batch(documents, system, number, quick) for number in range(BATCHES)])

    def step() -> None:
        hidden = model(**next(batches)).last_hidden_state
        hidden.backward(torch.ones_like(hidden))
        model.zero_grad(set_to_none=True)

    graphed = "graphs" in system
    masked = system in MASKED and "rows" not in documents
    warm_up, timed = GRAPHED_CALLS if graphed else MASKED_CALLS if masked else CALLS
    timing = measure(step, *((1, 1) if quick else (warm_up, timed)))
    # tensors of replays pass through no hooks
    saved = float("nan") if graphed else saved_bytes(model, next(batches)) / LAYERS / 2**20
    return {"ms": timing.median / LAYERS, "saved_mib": saved, "peak_mib": timing.peak / LAYERS / 2**20}


def options(parser) -> None:
    shapes = ["llama3-8b", "qwen3-8b"]
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--documents", nargs="+", choices=DOCUMENTS, default=list(DOCUMENTS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))


@benchmark(needs_gpu=False, options=options)
def packed(arguments, table: Table) -> None:
    """Packed batches: milliseconds and bytes of a layer, forward and backward, COAT and BF16.

    Documents lie in the rows of a batch, or one after another in one row. A log-normal mix of 32,768 tokens
    has other documents in each of four batches. saved_mib: what autograd keeps of a forward; peak_mib: the
    peak over weights, gradients included, of two layers without embedding and head, halved. BF16
    flash_attention_2 is the package flash-attn, and BF16 varlen torch's variable-length attention. BF16 sdpa
    and COAT with a mask read a mask of tokens x tokens.
    """
    for shape, documents, system in itertools.product(
        arguments.shape, arguments.documents, arguments.systems
    ):
        if "rows" in documents and system not in OF_ROWS:
            continue
        row = row_or_note(lambda of=(shape, documents, system): packed_row(*of, arguments.quick))
        table.add(layer=shape, documents=documents, system=system, **row)
