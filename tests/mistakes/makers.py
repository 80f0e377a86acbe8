"""Functions that make mistakes. Each maker returns a function that makes one mistake in an empty folder, and
raises the error or returns the message."""

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import coat_ds
from coat_ds import CoatAdamW, cli
from coat_ds.doctor import PROBLEM, packages
from coat_ds.layers.inventory import layers_of
from coat_ds.zero import deepspeed_config, model_layers, status
from coat_kernels import device

ROOT = Path(__file__).resolve().parents[2]
BLOCK, ADAMW = {"enabled": True}, {"type": "AdamW", "params": {"lr": 1e-3}}


class Mistake(NamedTuple):
    wrote: str
    """As the page calls it."""
    do: Callable[[Path], object]
    """Makes it, in an empty folder. It raises, or returns the message."""
    said: tuple[str, ...]
    """What the message has to contain."""


def engine(config: dict, optimizer=None) -> Callable[[Path], object]:
    """The first calls of DeepSpeed's engine with the block."""
    return lambda folder: deepspeed_config.checked_config(config, optimizer)


def block(**changes) -> Callable[[Path], object]:
    return engine({"coat": BLOCK | changes, "optimizer": ADAMW})


def beside(**changes) -> Callable[[Path], object]:
    return engine({"coat": BLOCK, "optimizer": ADAMW} | changes)


def params(**values) -> Callable[[Path], object]:
    return beside(optimizer={"type": "AdamW", "params": values})


def coat(*words: str) -> Callable[[Path], str]:
    """The output of the command without log lines; {folder} in the arguments is replaced by the folder."""

    def run(folder: Path) -> str:
        said = io.StringIO()
        given = [word.replace("{folder}", str(folder)) for word in words]
        with contextlib.redirect_stderr(said), contextlib.chdir(ROOT):
            try:
                code = cli.main(given)
            except SystemExit as end:
                # argparse has printed its message already, the training script returns its own
                code = 2 if isinstance(end.code, str) else end.code
                said.write(end.code if isinstance(end.code, str) else "")
        assert code, "expected a refusal"
        lines = said.getvalue().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("COAT: "))

    return run


def optimizer(**options) -> Callable[[Path], object]:
    return lambda folder: CoatAdamW([torch.nn.Parameter(torch.zeros(3))], **options)


def saved_by_a_smaller_model(folder: Path) -> None:
    def trained(size: int) -> CoatAdamW:
        p = torch.nn.Parameter(torch.zeros(size))
        made = CoatAdamW([p])
        p.grad = torch.ones(size)
        made.step()
        return made

    trained(300).load_state_dict(trained(200).state_dict())


def saved_by(kind: type[torch.optim.Optimizer], **options) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        p = torch.nn.Parameter(torch.zeros(3))
        other = kind([p], **options)
        p.grad = torch.ones(3)
        other.step()
        CoatAdamW([p]).load_state_dict(other.state_dict())

    return run


def differentiable_from_now_on(folder: Path) -> None:
    made = CoatAdamW([torch.nn.Parameter(torch.zeros(3))])
    made.param_groups[0]["differentiable"] = True
    made.step()


def stepped(p: torch.nn.Parameter, grad: torch.Tensor) -> None:
    made = CoatAdamW([p], keep_fp32=())
    p.grad = grad
    made.step()


def accumulated_while_released(folder: Path) -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    made = CoatAdamW([p], keep_fp32=())
    made.release_gradients()
    for _ in range(2):
        p.sum().backward()


def dropped_while_released(folder: Path) -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    made = CoatAdamW([p], keep_fp32=())
    made.release_gradients()
    p.sum().backward()
    made.zero_grad()
    made.step()


def converted(*models: torch.nn.Module, **activations) -> Callable[[Path], object]:
    """Each model converted in turn, the last one with options."""

    def run(folder: Path) -> None:
        for model in models[:-1]:
            coat_ds.convert(model)
        coat_ds.convert(models[-1], activations)

    return run


@contextlib.contextmanager
def old_gpu() -> Iterator[torch.device]:
    """A GPU without FP8, according to all queries."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (device, deepspeed_config):
            patch.setattr(module, "capability", lambda _: (8, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
        yield torch.device("cuda", 0)


def on_an_old_gpu(folder: Path) -> None:
    with old_gpu() as gpu:
        device.require_fp8(gpu)


def engine_on_an_old_gpu(folder: Path) -> None:
    """Calls `prepare_layers` as an engine does whose block has the key."""
    coat = deepspeed_config.checked_config({"coat": BLOCK | {"activations": True}, "optimizer": ADAMW}, None)
    with old_gpu() as gpu:
        why = deepspeed_config.why_no_conversion({}, gpu)
    model_layers.prepare_layers(torch.nn.Linear(64, 64), coat.activations, True, why)


def adapters_under_autotp(folder: Path) -> None:
    """The check of the engine, for a model in which PEFT has wrapped a layer."""
    adapted = torch.nn.Module()
    adapted.base_layer = torch.nn.Linear(64, 64)
    model_layers.check_adapters(torch.nn.Sequential(adapted), {"autotp_size": 2})


def nothing_in_fp8(folder: Path) -> None:
    coat = deepspeed_config.checked_config({"coat": BLOCK | {"require": True}, "optimizer": ADAMW}, None)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10))
    why = model_layers.prepare_layers(model, coat.activations, False)
    status.idle_layers_warning(coat, layers_of(model, why))


def megatron(content: object) -> Callable[[Path], object]:
    """What `megatron_ext.spec` reads first: the file that COAT_CONFIG names; None: no file."""

    def run(folder: Path) -> None:
        from megatron_ext import options

        path = folder / "coat.json"
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COAT_CONFIG", str(path))
            options.coat_config()

    return run


def layer(**arguments) -> Callable[[Path], object]:
    """The spec's layer, from Megatron's own config with these fields."""

    def run(folder: Path) -> None:
        from megatron_ext.layer_specs import coat_layer_spec

        coat_layer_spec.module(_megatron_config(arguments))

    return run


def _megatron_config(arguments: dict[str, object]):
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if arguments.get("multi_latent_attention") else TransformerConfig
    settings = kind(num_layers=1, hidden_size=64, num_attention_heads=4)
    for name, value in arguments.items():
        # not through its constructor, which needs Transformer Engine
        assert hasattr(settings, name)
        setattr(settings, name, value)
    return settings


def other_megatron(folder: Path) -> None:
    from megatron import core

    import megatron_ext.layer_specs as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "__version__", "0.15.0")
        patch.delitem(sys.modules, module.__name__)
        importlib.import_module(module.__name__)


def doctor(**installed: str) -> Callable[[Path], str]:
    """The problems that the doctor finds among packages, with these versions in place of the installed
    ones."""
    usual = {"python": "3.11.9", "torch": "2.13.0", "triton": "3.9.0"}
    given = usual | {name.replace("_", "-"): version for name, version in installed.items()}
    return lambda folder: "\n".join(
        f"{f.check}: {f.text}" for f in packages.check(given) if f.state == PROBLEM
    )


def in_a_folder(name: str, content: str, *words: str) -> Callable[[Path], str]:
    """A command in a folder with a file of this content."""

    def run(folder: Path) -> str:
        (folder / name).write_text(content)
        return coat(*words)(folder)

    return run
