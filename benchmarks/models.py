"""Models of transformers, converted by `coat_ds.convert`: of each family what is saved and learnt, and on a
GPU the speed of layers as wide as those of real models, compared with other libraries that convert models.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator

import torch

import coat_ds
from benchmarks.common.harness import Table, benchmark, reason
from benchmarks.common.memory import release
from benchmarks.common.timing import measure
from benchmarks.common.wide_models import SHAPES, Shape
from megatron_ext.saved_bytes import SavedStorages
from tests.families import FAMILIES, LAYERS, Family, losses_of

TOKENS = 8192
COAT = {"COAT": {}, "COAT, 8-bit attention": {"attention_format": "sqrt8"}}


def saved_bytes(model: torch.nn.Module, batch: dict) -> int:
    """Bytes of storages that autograd keeps of a forward, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = SavedStorages(own.__contains__)
    with saved.counting():
        model(**batch)
    return saved.nbytes


def saved_by_a_layer(family: Family, activations: dict | None) -> float:
    """Bytes a token: those of a model with one layer more in each stack, less those of the model."""
    batch, sizes = family.batch(), []
    for layers in (LAYERS, LAYERS + 1):
        model = family.deeper(layers)
        if activations is not None:
            coat_ds.convert(model, activations)
        # the first forward shows which outputs feed an FP8 GEMM
        saved_bytes(model, batch)
        sizes.append(saved_bytes(model, batch))
    tokens = batch["input_ids"] if "input_ids" in batch else batch["pixel_values"][:, 0, ::8, ::8]
    return (sizes[1] - sizes[0]) / tokens.numel()


def loss_after(family: Family, steps: int, activations: dict | None) -> float:
    """The mean loss of the last fifth of `steps`."""
    last = losses_of(family, steps, activations)[-max(steps // 5, 1) :]
    return sum(last) / len(last)


def family_row(name: str, steps: int) -> dict:
    family = FAMILIES[name]
    conversion = coat_ds.conversion_of(coat_ds.convert(family.build()))
    done = {kind: f"{len(names)}/{conversion.found[kind]}" for kind, names in conversion.converted.items()}
    bf16 = saved_by_a_layer(family, None)
    saved = {f"{system} / BF16": saved_by_a_layer(family, block) / bf16 for system, block in COAT.items()}
    return {
        "family": name,
        **done,
        "BF16 bytes": bf16,
        **saved,
        "BF16 loss": loss_after(family, steps, None),
        "COAT loss": loss_after(family, steps, {}),
    }


def build(shape: Shape, layers: int, device: torch.device, quick: bool) -> torch.nn.Module:
    import transformers

    fields = {"num_hidden_layers": layers}
    if quick:
        fields |= {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    known = {name: dict(value) if isinstance(value, dict) else value for name, value in shape.fields.items()}
    if "text_config" in known:
        known["text_config"] |= fields
        known["vision_config"] |= {"num_hidden_layers": layers}
        if quick:
            known["vision_config"] |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    else:
        known |= fields
    config = getattr(transformers, shape.config)(**known)
    with torch.device(device):
        return transformers.AutoModel.from_config(config, dtype=torch.bfloat16).train()


def _liger(model: torch.nn.Module) -> torch.nn.Module:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # its loss is of a head, which is not there
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
    return model


@contextlib.contextmanager
def _own_patches() -> Iterator[None]:
    """What is put into transformers' modules meanwhile, as by Liger, is taken out again."""
    modules = [m for name, m in sys.modules.items() if name.startswith("transformers.models.")]
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, names in zip(modules, before, strict=True):
            vars(module).update(names)


def _torchao(model: torch.nn.Module) -> torch.nn.Module:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(model)


SYSTEMS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "BF16": lambda model: model,
    "BF16, torch.compile": torch.compile,
    "BF16, Liger": _liger,
    "torchao float8": _torchao,
    "torchao float8, torch.compile": lambda model: torch.compile(_torchao(model)),
    "COAT": coat_ds.convert,
    "COAT, no CUDA graphs": lambda model: coat_ds.convert(model, {"cuda_graphs": False}),
    "COAT, weights cached": lambda model: coat_ds.convert(model, {"weight_cache": "fp8"}),
    "COAT, 8-bit attention": lambda model: coat_ds.convert(model, {"attention_format": "sqrt8"}),
    "COAT, recomputed attention": lambda model: coat_ds.convert(model, {"attention_format": "recompute"}),
}


def shape_row(name: str, system: str, arguments) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, tokens = SHAPES[name], 1024 if arguments.quick else arguments.tokens
    layers = 1 if arguments.quick else arguments.layers or shape.layers
    row = {"shape": name, "layers": layers, "tokens": tokens, "system": system}
    try:
        model = build(shape, layers, device, arguments.quick)
        inputs = shape.inputs(device, tokens)
        held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        with _own_patches():
            converted = SYSTEMS[system](model)

            def step():
                hidden = converted(**inputs).last_hidden_state
                hidden.backward(torch.ones_like(hidden))
                model.zero_grad(set_to_none=True)

            timing = measure(step, *((1, 1) if arguments.quick else (5, 20)))
            # what CUDA graphs hold between steps counts, too
            peak = torch.cuda.max_memory_allocated() - held if device.type == "cuda" else 0
    # a system that is not there, or that a model is not for, is a row too
    except Exception as error:
        return row | {"ms": float("nan"), "peak_gb": float("nan"), "note": reason(error)}
    return row | {"ms": timing.median, "peak_gb": peak / 1e9, "note": ""}


def options(parser) -> None:
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=50, help="of training, for the losses")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="time layers of this width instead")
    parser.add_argument("--layers", type=int, help="of a shape")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a shape, in rows of 4096 or fewer")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))


@benchmark(needs_gpu=False, options=options)
def models(arguments, table: Table) -> None:
    """transformers' families: what is converted, bytes saved by a layer, losses.

    Bytes are a token's in one layer, of small models, BF16's and COAT's over BF16's; losses are those at the
    end of a short run on ramps of tokens. With --shape, layers of a real model's width are timed instead,
    forward and backward, in plain PyTorch: milliseconds, and the peak memory above weights, gradients
    included.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not arguments.shape:
            for name in arguments.families:
                table.add(**family_row(name, 2 if arguments.quick else arguments.steps))
            return
        for name in arguments.shape:
            for system in arguments.systems:
                table.add(**shape_row(name, system, arguments))
                torch.compiler.reset()
                release()
