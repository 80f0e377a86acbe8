"""The experts of one layer, forward and backward: ours and its peers."""

import argparse
import functools
import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, reason
from benchmarks.common.memory import release
from benchmarks.common.spawn import Rank, join, run_ranks
from benchmarks.common.timing import measure
from coat_ds.saved_bytes import SavedStorages
from coat_kernels.agreement import rel_rms
from coat_kernels.experts import ExpertsState, KernelGate, OwnGate, grouped_experts
from coat_kernels.experts.order import by_expert
from coat_kernels.weights import WeightCache


class Sizes(NamedTuple):
    """of: the share of a token's experts that this GPU has; biases: GPT-OSS's, with its gate and transposed
    weights."""

    experts: int
    hidden: int
    ffn: int
    used: int
    of: float = 1.0
    biases: bool = False


MODELS = {
    "mixtral": Sizes(8, 4096, 14336, 2),
    "qwen3_30b": Sizes(128, 2048, 768, 8),
    "olmoe": Sizes(64, 2048, 1024, 8),
    "deepseek_v3_ep32": Sizes(8, 7168, 2048, 8, of=1 / 32),
    "gpt_oss_20b": Sizes(32, 2880, 2880, 4, biases=True),
}
TOKENS, TINY = (32768, 8192), Sizes(5, 64, 48, 2)
# of the log-normal loads of experts
SKEW = 0.8


def silu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=1)
    return F.silu(gate) * up


def clamped(both: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's gate."""
    gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


class Inputs(NamedTuple):
    """The tensors of a layer, whose gradients are all needed, the experts of each token and the gradient of
    the output. Under expert parallelism with more GPUs a token has one expert here."""

    tensors: dict[str, torch.Tensor]
    chosen: torch.Tensor
    grad: torch.Tensor
    gate: Callable[[torch.Tensor], torch.Tensor]


def inputs_of(sizes: Sizes, tokens: int, skewed: bool) -> Inputs:
    generator = torch.Generator(device()).manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device=device())
    e, h, f, used = sizes[:4]
    if sizes.of < 1:
        tokens, used = round(tokens * used * sizes.of), 1
    # Gumbel noise: a choice without replacement by these loads
    noise = torch.empty(tokens, e, device=device()).exponential_(generator=generator).log()
    chosen = (SKEW * skewed * draw(e) - noise).topk(used).indices
    tensors = {
        "x": draw(tokens, h),
        "weights": draw(tokens, used).sigmoid(),
        "gate_up": draw(e, h, 2 * f) / h**0.5 if sizes.biases else draw(e, 2 * f, h) / h**0.5,
        "down": draw(e, f, h) / f**0.5 if sizes.biases else draw(e, h, f) / f**0.5,
    }
    if sizes.biases:
        tensors |= {"gate_up_bias": draw(e, 2 * f), "down_bias": draw(e, h)}
    tensors = {name: torch.nn.Parameter(t.bfloat16()) for name, t in tensors.items()}
    return Inputs(tensors, chosen, draw(tokens, h).bfloat16(), clamped if sizes.biases else silu)


def stock(given: Inputs, sizes: Sizes) -> Callable[[], torch.Tensor]:
    """transformers' experts by grouped BF16 GEMMs (`grouped_mm`)."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    t = given.tensors
    module = torch.nn.Module()
    module.num_experts = sizes.experts
    module._is_expert_parallel = module.has_post_expert_norm = False
    module.has_gate, module.has_bias, module.is_transposed = True, sizes.biases, sizes.biases
    module._apply_gate = given.gate
    for name, p in t.items():
        if name not in ("x", "weights"):
            setattr(module, name.replace("gate_up", "gate_up_proj").replace("down", "down_proj"), p)
    return lambda: grouped_mm_experts_forward(module, t["x"], given.chosen, t["weights"])


def ours(given: Inputs, sizes: Sizes, keep: str = "none") -> Callable[[], torch.Tensor]:
    gate = OwnGate(clamped) if sizes.biases else KernelGate("silu")
    state = ExpertsState(WeightCache(keep), WeightCache(keep))
    options = {"gate": gate, "transposed": sizes.biases, "state": state}
    return lambda: grouped_experts(chosen=given.chosen, **options, **given.tensors)


def torchao(given: Inputs, sizes: Sizes) -> Callable[[], torch.Tensor]:
    """torchao's FP8 grouped GEMM, a scale a row, between transformers' permutations."""
    from torchao.prototype.moe_training.scaled_grouped_mm import _scaled_grouped_mm

    if sizes.biases:
        raise ValueError("torchao's rows are measured without biases")
    t, chosen = given.tensors, given.chosen
    order, _, ends = by_expert(chosen, sizes.experts)
    token = order // chosen.shape[1]

    def call() -> torch.Tensor:
        a = silu(_scaled_grouped_mm(t["x"][token], t["gate_up"].transpose(1, 2), offs=ends))
        rows = _scaled_grouped_mm(a, t["down"].transpose(1, 2), offs=ends)
        return torch.zeros_like(t["x"]).index_add(0, token, rows * t["weights"].flatten()[order, None])

    return call


def transformer_engine(given: Inputs, sizes: Sizes) -> Callable[[], torch.Tensor]:
    """TransformerEngine's GroupedLinear, current scaling; rows are padded to multiples of 16."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    if sizes.biases:
        raise ValueError("TransformerEngine's rows are measured without biases")
    t, chosen, e = given.tensors, given.chosen, sizes.experts
    expert, order = chosen.flatten().sort(stable=True)
    of_each = torch.bincount(expert, minlength=e).tolist()
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": device()}
    first = te.GroupedLinear(e, sizes.hidden, 2 * sizes.ffn, **options)
    second = te.GroupedLinear(e, sizes.ffn, sizes.hidden, **options)
    for module, name in ((first, "gate_up"), (second, "down")):
        for i in range(e):
            setattr(module, f"weight{i}", torch.nn.Parameter(t[name].detach()[i].clone()))
    pad, unpad = te.Fp8Padding(e), te.Fp8Unpadding(e)
    token = order // chosen.shape[1]

    def call() -> torch.Tensor:
        with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
            rows, padded = pad(t["x"][token], of_each)
            rows = unpad(second(silu(first(rows, padded)), padded), of_each)
        return torch.zeros_like(t["x"]).index_add(0, token, rows * t["weights"].flatten()[order, None])

    return call


ROWS: dict[str, Callable[[Inputs, Sizes], Callable[[], torch.Tensor]]] = {
    "transformers, BF16 grouped_mm": stock,
    "COAT": ours,
    "COAT, weights cached": functools.partial(ours, keep="fp8"),
    "torchao FP8": torchao,
    "TransformerEngine FP8": transformer_engine,
}
# in a process of its own: it loads libraries that others must not share
APART = "TransformerEngine FP8"


def eager(given: Inputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output and the gradients in FP32, expert by expert."""
    t, chosen = given.tensors, given.chosen
    transposed = "down_bias" in t
    y = torch.zeros(t["x"].shape, device=device())
    for i in range(len(t["down"])):
        token, place = (chosen == i).nonzero(as_tuple=True)
        first, second = (t[name][i].float() for name in ("gate_up", "down"))
        both = t["x"][token].float() @ (first if transposed else first.T)
        rows = given.gate(both + t["gate_up_bias"][i].float() if transposed else both)
        rows = rows @ (second if transposed else second.T)
        if transposed:
            rows = rows + t["down_bias"][i].float()
        y = y.index_add(0, token, t["weights"][token, place, None].float() * rows)
    return y.detach(), list(torch.autograd.grad(y, list(t.values()), given.grad.float()))


def row_of(name: str, given: Inputs, sizes: Sizes, wanted: tuple | None) -> dict:
    call = ROWS[name](given, sizes)
    # TransformerEngine's weights are its own parameters
    leaves = [p for n, p in given.tensors.items() if name != APART or n in ("x", "weights")]

    def step() -> None:
        call().backward(given.grad)
        for p in leaves:
            p.grad = None

    known = {p.untyped_storage().data_ptr() for p in given.tensors.values()}
    kept = SavedStorages(known.__contains__)
    with kept.counting():
        y = call()
    row = {"saved_mb": kept.nbytes / 1e6}
    if wanted is not None:
        expected, gradients = wanted
        row["y_error"] = rel_rms(y, expected)
        found = torch.autograd.grad(y, leaves, given.grad)
        for (n, _), a, e in zip(given.tensors.items(), found, gradients, strict=False):
            row[f"{n}_error"] = rel_rms(a, e)
        del found
    del y
    gc.collect()
    timing = measure(step, warmup=5, repeats=20)
    times = {"ms": timing.median, "ms_p20": timing.low, "ms_p80": timing.high}
    return times | {"peak_mb": timing.peak / 1e6} | row


def apart(place: Rank, sizes: Sizes, tokens: int, skewed: bool) -> Iterator[dict]:
    join(place)
    given = inputs_of(sizes, tokens, skewed)
    yield row_of(APART, given, sizes, eager(given))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rows", nargs="+", help="only rows with one of these in their name")


@benchmark(needs_gpu=False, options=options)
def experts(arguments, table: Table) -> None:
    """The experts of one MoE layer, forward and backward with all gradients, balanced and skewed.

    Columns: ms (median, 20th and 80th percentiles); saved_mb, what autograd keeps without parameters and
    input; peak_mb, over what is held before a pass; errors of the output and of each gradient, relative RMS
    against FP32. deepseek_v3_ep32 has the rows that one of 32 GPUs gets. Cached weights are those of the
    later micro-batches of a step. Skewed: loads are log-normal with sigma 0.8. Without a GPU, or with
    --quick: a tiny layer; on a CPU times mean nothing.
    """
    models = {name: MODELS[name] for name in arguments.model}
    tokens = arguments.tokens
    if arguments.quick or not torch.cuda.is_available():
        models, tokens = {"tiny": TINY}, [100]
    for (name, sizes), count in ((m, n) for m in models.items() for n in tokens):
        for skewed in (False, True):
            given = inputs_of(sizes, count, skewed)
            wanted = eager(given)
            for row in ROWS:
                if arguments.rows and not any(part in row for part in arguments.rows):
                    continue
                head = {"model": name, "tokens": count, "skewed": skewed, "layer": row}
                if row == APART:
                    found, failure = run_ranks(apart, 1, sizes, count, skewed)
                    table.add(**head, **(found[0][0] if found[0] else {"note": failure}))
                    continue
                try:
                    table.add(**head, **row_of(row, given, sizes, wanted))
                # whatever a peer stumbles over, the others go on
                except Exception as error:
                    table.add(**head, note=reason(error))
                release()
            del given, wanted
            release()
