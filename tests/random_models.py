"""Random small models of transformers, compared with stock ones.

    python -m tests.random_models [--seconds N] [--seed S]

A seed is a case: a model, its inputs and its options. Cases S, S + 1, ... run until the time is over, one at
least; S is random unless it is given. A failure ends with the one line that repeats that case. Where there is
no GPU the references compute, and nothing is recorded as CUDA graphs.
"""

import argparse
import functools
import gc
import logging
import random
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from unittest import mock

import torch

import coat_ds
from coat_ds.layers.modules import decoder_layer
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_kernels.graphs import memory, verify
from coat_kernels.graphs.warm_up import WARM_UP
from tests.coat_ds.layers.measures import fp8_bound, fp8_forward_bound, placed, relative, run
from tests.families import FAMILIES
from tests.kernels.agreement import ROUNDING

# none with experts: FP8's noise before a router sends tokens to other experts, and no bound of rounding holds
NAMES = "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "opt"
# the learning rate of the steps between replays
RATE = 1e-3
# What is not FP8 (norms, attention, the residual, the head) COAT rounds to BF16 as often as the stock model
# does, so its error is that of the stock model and FP8's, in quadrature. Both are measured once: their sizes
# differ by half of each other at most in models as small as these.
OF_BF16 = 1.5
# common options are drawn more often
OPTIONS = {
    "attention_format": ("bf16", "sqrt8", "recompute"),
    "saved_format": ("sqrt8", "sqrt8", "e4m3"),
    "backward_format": ("e5m2", "e5m2", "e4m3"),
    "weight_cache": ("none", "fp8"),
    "fast_accumulation": ("forward", "all", "none"),
}


@dataclass
class Case:
    """A case, as drawn from a seed."""

    seed: int
    family: str
    fields: dict
    activations: dict
    rows: int
    tokens: int
    # padding tokens of the first sequence, on the left and on the right
    padding: tuple[int, int]
    recompute: str

    def build(self, dtype: torch.dtype = torch.bfloat16, activations: dict | None = None):
        """A model with the same weights each time, rounded to BF16."""
        model = FAMILIES[self.family].build(seed=self.seed, **self.fields).to(device(), dtype)
        if activations is not None:
            coat_ds.convert(model, self.activations | activations)
        if activations is not None and self.recompute != "no":
            model.gradient_checkpointing_enable({"use_reentrant": self.recompute == "reentrant"})
            model.enable_input_require_grads()
        return model

    def batch(self, number: int) -> dict:
        found = FAMILIES[self.family].batch(1000 * self.seed + number, self.rows, self.tokens)
        left, right = self.padding
        if left or right:
            mask = torch.ones_like(found["input_ids"])
            mask[0, :left], mask[0, self.tokens - right :] = 0, 0
            found |= {"attention_mask": mask, "labels": found["labels"].masked_fill(mask == 0, -100)}
        return placed(found, device())


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def drawn(seed: int) -> Case:
    """Draws a case. On a GPU, sizes are larger."""
    choose, on_gpu = random.Random(seed), device() == "cuda"
    family = choose.choice(NAMES)
    d = choose.choice((32, 48, 64, 80, 96, 112, 128, 160, 192, 256) if on_gpu else (32, 48, 64))
    heads = choose.choice((1, 2, 3, 4, 6) if on_gpu else (2, 3, 4))
    groups = choose.choice([n for n in range(1, heads + 1) if heads % n == 0])
    hidden, inner, layers = heads * d, 16 * choose.randint(4, 40 if on_gpu else 16), choose.randint(1, 3)
    known = FAMILIES[family].fields
    if family == "gpt2":
        fields = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": inner}
    else:
        fields = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
        fields |= {"ffn_dim" if family == "opt" else "intermediate_size": inner}
    if family == "opt":
        fields["word_embed_proj_dim"] = hidden
    if "num_key_value_heads" in known:
        fields["num_key_value_heads"] = groups
    if "head_dim" in known:
        # the product of heads and head_dim need not be the hidden size
        fields |= {"head_dim": d, "hidden_size": 16 * heads * choose.randint(2, 4)}
    if "query_pre_attn_scalar" in known:
        fields["query_pre_attn_scalar"] = d
    activations = {name: choose.choice(values) for name, values in OPTIONS.items()}
    return Case(
        seed,
        family,
        fields,
        activations,
        rows=choose.randint(1, 4),
        tokens=choose.choice([n for n in range(17, 300 if on_gpu else 90) if n % 8]),
        padding=choose.choice(((0, 0), (0, 0), (0, 5), (7, 0), (3, 6))),
        recompute=choose.choice(("no", "no", "no", "reentrant", "not reentrant")),
    )


def within(what: str, error: float, most: float) -> None:
    # NaN fails this comparison too
    assert error < most, f"{what}: off by {error:.4g}, the bound is {most:.4g}"


def check(case: Case) -> None:
    """Raises AssertionError if an error of a model is larger than its roundings allow."""
    # graphs that earlier cases found wrong do not count here
    memory._distrusted.clear()
    model = case.build(activations={"cuda_graphs": False})
    conversion, batch = coat_ds.conversion_of(model), case.batch(0)
    products, fused = len(conversion.converted["linear"]), conversion.converted["layer"]
    assert products, f"nothing multiplies in FP8: {conversion.left}"
    # the input of each GEMM is saved in 8 bits; gradients of the inputs of norms and activations have two
    # roundings of the saved values
    saved = products * (2 * ROUNDING[case.activations["saved_format"]]) ** 2
    bound = (fp8_bound(products) ** 2 + saved) ** 0.5
    exact, stock = case.build(torch.float32), case.build()
    loss, expected = run(exact, batch)
    stock_loss, of_bf16 = run(stock, batch)
    if not all(g.isfinite().all() for g in of_bf16.values()):
        # torch's own attention on Hopper gives NaN for tokens that attend to nothing
        stock_loss, of_bf16 = loss, expected
    with torch.no_grad():
        spread = exact(**batch).logits.std().item()

    found_loss, found = run(model, batch)
    with mock.patch.object(decoder_layer, "why_not_fused", lambda *_: "asked for"):
        other_loss, by_modules = run(model, batch)
    loss_bound = (
        2**0.5 * fp8_forward_bound(products) * spread + 2**-8 * loss + OF_BF16 * abs(stock_loss - loss)
    )
    for what, value, gradients in (("fused", found_loss, found), ("modules", other_loss, by_modules)):
        within(f"{what}: loss", abs(value - loss), loss_bound)
        check_gradients(what, gradients, expected, of_bf16, bound, batch["input_ids"].numel())
    if fused:
        check_fused(found, by_modules, expected)
    evaluate(case, model, exact, products, spread)
    if device() == "cuda":
        replay(case, model, bool(fused))


def check_gradients(what: str, found: dict, expected: dict, of_bf16: dict, bound: float, tokens: int) -> None:
    """Compares all gradients together, and each one, with the gradients in FP32 and in BF16."""
    whole = sum(g.square().sum() for g in expected.values()).sqrt().item()
    error, most = relative(found, expected), (bound**2 + (OF_BF16 * relative(of_bf16, expected)) ** 2) ** 0.5
    within(f"{what}: gradients", error, most)
    for name, exactly in expected.items():
        # the terms of one parameter may cancel, as in the softmax's gradient: two such errors. Where
        # everything cancels (biases of keys) the error is what remains of larger gradients
        size, off = max(exactly.norm().item(), 0.02 * whole), found[name] - exactly
        stock = (of_bf16[name] - exactly).norm().item()
        most = 2 * ((bound * size) ** 2 + (OF_BF16 * stock) ** 2) ** 0.5
        within(f"{what}: gradient of {name}", off.norm().item(), most)
        # Rounding to nearest rounds up as often as down, so the contribution of a token to a gradient is as
        # often too long as too short. Over n tokens the part of the error along the gradient is sqrt(n) times
        # smaller. A wrong scale is an error along the gradient only. There are many parameters: three times
        # that.
        along = (off.flatten() @ exactly.flatten()).abs().item() / max(exactly.norm().item(), 1e-30)
        within(f"{what}: length of the gradient of {name}", along, 3 * most / tokens**0.5)


def check_fused(found: dict, by_modules: dict, expected: dict) -> None:
    """Fused and separate layers share the inputs' codes. They differ by the scale of weights that are joined
    in one GEMM, and by rotations in FP32: by at most two independent errors."""
    errors = [relative(gradients, expected) for gradients in (found, by_modules)]
    apart = relative(found, by_modules)
    assert apart, "layers that can run as fused blocks did not"
    within("fused and modules", apart, 1.1 * sum(e**2 for e in errors) ** 0.5)


def evaluate(case: Case, model, exact, products: int, spread: float) -> None:
    """The last tokens' logits, with a cache of the tokens before."""
    if any(case.padding):
        return
    ids = case.batch(1)["input_ids"]
    model.eval()
    with torch.no_grad():
        past = model(input_ids=ids[:, :-2], use_cache=True).past_key_values
        logits = model(input_ids=ids[:, -2:], past_key_values=past, use_cache=True).logits.float()
        expected = exact.eval()(input_ids=ids).logits[:, -2:]
    model.train(), exact.train()
    error = (logits - expected).square().mean().sqrt().item()
    within("logits behind a cache", error, 2 * fp8_forward_bound(products) * spread)


def results_of(model, batch: dict) -> list[torch.Tensor]:
    loss, gradients = run(model, batch)
    return [torch.tensor(loss), *gradients.values()]


def replay(case: Case, eager, fused: bool) -> None:
    """Steps of a model with CUDA graphs, against the eager passes of `eager`, compared as in verify.py."""
    graphed = case.build(activations={"cuda_graphs": True})
    for number in range(WARM_UP + 3):
        batch = case.batch(10 + number)
        replayed = results_of(graphed, batch)
        distance, _ = verify.compare(replayed, functools.partial(results_of, eager, batch), bool)
        assert distance is None, f"step {number}: replays are {distance:.3g} off"
        with torch.no_grad():
            for p, other in zip(graphed.parameters(), eager.parameters(), strict=True):
                if other.grad is not None:
                    other.sub_(RATE * other.grad)
                    p.copy_(other)
    assert not memory._distrusted, memory._distrusted
    counts = [
        layer.graphs.count for m in graphed.modules() if hasattr(layer := converted_forward(m), "graphs")
    ]
    if fused and case.recompute == "no":
        assert counts and all(counts), f"expected a graph of each layer, found {counts}"


def main(words: list[str] | None = None) -> int:
    """Returns 1 after a failure; the last line then repeats the case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(words)
    first = seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"random models from seed {seed}, for {options.seconds:.0f} s on {device()}", flush=True)
    end = time.monotonic() + options.seconds
    while seed == first or time.monotonic() < end:
        case = drawn(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(case)
        # an error of CUDA or of transformers is a failure, too
        except Exception:
            traceback.print_exc()
            print(
                f"{case}\nto repeat it: python -m tests.random_models --seconds 0 --seed {seed}", flush=True
            )
            return 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        seed += 1
    print(f"{seed - first} models are within their bounds")
    return 0


if __name__ == "__main__":
    # convert logs what it did to each model
    logging.disable(logging.WARNING)
    sys.exit(main())
