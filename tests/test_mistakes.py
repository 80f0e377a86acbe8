"""What users write wrongly, and what they are told: the key, what was found, what was expected, the way out.

docs/errors.md lists the messages, for those who search for theirs. It is made by

    python -m tests.test_mistakes > docs/errors.md
"""

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
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

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/errors.md"
BLOCK, ADAMW = {"enabled": True}, {"type": "AdamW", "params": {"lr": 1e-3}}
LLAMA = ("configs/model_llama2_7b.json", "--vocabulary", "32000")


class Mistake(NamedTuple):
    wrote: str
    """As the page calls it."""
    do: Callable[[Path], object]
    """Makes it, in an empty folder. It raises, or returns the message."""
    said: tuple[str, ...]
    """What the message has to contain."""


def engine(config: dict, optimizer=None) -> Callable[[Path], object]:
    """What DeepSpeed's engine, with the block, does first."""
    return lambda folder: deepspeed_config.check(config, optimizer)


def block(**changes) -> Callable[[Path], object]:
    return engine({"coat": BLOCK | changes, "optimizer": ADAMW})


def beside(**changes) -> Callable[[Path], object]:
    return engine({"coat": BLOCK, "optimizer": ADAMW} | changes)


def params(**values) -> Callable[[Path], object]:
    return beside(optimizer={"type": "AdamW", "params": values})


def coat(*words: str) -> Callable[[Path], str]:
    """What the command prints, in whose words {folder} stands for the folder."""

    def run(folder: Path) -> str:
        said = io.StringIO()
        given = [word.replace("{folder}", str(folder)) for word in words]
        with contextlib.redirect_stderr(said), contextlib.chdir(ROOT):
            try:
                code = cli.main(given)
            except SystemExit as end:
                # argparse has printed its message, the training script hands its own over
                code = 2 if isinstance(end.code, str) else end.code
                said.write(end.code if isinstance(end.code, str) else "")
        assert code, "expected a refusal"
        return said.getvalue()

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


def saved_with_amsgrad(folder: Path) -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    stock = torch.optim.AdamW([p], amsgrad=True)
    p.grad = torch.ones(3)
    stock.step()
    CoatAdamW([p]).load_state_dict(stock.state_dict())


def stepped(p: torch.nn.Parameter, grad: torch.Tensor) -> None:
    made = CoatAdamW([p], keep_fp32=())
    p.grad = grad
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
    """A GPU without FP8, as far as anyone asks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (device, deepspeed_config):
            patch.setattr(module, "capability", lambda _: (8, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
        yield torch.device("cuda", 0)


def on_an_old_gpu(folder: Path) -> None:
    with old_gpu() as gpu:
        device.require_fp8(gpu)


def engine_on_an_old_gpu(folder: Path) -> None:
    """As `prepare_layers` is called for an engine whose block has the key."""
    coat = deepspeed_config.check({"coat": BLOCK | {"activations": True}, "optimizer": ADAMW}, None)
    with old_gpu() as gpu:
        why = deepspeed_config.no_conversion({}, coat.activations, gpu)
    model_layers.prepare_layers(torch.nn.Linear(64, 64), coat.activations, True, why)


def nothing_in_fp8(folder: Path) -> None:
    coat = deepspeed_config.check({"coat": BLOCK | {"require": True}, "optimizer": ADAMW}, None)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10))
    why = model_layers.prepare_layers(model, coat.activations, False)
    status.idle_layers(coat, layers_of(model, why))


def megatron(content: object) -> Callable[[Path], object]:
    """What Megatron's layers do first, with a file that COAT_CONFIG names; None: there is none."""

    def run(folder: Path) -> None:
        from megatron_ext import options

        path = folder / "coat.json"
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COAT_CONFIG", str(path))
            options._read.cache_clear()
            try:
                options.activations()
            finally:
                options._read.cache_clear()

    return run


def spec(**arguments) -> Callable[[Path], object]:
    """The parts of the spec's layer, from Megatron's own config with these fields."""

    def run(folder: Path) -> None:
        from megatron.core.transformer import TransformerConfig

        from megatron_ext.layer_specs import coat_parts

        settings = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
        for name, value in arguments.items():
            # not to its constructor, which asks for Transformer Engine
            assert hasattr(settings, name)
            setattr(settings, name, value)
        coat_parts(settings, experts=False)

    return run


def other_megatron(folder: Path) -> None:
    from megatron import core

    import megatron_ext.layer_specs as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "__version__", "0.15.0")
        patch.delitem(sys.modules, module.__name__)
        importlib.import_module(module.__name__)


def doctor(**installed: str) -> Callable[[Path], str]:
    """The problems among packages, these in place of those that are there."""
    usual = {"python": "3.11.9", "torch": "2.13.0", "triton": "3.9.0"}
    given = usual | {name.replace("_", "-"): version for name, version in installed.items()}
    return lambda folder: "\n".join(
        f"{f.check}: {f.text}" for f in packages.check(given) if f.state == PROBLEM
    )


def without_deepspeed(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # makes `import deepspeed` fail
        patch.setitem(sys.modules, "deepspeed", None)
        coat_ds.initialize(model=torch.nn.Linear(4, 4), config={"coat": BLOCK})


def in_a_folder(name: str, content: str, *words: str) -> Callable[[Path], str]:
    """A command beside a file of this content."""

    def run(folder: Path) -> str:
        (folder / name).write_text(content)
        return coat(*words)(folder)

    return run


TRAIN = ("train", "--model-config", "configs/model_quickstart.json", "--output", "{folder}/run")
HALF = torch.nn.Sequential(torch.nn.Linear(64, 64)).half()
TWICE = torch.nn.Sequential(torch.nn.Linear(64, 64))

MISTAKES = {
    'The `"coat"` block': [
        Mistake("a misspelt key", block(optimiser={}), ("coat.optimiser: ", "Did you mean 'optimizer'")),
        Mistake(
            "a misspelt key of an inner block",
            block(optimizer={"groupsize": 128}),
            ("coat.optimizer.groupsize: ", "(value 128)", "Known keys", "Did you mean 'group_size'"),
        ),
        Mistake("a key that means nothing", block(x=1), ("coat.x: unknown key (value 1)", "Drop it")),
        Mistake(
            "no `enabled`", engine({"coat": {"optimizer": {}}}), ("coat.enabled: missing", 'Add "enabled"')
        ),
        Mistake(
            "`true` in place of the block", engine({"coat": True}), ("coat: ", "found True", "Use braces")
        ),
        Mistake(
            "`true` in place of an object",
            block(optimizer=True),
            ("coat.optimizer: ", "found True", "braces"),
        ),
        Mistake("a boolean in quotes", block(enabled="true"), ("coat.enabled: ", "true or false", "'true'")),
        Mistake('`"auto"`', block(enabled="auto"), ("coat.enabled: ", "Nobody fills in", "drop the key")),
        Mistake(
            "a group size that is none",
            block(optimizer={"group_size": 100}),
            ("coat.optimizer.group_size: ", "64, 128, 256", "found 100"),
        ),
        Mistake(
            "a group size of activations for moments",
            block(activations={"group_size": 256}),
            ("coat.activations.group_size: ", "16, 32, 64, 128", "found 256"),
        ),
        Mistake(
            "a negative number", block(optimizer={"min_numel": -1}), ("min_numel: ", "0 or more", "found -1")
        ),
        Mistake(
            "a misspelt format",
            block(optimizer={"exp_avg_format": "fp8_expand"}),
            ("coat.optimizer.exp_avg_format: ", "found 'fp8_expand'", "Did you mean 'fp8_expanded'"),
        ),
        Mistake(
            "another library's name of a format",
            block(activations={"saved_format": "fp8"}),
            ("coat.activations.saved_format: ", "'sqrt8', 'e4m3'", "found 'fp8'", "Did you mean 'e4m3'"),
        ),
        Mistake(
            "formats of moments that do not go together",
            block(optimizer={"exp_avg_format": "ratio8", "exp_avg_sq_format": "fp8_expanded"}),
            (
                "coat.optimizer.exp_avg_format: ",
                "found coat.optimizer.exp_avg_sq_format",
                "Take exp_avg_sq_format",
            ),
        ),
        Mistake(
            "a boolean for a choice",
            block(activations={"weight_cache": True}),
            ("coat.activations.weight_cache: ", "'none', 'fp8'", "found True"),
        ),
        Mistake(
            "a key of an earlier version",
            block(activations={"forward_format": "e5m2"}),
            ("coat.activations.forward_format: ", "found 'e5m2'", "was removed", "Drop the key"),
        ),
        Mistake(
            "a value of an earlier version",
            block(activations={"attention_format": "e4m3"}),
            ("coat.activations.attention_format: ", "found 'e4m3'", "was removed", "Write 'sqrt8'"),
        ),
        Mistake(
            "one pattern in place of a list",
            block(optimizer={"keep_fp32": "*norm*"}),
            ("coat.optimizer.keep_fp32: ", "a list of name patterns", "found '*norm*'"),
        ),
    ],
    "The DeepSpeed JSON around it": [
        Mistake("the block in capitals", engine({"COAT": BLOCK}), ("COAT: ", "ignored", 'Write "coat"')),
        Mistake(
            'the block inside `"optimizer"`',
            engine({"optimizer": {**ADAMW, "coat": BLOCK}}),
            ("optimizer.coat: ", "ignored", 'beside "optimizer"'),
        ),
        Mistake(
            "a learning rate in quotes", params(lr="1e-3"), ("params.lr: ", "'1e-3'", "Leave the quotes out")
        ),
        Mistake(
            '`"lr": "auto"` without Trainer', params(lr="auto"), ("params.lr: ", "'auto'", "write a number")
        ),
        Mistake("one beta", params(lr=1e-3, betas=0.9), ("params.betas: ", "[0.9, 0.95]", "found 0.9")),
        Mistake(
            "the optimizer's name alone",
            beside(optimizer="AdamW"),
            ("optimizer: ", '{"type": "AdamW"', "found 'AdamW'", "Use braces"),
        ),
        Mistake(
            "another optimizer",
            beside(optimizer={"type": "Lamb", "params": {"lr": 1e-3}}),
            ("optimizer.type: ", '"AdamW" or "Adam"', "found 'Lamb'", "coat.optimizer.enabled to false"),
        ),
        Mistake(
            "an option that AdamW does not have",
            params(lr=1e-3, momentum=0.9),
            ("optimizer.params.momentum: ", "(value 0.9)", "Known: lr, betas", "Drop it"),
        ),
        Mistake(
            "AMSGrad",
            params(lr=1e-3, amsgrad=True),
            ("params.amsgrad: ", "needs False, found True", "Drop it"),
        ),
        Mistake(
            "no optimizer", engine({"coat": BLOCK}), ('neither an "optimizer" section nor', 'Add "optimizer"')
        ),
        Mistake(
            "another optimizer as argument of `initialize`",
            engine({"coat": BLOCK}, torch.optim.SGD([torch.zeros(1)])),
            ("found torch.optim.sgd.SGD", "pass a coat_ds.CoatAdamW"),
        ),
        Mistake(
            "offload to NVMe",
            beside(zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}}),
            ("offload_optimizer.device: found 'nvme'", "to the CPU only", 'Use "cpu"'),
        ),
        Mistake(
            "offload in parts",
            beside(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
            ("offload_optimizer.ratio: found 0.5", "Drop the key"),
        ),
        Mistake(
            "offload with BF16 masters",
            beside(
                bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
                zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}},
            ),
            ("bf16.bf16_master_weights_and_grads: found True", "Drop one of the two"),
        ),
        Mistake(
            "BF16 masters without BF16 states",
            beside(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
            ("bf16.bf16_master_weights_and_grads: ", "Set bf16.bf16_optimizer_states to true too"),
        ),
        Mistake("apex's amp", beside(amp={"enabled": True}), ("amp.enabled: found True", 'Use "bf16"')),
        Mistake(
            "checkpoints that cannot be read back",
            beside(zero_optimization={"stage": 1, "elastic_checkpoint": True}),
            ("zero_optimization.elastic_checkpoint: ", "Use universal checkpoints"),
        ),
        Mistake(
            "compressed recompute with contiguous buffers",
            engine(
                {
                    "coat": BLOCK | {"checkpointing": {"compress": True}},
                    "optimizer": ADAMW,
                    "activation_checkpointing": {"contiguous_memory_optimization": True},
                }
            ),
            ("activation_checkpointing.contiguous_memory_optimization: found True", "Drop the key"),
        ),
        Mistake(
            "DeepSpeed is not installed",
            without_deepspeed,
            ("not installed", "pip install", "coat_ds.convert"),
        ),
    ],
    "Models and GPUs": [
        Mistake(
            "a GPU without FP8, and layers of Megatron's or of `convert`",
            on_an_old_gpu,
            ("8.9 or newer, found NVIDIA A100 with 8.0", '"activations": {"emulate": true}'),
        ),
        Mistake(
            "the same under DeepSpeed, where the block asks for FP8 layers",
            engine_on_an_old_gpu,
            ("coat.activations.enabled: found True", "capability 8.0", 'Set "activations" to false'),
        ),
        Mistake(
            '`"require": true`, and nothing can compute in FP8',
            nothing_in_fp8,
            ("coat.activations.enabled: found True", "0 of 1 linear layers in FP8", "set it to false"),
        ),
        Mistake("a model in FP16", converted(HALF), ("convert: 0 holds FP16 parameters", "model.bfloat16()")),
        Mistake(
            "a model that is compiled already",
            lambda folder: coat_ds.convert(torch.compile(torch.nn.Linear(64, 64))),
            ("found a compiled model", "Convert it first"),
        ),
        Mistake(
            "a model that was converted with other options",
            converted(TWICE, TWICE, group_size=32),
            ("convert: group_size: found 32", "converted with 16", "coat_ds.unconvert(model) first"),
        ),
    ],
    "`CoatAdamW`": [
        Mistake(
            "an option that is not AdamW's",
            optimizer(amsgrad=True),
            ("amsgrad=True is not supported", "Leave it"),
        ),
        Mistake(
            "a learning rate that is no number", optimizer(lr="1e-3"), ("lr must be a number", "found '1e-3'")
        ),
        Mistake(
            "a group size that is none", optimizer(group_size=32), ("group_size: ", "64, 128, 256; found 32")
        ),
        Mistake(
            "a misspelt option of a parameter group",
            lambda folder: CoatAdamW([{"params": [torch.nn.Parameter(torch.zeros(3))], "weight_decy": 0.1}]),
            ("'weight_decy', which is no option", "Did you mean 'weight_decay'"),
        ),
        Mistake(
            "parameters in FP64",
            lambda folder: stepped(
                torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)), torch.ones(3, dtype=torch.float64)
            ),
            ("shape (3,)", "torch.float64; expected FP32 or BF16", "FP32 master weights"),
        ),
        Mistake(
            "sparse gradients",
            lambda folder: stepped(torch.nn.Parameter(torch.zeros(3)), torch.ones(3).to_sparse()),
            ("gradient of layout torch.sparse_coo", "Use a dense gradient"),
        ),
        Mistake(
            "a checkpoint of another model",
            saved_by_a_smaller_model,
            ("exp_avg of parameter 0 is (200,), the parameter (300,)", "the same model"),
        ),
        Mistake(
            "a checkpoint of AMSGrad",
            saved_with_amsgrad,
            ("amsgrad=True", "does not support", "Go on with that one"),
        ),
    ],
    "Megatron": [
        Mistake(
            "a file that is not there",
            megatron(None),
            ("COAT_CONFIG=coat.json: ", "No such file", "Correct the path"),
        ),
        Mistake("a file that is no JSON", megatron("{"), ("COAT_CONFIG=", "expected a JSON file")),
        Mistake(
            "a whole DeepSpeed JSON",
            megatron({"coat": BLOCK, "optimizer": ADAMW}),
            ("COAT_CONFIG=", 'the key "coat" alone', "found 'coat', 'optimizer'"),
        ),
        Mistake(
            "a misspelt key of the block",
            megatron({"coat": BLOCK | {"activation": {}}}),
            ("COAT_CONFIG=", "coat.activation: unknown key", "Did you mean 'activations'"),
        ),
        Mistake(
            "FP8 switched off beside FP8 layers",
            megatron({"coat": BLOCK | {"activations": False}}),
            ("COAT_CONFIG", "coat.activations.enabled: found false", "take sdpa_layer_spec"),
        ),
        Mistake(
            "compressed recompute without its spec",
            megatron({"coat": BLOCK | {"checkpointing": {"compress": True}}}),
            ("coat.checkpointing.compress: found true", "megatron_ext.with_checkpoints"),
        ),
        Mistake(
            "what only DeepSpeed has",
            megatron({"coat": BLOCK | {"zero3_layer_units": True}}),
            ('coat.zero3_layer_units: expected "auto", found true', "ZeRO-3 is DeepSpeed's", 'Write "auto"'),
        ),
        Mistake("`--fp8-format hybrid`", spec(fp8="hybrid"), ("--fp8-format", "its own FP8", "remove it")),
        Mistake(
            "`--multi-latent-attention`", spec(multi_latent_attention=True), ("--multi-latent", "remove it")
        ),
        Mistake(
            "recompute of norms",
            spec(recompute_granularity="selective", recompute_modules=["layernorm"]),
            ("'layernorm' saves nothing", "Remove it from --recompute-modules"),
        ),
        Mistake(
            "a megatron-core of another age",
            other_megatron,
            ("0.16.1 or newer and older than 0.21, found 0.15.0", "pip install"),
        ),
    ],
    "Versions, as `coat doctor` says": [
        Mistake(
            "an old torch", doctor(torch="2.8.0"), ("torch: 2.8.0 found, >=2.11 is needed", "pip install")
        ),
        Mistake(
            "an old DeepSpeed",
            doctor(deepspeed="0.17.0"),
            ("deepspeed: 0.17.0 found, >=0.18.9", "pip install"),
        ),
        Mistake(
            "two versions that do not go together",
            doctor(deepspeed="0.18.9"),
            ("deepspeed 0.18.9 with torch 2.13.0", "Take deepspeed>=0.19, or torch<2.13"),
        ),
    ],
    "The command `coat`": [
        Mistake(
            "a file that is not there", coat("plan", "no.json"), ("no.json: No such file", "Give a JSON file")
        ),
        Mistake(
            "a file that is no JSON",
            coat("plan", *LLAMA, "--deepspeed", "README.md"),
            ("README.md: not a JSON file", "Give a JSON file"),
        ),
        Mistake("no model", coat("plan"), ("model: none given", "Name a config.json")),
        Mistake(
            "no vocabulary", coat("plan", LLAMA[0]), ("vocabulary: ", "Give --vocabulary, 32000 for Llama-2")
        ),
        Mistake(
            "a size without a unit",
            coat("plan", *LLAMA, "--fit", "80 apples"),
            ("--fit: ", "80GB", "'80 apples'"),
        ),
        Mistake(
            "a GPU without known rates",
            coat("plan", *LLAMA, "--gpu", "a100"),
            ("found 'a100'", "h200 and h100"),
        ),
        Mistake(
            "GPUs that do not divide",
            coat("plan", *LLAMA, "--gpus", "3", "--tensor", "2"),
            ("gpus: 3 is no",),
        ),
        Mistake(
            "too little memory",
            coat("plan", *LLAMA, "--fit", "5GB"),
            ("nothing fits into 5.0 GB", "Give more"),
        ),
        Mistake(
            "a JSON without a model",
            in_a_folder("ds.json", "{}", "doctor", "--deepspeed", "{folder}/ds.json"),
            ("--deepspeed: a model is needed beside it", "Give --model"),
        ),
        Mistake(
            "a folder without readings",
            coat("watch", "{folder}"),
            ("RUN: ", "watch.jsonl", "coat.watch.folder"),
        ),
        Mistake(
            "text that is not there",
            coat(*TRAIN, "--data", "nowhere"),
            ("--data nowhere: no such file", "Correct the path"),
        ),
        Mistake(
            "an output that cannot be written",
            in_a_folder("file", "", *TRAIN[:-1], "{folder}/file"),
            ("cannot", "choose another folder with --output"),
        ),
    ],
}
CASES = [pytest.param(m, id=f"{door}: {m.wrote}") for door, found in MISTAKES.items() for m in found]


def message(mistake: Mistake, folder: Path) -> str:
    """What the user reads, the folder left out. Fails if nothing was refused."""
    try:
        said = mistake.do(folder)
    except Exception as error:
        said = str(error)
    assert isinstance(said, str) and said, f"{mistake.wrote}: nothing was refused"
    return said.replace(f"{folder}{os.sep}", "").replace(str(folder), "runs").strip()


@pytest.mark.parametrize("mistake", CASES)
def test_the_message_names_key_value_and_way_out(mistake, tmp_path):
    said = message(mistake, tmp_path)
    assert [part for part in mistake.said if part not in said] == [], said
    # which the page shows
    assert f"\n{said}\n" in PAGE.read_text(), "run python -m tests.test_mistakes > docs/errors.md"


def page() -> Iterator[str]:
    """docs/errors.md."""
    yield "# Messages\n\n<!-- made by: python -m tests.test_mistakes > docs/errors.md -->\n"
    yield "What COAT says to mistakes that users make. Search this page for a part of your message.\n"
    for door, mistakes in MISTAKES.items():
        yield f"## {door}\n"
        for mistake in mistakes:
            with tempfile.TemporaryDirectory() as folder:
                said = message(mistake, Path(folder))
            yield f"**{mistake.wrote[:1].upper()}{mistake.wrote[1:]}**\n\n```text\n{said}\n```\n"


if __name__ == "__main__":
    print("\n".join(page()), end="")
