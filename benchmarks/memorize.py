"""How fast a few steps learn one batch by heart: BF16, COAT in parts, and BF16 with rounded operands."""

import functools

import torch

import coat_ds
from benchmarks.common.harness import Table, benchmark
from benchmarks.common.memory import release
from benchmarks.common.rounding import BACKWARD, FORWARD, round_operands
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.tensorwise import quantize_tensor, tensor_amax

TOKENS = 4, 512
# hidden size, feed-forward, layers, vocabulary
SIZES, QUICK = (1024, 2816, 8, 8192), (64, 128, 2, 256)
# the arguments of convert(), or None for stock layers; and whether CoatAdamW steps
VARIANTS: dict[str, tuple[dict | None, bool]] = {
    "BF16": (None, False),
    "COAT states": (None, True),
    "COAT layers": ({}, False),
    "COAT layers, E4M3 gradients": ({"backward_format": "e4m3"}, False),
    "COAT": ({}, True),
    "COAT, E4M3 gradients": ({"backward_format": "e4m3"}, True),
}
# the operands of linear layers that are rounded to FP8 and back in stock layers
ROUNDED = {
    "rounded: forward": FORWARD,
    "rounded: forward input": ("x",),
    "rounded: forward weight": ("weight",),
    "rounded: backward": BACKWARD,
    "rounded: all": FORWARD + BACKWARD,
}


def _rounded(chosen: tuple[str, ...], layer: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """`x` rounded to E4M3, a gradient to E5M2, if `chosen` has the name of the operand."""
    if name not in chosen:
        return x
    x = x.contiguous()
    q = quantize_tensor(x, tensor_amax(x), E5M2 if name.endswith("grad") else E4M3)
    return (q.rows.float() * q.scale).to(x.dtype)


def options(parser) -> None:
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-5, 3e-4])


def _model(family: str, sizes: tuple[int, ...], seed: int, device: torch.device) -> torch.nn.Module:
    import transformers

    hidden, wide, layers, vocabulary = sizes
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        vocab_size=vocabulary,
        use_cache=False,
    )
    # FP32 masters, as all systems have them here, begin at the BF16 weights
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def losses(family: str, variant: str, seed: int, lr: float, steps: int, quick: bool) -> list[float]:
    """The loss before each step and after the last one, nats a token; last, that of the same weights in stock
    layers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = QUICK if quick else SIZES
    model = _model(family, sizes, seed, device)
    activations, states = VARIANTS.get(variant, (None, False))
    if activations is not None:
        coat_ds.convert(model, activations)
    if variant in ROUNDED:
        round_operands(model, functools.partial(_rounded, ROUNDED[variant]))
    weights = list(model.parameters())
    masters = [w.detach().float().requires_grad_() for w in weights]
    adamw = coat_ds.CoatAdamW if states else torch.optim.AdamW
    optimizer = adamw(masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(sizes[3], TOKENS, device=device)
    found = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        found.append(loss.item())
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
    with torch.no_grad():
        found.append(model(input_ids=tokens, labels=tokens).loss.item())
        if activations is not None:
            coat_ds.unconvert(model)
        if variant in ROUNDED:
            round_operands(model, functools.partial(_rounded, ()))
        found.append(model(input_ids=tokens, labels=tokens).loss.item())
    return found


@benchmark(needs_gpu=False, options=options)
def memorize(arguments, table: Table) -> None:
    """How fast a few steps learn one batch by heart: BF16, COAT whole and in parts, BF16 with roundings.

    Layers as Mistral's and Qwen3's, h 1024, 8 layers, random weights, one batch of 4 x 512 random tokens in
    every step, FP32 masters, AdamW 0.9, 0.95, weight decay 0.1, clip 1.0, a constant learning rate. "rounded"
    are stock layers in which linear layers round operands to FP8 before a BF16 GEMM. Columns:
    - loss_start, loss: before the first and after the last step, nats a token, in the layers that train;
    - over_bf16: the last loss above BF16's of the same seed; over_bf16_mean: that, mean over all steps;
    - over_bf16_stock: the last loss above BF16's, of the final weights in stock layers.
    """
    for family in ("Mistral", "Qwen3"):
        for lr in arguments.lr:
            for seed in range(1, arguments.seeds + 1):
                stock: list[float] = []
                for variant in (*VARIANTS, *ROUNDED):
                    found = losses(family, variant, seed, lr, arguments.steps, arguments.quick)
                    release()
                    stock = stock or found
                    over = [a - b for a, b in zip(found, stock, strict=True)]
                    table.add(
                        family=family,
                        lr=lr,
                        seed=seed,
                        system=variant,
                        loss_start=found[0],
                        loss=found[-2],
                        over_bf16=over[-2],
                        over_bf16_mean=sum(over[:-1]) / len(over[:-1]),
                        over_bf16_stock=over[-1],
                    )
