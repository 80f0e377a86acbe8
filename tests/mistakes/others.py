"""Mistakes with models, the optimizer, Megatron, versions and the command `coat`."""

import importlib

import torch

import coat_ds
from coat_ds import CoatAdamW
from tests.mistakes.makers import (
    ADAMW,
    BLOCK,
    Mistake,
    accumulated_while_released,
    coat,
    converted,
    differentiable_from_now_on,
    doctor,
    dropped_while_released,
    engine_on_an_old_gpu,
    in_a_folder,
    layer,
    megatron,
    nothing_in_fp8,
    on_an_old_gpu,
    optimizer,
    other_megatron,
    saved_by,
    saved_by_a_smaller_model,
    stepped,
)

LLAMA = ("configs/model_llama2_7b.json", "--vocabulary", "32000")
TRAIN = ("train", "--model-config", "configs/model_quickstart.json", "--output", "{folder}/run")
HALF = torch.nn.Sequential(torch.nn.Linear(64, 64)).half()
MISTAKES = {
    "Models and GPUs": [
        Mistake(
            "a GPU without FP8, and layers of Megatron's or of `convert`",
            on_an_old_gpu,
            ("8.9 or newer, found NVIDIA A100 with 8.0", '"activations" to false'),
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
    ],
    "`CoatAdamW`": [
        Mistake(
            "patterns of names, without names",
            optimizer(keep_fp32=["*head*"]),
            ("keep_fp32=('*head*',)", "the parameters have none", "model.named_parameters()"),
        ),
        Mistake(
            "an option that is not AdamW's",
            optimizer(amsgrad=True),
            ("amsgrad=True is not supported", "Leave it"),
        ),
        Mistake(
            "a learning rate that is no number",
            optimizer(lr="1e-3"),
            ("lr: expected a number", "found '1e-3'"),
        ),
        Mistake(
            "a size of groups",
            lambda folder: CoatAdamW([{"params": [torch.nn.Parameter(torch.zeros(3))], "group_size": 64}]),
            ("group_size: found 64", "128 elements", "Drop it"),
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
            "an option that is not AdamW's, set in a parameter group later",
            differentiable_from_now_on,
            ("differentiable=True is not supported", "Leave it"),
        ),
        Mistake(
            "sparse gradients",
            lambda folder: stepped(torch.nn.Parameter(torch.zeros(3)), torch.ones(3).to_sparse()),
            ("gradient of layout torch.sparse_coo", "Use a dense gradient"),
        ),
        Mistake(
            "states in a place that is none",
            optimizer(offload="gpu"),
            ("offload: expected 'none', 'cpu' or GB", "found 'gpu'", "Did you mean 'cpu'"),
        ),
        Mistake(
            "gradient accumulation while backward applies gradients",
            accumulated_while_released,
            ("release_gradients: found a second gradient", "shape (3,)", "Call step() after every backward"),
        ),
        Mistake(
            "gradients that are dropped before the step while backward applies gradients",
            dropped_while_released,
            ("release_gradients: found no gradient", "Call zero_grad() after step()"),
        ),
        Mistake(
            "a checkpoint of another model",
            saved_by_a_smaller_model,
            ("exp_avg of parameter 0 is (200,), the parameter (300,)", "the same model"),
        ),
        Mistake(
            "a checkpoint of AMSGrad",
            saved_by(torch.optim.AdamW, amsgrad=True),
            ("amsgrad=True", "does not support", "Go on with that one"),
        ),
        Mistake(
            "a checkpoint of NAdam",
            saved_by(torch.optim.NAdam),
            ("parameter 0 has mu_product", "which AdamW does not have", "Remove mu_product"),
        ),
    ],
    "Megatron": [
        Mistake(
            "a file that is not there",
            megatron(None),
            ("COAT_CONFIG=coat.json: ", "No such file", "Give a JSON file"),
        ),
        Mistake("a file that is no JSON", megatron("{"), ("COAT_CONFIG=", "not a JSON file")),
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
            "a removed module of the spec",
            lambda folder: importlib.import_module("megatron_ext.with_optimizer"),
            (
                "--spec megatron_ext.with_optimizer was removed",
                "Give --spec megatron_ext.spec coat_layer_spec",
            ),
        ),
        Mistake(
            "what only DeepSpeed has",
            megatron({"coat": BLOCK | {"zero3_layer_units": True}}),
            ("coat.zero3_layer_units: expected null, found true", "ZeRO-3 is DeepSpeed's", "Write null"),
        ),
        Mistake(
            "`require`",
            megatron({"coat": BLOCK | {"require": True}}),
            ("coat.require: expected false, found true", "DeepSpeed's engine", "Write false"),
        ),
        Mistake("`--fp8-format hybrid`", layer(fp8="hybrid"), ("--fp8-format", "its own FP8", "Remove it")),
        Mistake(
            "`--cache-mla-latents`",
            layer(multi_latent_attention=True, cache_mla_latents=True),
            ("--cache-mla-latents", "Remove it"),
        ),
        Mistake(
            "`--experimental-attention-variant`",
            layer(experimental_attention_variant="gated_delta_net"),
            ("--experimental-attention-variant", "Remove it"),
        ),
        Mistake(
            "layers of different kinds",
            layer(heterogeneous_block_specs=True),
            ("--heterogeneous-layers-config-path", "Remove it"),
        ),
        Mistake(
            "`--batch-invariant-mode`", layer(batch_invariant_mode=True), ("--batch-invariant", "Remove it")
        ),
        Mistake("kitchen", layer(use_kitchen=True), ("--kitchen-config-file", "Remove it")),
        Mistake(
            "`--first-last-layers-bf16`",
            layer(first_last_layers_bf16=True),
            ("--first-last-layers-bf16", "--te-precision-config-file", "Remove it"),
        ),
        Mistake(
            "`--fp16`", layer(params_dtype=torch.float16), ("--fp16", "Take --bf16", "Megatron's own layers")
        ),
        Mistake(
            "recompute of norms",
            layer(recompute_granularity="selective", recompute_modules=["layernorm"]),
            ("'layernorm' of --recompute-modules", "Remove it"),
        ),
        Mistake(
            "recompute of the activation of grouped experts",
            layer(
                num_moe_experts=2,
                moe_grouped_gemm=True,
                recompute_granularity="selective",
                recompute_modules=["moe_act"],
            ),
            ("'moe_act' of --recompute-modules with --moe-grouped-gemm", "is not kept", "Remove it"),
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
            coat("plan", *LLAMA, "--gpu", "v100"),
            ("found 'v100'", "h200", "a100"),
        ),
        Mistake(
            "GPUs that do not divide",
            coat("plan", *LLAMA, "--gpus", "3", "--tensor", "2"),
            ("gpus: 3 is no",),
        ),
        Mistake(
            "too little memory",
            coat("plan", *LLAMA, "--fit", "5GB"),
            ("nothing fits into 5.0 GB", "Give a smaller"),
        ),
        Mistake(
            "a key that is not planned",
            in_a_folder(
                "ds.json",
                '{"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}',
                *("plan", *LLAMA, "--deepspeed", "{folder}/ds.json"),
            ),
            ("tensor_parallel.autotp_size: found 2", "Leave it out"),
        ),
        Mistake(
            "a JSON without a model",
            in_a_folder("ds.json", "{}", "doctor", "--deepspeed", "{folder}/ds.json"),
            ("--deepspeed, --model: one is checked with the other", "Give both"),
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
