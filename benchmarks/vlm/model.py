"""A small LLaVA of transformers, called with pictures: SigLIP's tower, a projector, Llama's decoder."""

from collections import Counter

import torch
import torch.nn.functional as F

from benchmarks.common.environment import device
from benchmarks.converge.recipe import Run, Setup
from benchmarks.vlm.pictures import PATCH, VOCABULARY, PictureBatch, PictureData
from benchmarks.vlm.sizes import Sizes, Stack

# parts of the model, by the prefix of their modules' names
PARTS = {"tower": "model.vision_tower.", "projector": "model.multi_modal_projector.", "decoder": "model."}


def build(sizes: Sizes, setup: Setup, run: Run, coat, data: PictureData) -> torch.nn.Module:
    """transformers' model with random weights; COAT converts it in the engine."""
    import transformers

    def stack(of: Stack) -> dict[str, int]:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        return dict(zip(names, of, strict=True))

    tower = {"model_type": "siglip_vision_model", "num_channels": 1, "vision_use_head": False}
    tower |= {"image_size": sizes.image, "patch_size": sizes.patch, **stack(sizes.tower)}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": sizes.sequence}
    text |= {"use_cache": False, **stack(sizes.decoder)}
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=PATCH,
        vision_feature_layer=-1,
        # the tower has no token of the whole picture that could be left out
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(run.seed)
    with device():
        return transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16)


def logits(model: torch.nn.Module, batch: PictureBatch) -> torch.Tensor:
    """[b, digits, vocabulary], FP32, of the digits that are read."""
    where = next(model.parameters()).device
    pixels = (batch.pixels.to(where)[:, None].float() / 127.5 - 1).bfloat16()
    found = model(input_ids=batch.tokens.to(where), pixel_values=pixels, use_cache=False).logits
    return found[:, -batch.labels.shape[1] :].float()


def loss(model: torch.nn.Module, batch: PictureBatch) -> torch.Tensor:
    """The mean over the digits."""
    found = logits(model, batch)
    return F.cross_entropy(found.flatten(0, 1), batch.labels.to(found.device).flatten())


def scores(setup: Setup, model: torch.nn.Module, data: PictureData, step: int) -> dict[str, float]:
    """The share of held-out pictures whose number is read without a mistake, and of right digits.

    The digits before are the right ones; a number that is read so is what greedy decoding reads.
    """
    right, count = [], len(data.held_out)
    for first in range(0, count, setup.recipe.micro_batch):
        batch = data.held_out.batch(range(first, min(first + setup.recipe.micro_batch, count)))
        found = logits(model, batch).argmax(-1)
        right.append(found == batch.labels.to(found.device))
    digits = torch.cat(right)
    exact = digits.all(1).float().mean().item()
    return {"exact": round(exact, 5), "digits": round(digits.float().mean().item(), 5)}


def facts(model: torch.nn.Module, batch: PictureBatch) -> dict[str, object]:
    """What the layers of tower and decoder keep for backward, and what COAT replaced in each part."""
    from megatron_ext.saved_bytes import saved_bytes

    stacks = {"tower": model.model.vision_tower, "decoder": model.model.language_model}
    found: dict[str, object] = {}
    for name, part in stacks.items():
        layers = next(m for m in part.modules() if isinstance(m, torch.nn.ModuleList))
        saved = saved_bytes(list(layers), lambda: loss(model, batch))
        found[f"{name}_saved_bytes_per_token_layer"] = saved.per_token_and_layer
    return found | replaced(model)


def replaced(model: torch.nn.Module) -> dict[str, str]:
    """For each part of the model, how many modules of each kind COAT replaced, and which stayed."""
    import coat_ds

    conversion = coat_ds.conversion_of(model)
    if conversion is None:
        return {}

    def part_of(name: str) -> str:
        return next((part for part, prefix in PARTS.items() if name.startswith(prefix)), "left")

    counts = {part: Counter() for part in PARTS}
    for kind, names in conversion.converted.items():
        for name in names:
            counts[part_of(name)][kind] += 1
    made = {f"{part}_replaced": _listed(found) for part, found in counts.items()}
    return made | {"left": ", ".join(f"{name} ({why})" for name, why in conversion.left.items())}


def _listed(counts: Counter) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())
