"""Models that learn, by name, for their moments."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import finetune
from benchmarks.common.training import LARGE, LR, SMALL, gpt
from benchmarks.converge import corpus, prepare_text
from benchmarks.converge.recipe import RECIPES, TINY
from benchmarks.finetune import pretrained
from benchmarks.numerics import OUTLIERS
from coat_launch.batches import Split
from coat_launch.data import load_corpus

SEED = 1234
# ids of the model most of whose tokens are rare, and sequences of a step
MANY_IDS, FEW_SEQUENCES = 16384, 4
# bytes of text where ids are not bytes: seven million tokens or more, all that any model takes
TEXT = 1 << 25


class Pupil(NamedTuple):
    """A model and what it learns from."""

    model: torch.nn.Module
    text: Split
    batch_size: int
    lr: float = LR


def small(arguments) -> Pupil:
    """The quickstart's GPT, on bytes, 8 x 128 in a step."""
    text = load_corpus(seq_length=SMALL.seq_length, seed=SEED)
    return Pupil(gpt(SMALL, text.vocab_size, SEED), text.train, SMALL.batch_size)


def large(arguments) -> Pupil:
    """The GPT of 12 layers, h 768, on bytes, 8 x 512 in a step."""
    setting = SMALL if arguments.quick else LARGE._replace(batch_size=8)
    text = load_corpus(seq_length=setting.seq_length, seed=SEED)
    return Pupil(gpt(setting, text.vocab_size, SEED), text.train, setting.batch_size)


def rare(arguments) -> Pupil:
    """The quickstart's GPT with 16,384 ids, 4 x 128 in a step: most rows of the embedding seldom get
    gradients."""
    recipe = TINY if arguments.quick else RECIPES["125m"]._replace(vocabulary=MANY_IDS, text=TEXT)
    setting = SMALL._replace(batch_size=FEW_SEQUENCES)
    data, _ = prepare_text(arguments, recipe)
    text = corpus.load(data, setting.seq_length, SEED)
    return Pupil(gpt(setting, text.vocab_size, SEED), text.train, setting.batch_size)


@torch.no_grad()
def outliers(arguments) -> Pupil:
    """The quickstart's GPT, in which four channels after every norm are 30 to 100 times as large. The
    matrices' columns for them are smaller by that factor, so it starts as the same function: their gradients
    are 30 to 100 times as large, second moments up to 10,000 times."""
    pupil = small(arguments)
    factors = torch.ones_like(pupil.model.decoder.final_layernorm.weight)
    for channel, factor in OUTLIERS.items():
        factors[channel] = factor
    pairs = [(pupil.model.decoder.final_layernorm, pupil.model.output_layer)]
    for layer in pupil.model.decoder.layers:
        pairs += [(layer.input_layernorm, layer.self_attention.linear_qkv)]
        pairs += [(layer.pre_mlp_layernorm, layer.mlp.linear_fc1)]
    for norm, linear in pairs:
        norm.weight *= factors
        linear.weight /= factors
    return pupil


def smollm2(arguments) -> Pupil:
    """SmolLM2-135M-Instruct (transformers), or --weights, in FP32, 8 x 512 tokens of its own in a step."""
    start = finetune.start_of(arguments)
    recipe = finetune.QUICK if arguments.quick else finetune.FULL._replace(text=TEXT, seq_length=512)
    recipe = recipe._replace(vocabulary=start.config.vocab_size)
    data, _ = prepare_text(arguments, recipe, start.tokenizer)
    text = corpus.load(data, recipe.seq_length, SEED)
    return Pupil(pretrained.hugging_face(start).float(), text.train, 8, recipe.lr)


class Known(NamedTuple):
    build: Callable[..., Pupil]
    ages: tuple[int, ...]
    """Steps after which codes start, unless --after says otherwise."""


MODELS = {
    "small": Known(small, (300,)),
    "rare": Known(rare, (300,)),
    "outliers": Known(outliers, (300,)),
    "125m": Known(large, (300, 1000, 3000)),
    "smollm2": Known(smollm2, (300,)),
}
# those of a size for a CPU
OF_A_CPU = list(MODELS)[:3]
