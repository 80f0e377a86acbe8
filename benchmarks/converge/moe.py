"""A mixture of experts of transformers with random weights; COAT converts it in the engine."""

import torch

from benchmarks.common.environment import device
from benchmarks.common.training import loss_of
from benchmarks.converge.measure import load_text, saved_by_layers
from benchmarks.converge.recipe import Recipe, Run, Setup, Task
from benchmarks.finetune.pretrained import TokenLosses
from coat_launch.data import padded_vocab_size

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
TINY_SIZES = SIZES | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
}
RECIPE = Recipe(
    None,
    vocabulary=8192,
    seq_length=512,
    batch=32,
    micro_batch=32,
    held_out=256,
    # 300 steps
    tokens=300 * 32 * 512,
    text=64 << 20,
    lr=1e-3,
)


def build(setup: Setup, run: Run, coat, text) -> TokenLosses:
    """Qwen3-MoE of `SIZES`, or of `TINY_SIZES` for another recipe than `RECIPE`."""
    import transformers

    sizes = SIZES if setup.recipe.vocabulary == RECIPE.vocabulary else TINY_SIZES
    vocabulary = padded_vocab_size(text.vocab_size)
    config = transformers.Qwen3MoeConfig(**sizes, vocab_size=vocabulary, pad_token_id=None)
    torch.manual_seed(run.seed)
    with device():
        return TokenLosses(transformers.Qwen3MoeForCausalLM(config).bfloat16())


MIXTURE = Task(build, load_text, loss_of, saved_by_layers)
