"""The experts of one layer, forward and backward: ours and its peers."""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, reason
from benchmarks.common.memory import release
from benchmarks.common.spawn import Rank, join, run_ranks
from benchmarks.common.timing import measure
from coat_kernels.experts import ExpertsState, KernelGate, grouped_experts
from coat_kernels.experts.order import sort_by_expert
from megatron_ext.saved_bytes import SavedStorages


class Sizes(NamedTuple):
    """used: of a token. spread: the experts are one GPU's under expert parallelism, and their rows come from
    all GPUs. biases: GPT-OSS's, with its gate and transposed weights."""

    experts: int
    hidden: int
    ffn: int
    used: int
    spread: bool = False
    biases: bool = False


MODELS = {
    "mixtral": Sizes(8, 4096, 14336, 2),
    "qwen3_30b": Sizes(128, 2048, 768, 8),
    "olmoe": Sizes(64, 2048, 1024, 8),
    "deepseek_v3_ep32": Sizes(8, 7168, 2048, 8, spread=True),
    "gpt_oss_20b": Sizes(32, 2880, 2880, 4, biases=True),
}
TOKENS, TINY = (8192, 32768), Sizes(5, 64, 48, 2)
LOADS = {"balanced": False, "skewed": True}
# most tokens of the pass that errors are found in
ERROR_TOKENS = 4096
# of GPT-OSS's gate
LIMIT = 7.0
# of the log-normal loads of experts
SKEW = 0.8


def silu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=1)
    return F.silu(gate) * up


def clamped(both: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's gate."""
    gate, up = both[:, ::2].clamp(max=LIMIT), both[:, 1::2].clamp(-LIMIT, LIMIT)
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
    if sizes.spread:
        tokens, used = tokens * used, 1
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


class Layer(NamedTuple):
    """call: one forward. parameters: by name, the tensors whose gradients are the names'; those of several
    experts are stacked."""

    call: Callable[[], torch.Tensor]
    parameters: dict[str, torch.Tensor | list[torch.Tensor]]

    def leaves(self) -> list[torch.Tensor]:
        return [q for p in self.parameters.values() for q in (p if isinstance(p, list) else [p])]


def stock(given: Inputs, sizes: Sizes) -> Layer:
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
    return Layer(lambda: grouped_mm_experts_forward(module, t["x"], given.chosen, t["weights"]), t)


def ours(given: Inputs, sizes: Sizes, keep: str = "none") -> Layer:
    gate = KernelGate("silu")
    if sizes.biases:
        gate = KernelGate("quick_gelu", limit=LIMIT, offset=1.0, interleaved=True)
    state = ExpertsState(keep)
    options = {"gate": gate, "transposed": sizes.biases, "state": state}
    return Layer(lambda: grouped_experts(chosen=given.chosen, **options, **given.tensors), given.tensors)


class Padded:
    """Tokens in the order of experts, each expert with a multiple of 16 rows, as the peers' GEMMs need them.
    The order is made before the measured time begins."""

    def __init__(self, given: Inputs, sizes: Sizes):
        rows, self.t = sort_by_expert(given.chosen, sizes.experts), given.tensors
        padded = rows.padded(given.chosen.numel())
        self.offs, most = padded.offs, int(padded.offs[-1])
        self.of_each = padded.offs.diff(prepend=padded.offs.new_zeros(1)).tolist()
        # rows that are only padding read token 0, with weight 0
        padding = padded.row[:most] == given.chosen.numel()
        self.token = padded.token[:most].long().masked_fill(padding, 0)
        self.choice = rows.order.long()[padded.row[:most].long().masked_fill(padding, 0)]
        self.factor = (~padding).to(self.t["x"].dtype)[:, None]

    def rows(self) -> torch.Tensor:
        return self.t["x"][self.token]

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self.t["weights"].flatten()[self.choice, None] * self.factor
        return torch.zeros_like(self.t["x"]).index_add(0, self.token, rows * weights)


def torchao(given: Inputs, sizes: Sizes) -> Layer:
    """torchao's FP8 training of grouped GEMMs, a scale a row."""
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

    if sizes.biases:
        raise ValueError("torchao has no biases, and no weights stored transposed")
    t, padded = given.tensors, Padded(given, sizes)
    multiply = functools.partial(
        _to_fp8_rowwise_then_scaled_grouped_mm, offs=padded.offs, pad_token_groups_for_grouped_mm=False
    )

    def call() -> torch.Tensor:
        a = given.gate(multiply(padded.rows(), t["gate_up"].transpose(1, 2)))
        return padded.to_tokens(multiply(a, t["down"].transpose(1, 2)))

    return Layer(call, t)


def transformer_engine(given: Inputs, sizes: Sizes) -> Layer:
    """TransformerEngine's GroupedLinear, current scaling."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    t, e, padded = given.tensors, sizes.experts, Padded(given, sizes)
    options = {"bias": sizes.biases, "params_dtype": torch.bfloat16, "device": device()}
    first = te.GroupedLinear(e, sizes.hidden, 2 * sizes.ffn, **options)
    second = te.GroupedLinear(e, sizes.ffn, sizes.hidden, **options)
    parameters = {name: t[name] for name in ("x", "weights")}
    for module, name in ((first, "gate_up"), (second, "down")):
        kinds = {"weight": name, "bias": f"{name}_bias"} if sizes.biases else {"weight": name}
        for kind, source in kinds.items():
            parameters[source] = [getattr(module, f"{kind}{i}") for i in range(e)]
            for p, value in zip(parameters[source], t[source].detach(), strict=True):
                p.data.copy_(value.T if sizes.biases and kind == "weight" else value)

    def call() -> torch.Tensor:
        with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
            rows = second(given.gate(first(padded.rows(), padded.of_each)), padded.of_each)
        return padded.to_tokens(rows)

    return Layer(call, parameters)


ROWS: dict[str, Callable[[Inputs, Sizes], Layer]] = {
    "transformers, BF16 grouped_mm": stock,
    "COAT": ours,
    "COAT, weights cached": functools.partial(ours, keep="fp8"),
    "torchao FP8": torchao,
    "TransformerEngine FP8": transformer_engine,
}
# in a process of its own: it loads libraries that others must not share
APART = "TransformerEngine FP8"


def eager(given: Inputs) -> dict[str, torch.Tensor]:
    """The output, as "y", and the gradients, in FP32, expert by expert."""
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
    return {"y": y.detach()} | dict(
        zip(t, torch.autograd.grad(y, list(t.values()), given.grad.float()), strict=True)
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The RMS of the difference over that of `expected`, summed on the device."""
    return ((found - expected).norm(dtype=torch.float32) / expected.norm(dtype=torch.float32)).item()


def errors_of(name: str, given: Inputs, sizes: Sizes, wanted: dict) -> dict:
    """The error of the output, and of each gradient."""
    layer = ROWS[name](given, sizes)
    y = layer.call()
    row = {"y_error": relative(y, wanted["y"])}
    found = iter(torch.autograd.grad(y, layer.leaves(), given.grad))
    grads = {
        kind: torch.stack([next(found) for _ in p]) if isinstance(p, list) else next(found)
        for kind, p in layer.parameters.items()
    }
    # weights of the other layout, which those with equal sides do not show
    turned = grads["gate_up"].shape != wanted["gate_up"].shape
    for kind, grad in grads.items():
        grad = grad.transpose(1, 2) if turned and kind in ("gate_up", "down") else grad
        row[f"{kind}_error"] = relative(grad, wanted[kind])
    return row


def time_of(name: str, given: Inputs, sizes: Sizes) -> dict:
    layer = ROWS[name](given, sizes)
    leaves = layer.leaves()

    def step() -> None:
        layer.call().backward(given.grad)
        for p in leaves:
            p.grad = None

    known = {p.untyped_storage().data_ptr() for p in (*leaves, *given.tensors.values())}
    kept = SavedStorages(known.__contains__)
    with kept.counting():
        y = layer.call()
    saved = kept.nbytes / 1e6
    del y
    timing = measure(step, warmup=3, repeats=10)
    times = {"ms": timing.median, "ms_p20": timing.low, "ms_p80": timing.high}
    return times | {"peak_mb": timing.peak / 1e6, "saved_mb": saved}


class Case(NamedTuple):
    model: str
    sizes: Sizes
    tokens: int
    skewed: bool


def rows_of(case: Case, names: list[str]) -> Iterator[dict]:
    """The rows of these layers. A layer that fails gives a note."""
    given = inputs_of(case.sizes, case.tokens, case.skewed)
    few = inputs_of(case.sizes, min(case.tokens, ERROR_TOKENS), case.skewed)
    wanted = eager(few)
    for name in names:
        start = time.perf_counter()
        row = {"model": case.model, "tokens": case.tokens, "skewed": case.skewed, "layer": name}
        try:
            row |= time_of(name, given, case.sizes) | errors_of(name, few, case.sizes, wanted)
        except ImportError:
            row |= {"note": "not installed"}
        # whatever a peer stumbles over, the others go on
        except Exception as error:
            row |= {"note": reason(error)}
        # not in the handler: the traceback holds the tensors
        release()
        yield row | {"seconds": time.perf_counter() - start}


def apart(place: Rank, cases: list[Case]) -> Iterator[dict]:
    join(place)
    for case in cases:
        yield from rows_of(case, [APART])
        release()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rows", nargs="+", help="only rows with one of these in their name")


@benchmark(needs_gpu=False, options=options)
def experts(arguments, table: Table) -> None:
    """The experts of one MoE layer, forward and backward with all gradients, balanced and skewed.

    Columns: ms (median, 20th and 80th percentiles); peak_mb, over what is held before a pass; saved_mb, what
    autograd keeps without parameters and input; errors of the output and of each gradient, relative RMS
    against FP32, of a pass of at most 4,096 tokens; the seconds that a row took, with compilation.
    deepseek_v3_ep32 is one of 32 GPUs, which gets `used` rows for each of its own tokens. Cached weights are
    those of the later micro-batches of a step. Skewed: loads are log-normal with sigma 0.8. The peers' rows
    begin with tokens whose order is known, and exclude the time to find it. Without a GPU, or with --quick: a
    tiny layer; on a CPU times mean nothing. Whole models:
    `python -m benchmarks models --shape mixtral --layers 4`.
    """
    models = {name: MODELS[name] for name in arguments.model}
    tokens = arguments.tokens
    if arguments.quick or not torch.cuda.is_available():
        models, tokens = {"tiny": TINY, "tiny, biases": TINY._replace(biases=True)}, [100]
    cases = [
        Case(name, sizes, count, LOADS[load])
        for name, sizes in models.items()
        for count in tokens
        for load in arguments.loads
    ]
    names = [name for name in ROWS if not arguments.rows or any(part in name for part in arguments.rows)]
    for case in cases:
        for row in rows_of(case, [name for name in names if name != APART]):
            table.add(**row)
        release()
    if APART in names:
        # one process for all of them, because it starts slowly
        _, failure = run_ranks(apart, 1, cases, take=lambda row: table.add(**row))
        if failure:
            table.add(layer=APART, note=failure)
