"""The support matrix: what works, stays in BF16 or is refused, and where it ran. Tests read `SECTIONS`.

python docs/support.py > docs/support.md
"""

import re
from typing import NamedTuple

from coat_ds.versions import ACCELERATE, DEEPSPEED, MEGATRON_CORE, TORCH, TRANSFORMERS

LAYERS = {
    "FP8": "works: GEMMs run in FP8, activations are saved in 8 bits",
    "BF16": "GEMMs stay in BF16",
    "FP16": "layers are unchanged",
}
STATES = {"8-bit": "works: AdamW states are COAT's", "stock": "states are the framework's"}
EITHER = {
    "refused": "an error at the start; where states alone are refused, "
    '`"optimizer": {"enabled": false}` in the block keeps the layers',
    "not run": "accepted, or an error of the framework; no result",
    "": "does not apply",
}


class Row(NamedTuple):
    feature: str
    layers: str = "FP8"
    states: str = "8-bit"
    cpu: int = 0
    """The most CPU processes that ran it; 0 if none."""
    h100: int = 0
    h200: int = 0
    """The most GPUs of one node that ran it; 0 if none."""
    condition: str = ""
    proof: tuple[str, ...] = ()
    """Tests and results from which a claim on GPUs comes."""
    deepspeed: tuple[dict, ...] = ()
    """Parts of DeepSpeed configs; each is accepted, or each refused."""
    megatron: tuple[dict, ...] = ()
    """Fields of Megatron's TransformerConfig; likewise."""


REFUSED = ("refused", "refused")
NOT_RUN = ("not run", "not run")
STATES_REFUSED = ("not run", "refused")

UNITS, TWO_GPUS = "tests/megatron_ext/test_zero3_units_nccl.py", "tests/coat_ds/test_zero_nccl.py"
PARALLEL = "tests/megatron_ext/test_parallel_nccl.py"
CONVERTED = ("models_gpu.csv", "models_small_h100.csv")


def zero(stage: int, **more) -> dict:
    return {"zero_optimization": {"stage": stage, **more}}


def offload(**more) -> dict:
    return zero(2, offload_optimizer={"device": "cpu", **more})


# fmt: off
SECTIONS: dict[str, list[Row]] = {
    "DeepSpeed": [
        Row("ZeRO-0", cpu=2, deepspeed=(zero(0),)),
        Row("ZeRO-1", cpu=4, h100=2, h200=4, proof=(TWO_GPUS, "train_7b_4gpu_graphs.csv"),
            deepspeed=(zero(1),)),
        Row("ZeRO-2", cpu=2, h100=2, h200=4, proof=(TWO_GPUS, "train_7b_4gpu_graphs.csv"),
            deepspeed=(zero(2),)),
        Row("ZeRO-3", cpu=4, h100=4, h200=4,
            condition="a decoder layer is gathered as [one unit](deepspeed.md#options-for-this-framework)",
            proof=("train_13b_4gpu_h100.csv", "train_13b_4gpu.csv"), deepspeed=(zero(3),)),
        Row("ZeRO-3 `zero_hpz_partition_size`", cpu=2, h100=2, proof=(UNITS,),
            deepspeed=(zero(3, zero_hpz_partition_size=2),)),
        Row("ZeRO-3 `zero_quantized_weights`", h200=4, condition="slower than without",
            proof=("train_7b_4gpu.csv",)),
        Row("ZeRO-3 `zero_quantized_gradients`", *NOT_RUN),
        Row("Offload of states to the CPU (`offload_optimizer`, `offload_states()`)", cpu=2, h200=1,
            condition="`offload_param` ran on CPUs", proof=("tests/coat_ds/test_offload_gpu.py",),
            deepspeed=(offload(),)),
        Row('States in host memory, stepped on the GPU (`"offload": "cpu"`)', cpu=2, h200=1,
            condition="[masters stay on the GPU](fit.md#states-in-host-memory); GPU: without DeepSpeed",
            proof=("tests/coat_ds/test_host_states_zero.py", "one_gpu_h200.csv"),
            deepspeed=({"coat": {"enabled": True, "optimizer": {"offload": "cpu"}}},)),
        Row("Offload to NVMe", *STATES_REFUSED, deepspeed=(offload(device="nvme"),)),
        Row("Offload in parts (`ratio`), SuperOffload, ZenFlow", *STATES_REFUSED,
            deepspeed=(offload(ratio=0.5), offload(super_offload=True),
                       zero(2, zenflow={"topk_ratio": 0.1}))),
        Row("BF16 masters (`bf16_master_weights_and_grads`, `bf16_optimizer_states`)", cpu=2, h100=2, h200=4,
            condition="[from stage 1 on](deepspeed.md#options-for-this-framework), without offload",
            proof=(TWO_GPUS, "train_13b_4gpu_two.csv"),
            deepspeed=({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True,
                                 "bf16_optimizer_states": True}},)),
        Row("FP32", cpu=2, deepspeed=({},)),
        Row("FP16 with loss scaling", "FP16", cpu=2, deepspeed=({"fp16": {"enabled": True}},)),
        Row("`torch_autocast` to BF16", cpu=2,
            condition="ZeRO-3 on several ranks: set `stage3_param_persistence_threshold` to 0, or a "
                      "resumed run differs by DeepSpeed's rounding of small parameters",
            deepspeed=({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},)),
        Row("`torch_autocast` to FP16, `fp16_master_weights_and_grads`, `amp`", *STATES_REFUSED,
            deepspeed=({"torch_autocast": {"enabled": True, "dtype": "float16"}},
                       {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
                       {"amp": {"enabled": True}})),
        Row("AutoTP", cpu=2, h100=2,
            condition="[layer by layer](deepspeed.md#options-for-this-framework); PEFT adapters are refused",
            proof=("tests/coat_ds/layers/test_autotp.py",)),
        Row("Ulysses, ALST", cpu=2, condition="attention saves BF16; no fused layers"),
        Row("Pipeline (`PipelineModule`)", cpu=2,
            condition="`fp8_activation_checkpointing` needs `use_reentrant`"),
        Row("Muon", states="stock", cpu=2,
            condition='DeepSpeed 0.19.8, `"optimizer": {"enabled": false}` in the block',
            deepspeed=({"coat": {"enabled": True, "optimizer": {"enabled": False}},
                        "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},)),
        Row("1-bit and other optimizers", *STATES_REFUSED,
            deepspeed=({"optimizer": {"type": "OneBitAdam"}}, {"optimizer": {"type": "Lamb"}})),
        Row("Activation checkpointing, `fp8_activation_checkpointing`", cpu=2, h100=2,
            condition="partitioned, offloaded or contiguous inputs and DeepCompile are refused",
            proof=(UNITS,),
            deepspeed=({"coat": {"enabled": True, "fp8_activation_checkpointing": True}},)),
        Row("Universal checkpoints", cpu=4, condition="[between sizes](checkpoints.md)"),
        Row("`elastic_checkpoint`", *STATES_REFUSED, deepspeed=(zero(1, elastic_checkpoint=True),)),
        Row("Checkpoint writer `python`", cpu=1,
            condition="drop the key to load; writers `fast` and decoupled: not run"),
        Row("DeepCompile, random-LTD, generation of `hybrid_engine`", *NOT_RUN),
    ],
    "MoE with ZeRO-3": [
        Row("MoE + ZeRO-3, transformers (Mixtral, Qwen3-MoE)", cpu=2, h200=2,
            condition="experts multiply in FP8; packed batches too", proof=("expert_parallel_h200.csv",)),
        Row("MoE + ZeRO-3, Megatron, sequential experts", cpu=2, h100=2,
            condition="every rank holds all experts", proof=(UNITS,)),
        Row("MoE + ZeRO-3, `deepspeed.moe`", *REFUSED, condition="by DeepSpeed itself, with stock AdamW too"),
    ],
    "MoE without ZeRO-3": [
        Row("MoE + ZeRO-0, 1, 2, transformers (Mixtral, Qwen3-MoE)", cpu=2, h200=2,
            condition="experts: grouped FP8 GEMMs; also FSDP2, Trainer; GPU: ZeRO-2, and without ZeRO",
            proof=("expert_parallel_h200.csv",)),
        Row("MoE + ZeRO-0, 1, 2, `deepspeed.moe`", cpu=2, h200=2,
            condition="with expert parallelism too; GPU: a test of small layers under ZeRO-2",
            proof=("tests/coat_ds/test_deepspeed_moe.py",)),
        Row("MoE of transformers with biases or an own gate (GPT-OSS)", cpu=1, h200=1,
            condition="experts: grouped FP8 GEMMs; GPU: without ZeRO", proof=("models_gpu.csv",)),
        Row("Expert parallelism of transformers (`ep_size`)", cpu=2, h200=2,
            proof=("expert_parallel_h200.csv",),
            condition="from 5.23 on, `ep_implementation` `auto` and `all_to_all`, with `fsdp_size`; "
                      "rows are sent in BF16, no cached weights. Other versions and ways: experts in BF16"),
        Row("AutoEP (`expert_parallel`), also with ZeRO-3", cpu=2, h200=2,
            proof=("expert_parallel_h200.csv",),
            condition="rows are sent in BF16; no cached gate and up; with transformers before 5.23, or "
                      "a repaired DeepSpeed ([why](known_bugs.md#deepspeed))"),
        Row("MoE of Megatron, sequential experts", cpu=2, h200=1,
            condition="expert outputs are saved in BF16; GPU: tests of single layers",
            proof=("tests/megatron_ext/test_moe.py",)),
        Row("MoE of Megatron, `--moe-grouped-gemm`", cpu=2, h200=1,
            condition="saved in 8 bits, no Transformer Engine; "
                      "`--load-main-params-from-ckpt` does not find the weights",
            proof=("tests/megatron_ext/test_grouped_experts.py",)),
        Row("MoE of Megatron + expert parallelism (`allgather`, `alltoall`)", cpu=2, h200=2,
            condition="with tensor parallelism, recompute, capacity factors; with expert tensor parallelism "
                      "only under `--moe-pad-expert-input-to-capacity`",
            proof=("tests/megatron_ext/test_moe.py", "megatron_resume.csv")),
        Row("MoE of Megatron, `flex` dispatcher", *NOT_RUN,
            condition="refused without DeepEP or HybridEP; `--overlap-moe-expert-parallel-comm`: not run"),
        Row("MoE of Megatron + expert parallelism under DeepSpeed", *REFUSED,
            condition="DeepSpeed would average experts"),
        Row("`--moe-shared-expert-overlap`, Transformer Engine's fused or grouped GEMMs", *REFUSED,
            condition="with `--moe-grouped-gemm` also `moe_act` (recompute, offload), `expert_fc1` "
                      "(offload) and `--moe-expert-rank-capacity-factor`",
            megatron=({"use_transformer_engine_op_fuser": True},)),
    ],
    "Megatron": [
        Row("Tensor and sequence parallelism", cpu=4, h100=4, h200=4,
            condition="sizes of each rank's part: multiples of 16",
            proof=("train_13b_4gpu_tp4_h100.csv", "train_13b_4gpu_tp4.csv")),
        Row("Pipeline parallelism, 1F1B and interleaved", cpu=4, h100=2, h200=4,
            proof=(PARALLEL, "megatron_main.csv")),
        Row("Context parallelism", cpu=2, h200=2,
            condition="with Transformer Engine, whose attention saves BF16; not from "
                      "`launch/pretrain_gpt.py`",
            proof=("tests/megatron_ext/test_context_parallel.py",)),
        Row("`--use-distributed-optimizer`, `--use-precision-aware-optimizer`", cpu=4, h200=1,
            proof=("megatron_step.csv",)),
        Row("Tensor parallelism + DeepSpeed ZeRO-1, 2", cpu=4, h100=2, h200=4,
            proof=(PARALLEL, "train_13b_4gpu_tp4_zero2.csv")),
        Row("Tensor parallelism + DeepSpeed ZeRO-3", cpu=4),
        Row("`--use-torch-fsdp2`", cpu=2, condition="in a loop of our own ([why](known_bugs.md#megatron))"),
        Row("`--use-megatron-fsdp`", *STATES_REFUSED),
        Row("`--optimizer-cpu-offload`", *STATES_REFUSED),
        Row("`--optimizer muon`", cpu=2,
            condition="Muon's own states are stock; Adam trains grouped experts; megatron-core 0.19.2, "
                      "Emerging-Optimizers 0.4.0; `dist_muon` over data parallelism: not run"),
        Row("Recompute, full and selective", cpu=2, h100=2, h200=1,
            condition="in FP8 by `fp8_activation_checkpointing`; of `layernorm`: refused",
            proof=(UNITS, "recompute.csv"),
            megatron=({"recompute_granularity": "selective", "recompute_modules": ["mlp"]},)),
        Row("Multi-latent attention (MLA, DeepSeek)", cpu=2, h200=1,
            condition="GPU: tests of single layers. Not run: rope fusion, context parallelism, DeepSpeed",
            proof=("tests/megatron_ext/test_latent.py",), megatron=({"multi_latent_attention": True},)),
        Row("MLA + `--cache-mla-latents`, `--mla-down-proj-fusion`, `*` of hybrid models", *REFUSED,
            condition="also `attention_format` `recompute`; from 0.19 on `--qk-layernorm` without "
                      "`--q-lora-rank`",
            megatron=({"multi_latent_attention": True, "cache_mla_latents": True},)),
        Row("Hybrid models: layers `*`, `-`, `E`", cpu=2, h100=2, proof=(UNITS,)),
        Row("Hybrid models: Mamba layers", *NOT_RUN, condition="Megatron's own, in BF16"),
        Row("Sliding windows (`--window-size`, `--window-attn-skip-freq`)", cpu=1,
            condition="no attention dropout, latent attention on a GPU or CUDA graphs",
            megatron=({"window_size": (8, 0), "attention_dropout": 0.0},)),
        Row("Packed sequences (THD), `--reset-attention-mask`", cpu=2, h200=1,
            proof=("tests/megatron_ext/test_packed.py",),
            condition="no attention dropout, latent attention on a GPU or CUDA graphs; "
                      "`--reset-attention-mask`, and `--sft` with megatron-core 0.16: at most two "
                      "pipeline stages"),
        Row("Attention sinks (`--softmax-type`)", cpu=2,
            condition="no attention dropout, latent attention on a GPU or CUDA graphs",
            megatron=({"softmax_type": "learnable", "attention_dropout": 0.0},)),
        Row("`--qk-clip`", *REFUSED, megatron=({"qk_clip": True},)),
        Row("Decoding with a cache", *REFUSED,
            condition="a mask given to the model is read with `--reset-attention-mask` only"),
        Row("`--experimental-attention-variant`, `--heterogeneous-layers-config-path`, encoders (T5)",
            *REFUSED, condition="BertModel ends in an AttributeError",
            megatron=({"experimental_attention_variant": "gated_delta_net"},
                      {"heterogeneous_block_specs": True})),
        Row("`--fp16`", "refused", "", megatron=({"fp16": True},)),
        Row("`--fp8-format`, `--fp4-format`, kitchen, `--first-last-layers-bf16`, `--cuda-graph-impl`",
            *REFUSED, megatron=({"fp8": "hybrid"}, {"use_kitchen": True}, {"first_last_layers_bf16": True})),
        Row("Multi-token prediction", "BF16", cpu=1,
            condition="Megatron-LM 0.19.0; without Transformer Engine: `--transformer-impl local "
                      "--no-masked-softmax-fusion`, no sequence parallelism"),
    ],
    "Hugging Face and PyTorch": [
        Row("Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma 2 and 3, GPT-2, GPT-NeoX, OPT, BERT, ViT, SigLIP, "
            "LLaVA", cpu=2, h100=1, h200=2,
            condition="GPUs: Llama, Qwen3, LLaVA; all models: "
                      "[what stays](models.md#what-is-converted)",
            proof=(*CONVERTED, "trainer.csv")),
        Row("Trainer + DeepSpeed", cpu=2, h200=2, proof=("trainer.csv",)),
        Row("Trainer without DeepSpeed, Accelerate", cpu=2),
        Row("DistributedDataParallel", cpu=2),
        Row("FSDP2, HSDP", cpu=4, h100=2, h200=2, proof=("tests/coat_ds/layers/test_fsdp.py",)),
        Row("Gradients that backward applies (`release_gradients()`)", cpu=2, h200=1,
            condition="plain PyTorch on one GPU, FSDP2, Trainer; [no accumulation]"
                      "(fit.md#gradients-that-backward-applies)",
            proof=("tests/coat_ds/test_release.py", "one_gpu_h200.csv")),
        Row("FSDP1", cpu=2, condition='FP32 parameters, or `bf16_params="stochastic"`'),
        Row("Tensor parallelism: `parallelize_module`, `tp_plan` (transformers 5.17 and newer)", cpu=4,
            h100=2, condition="no fused layers, no cached weights",
            proof=("tests/coat_ds/layers/test_tensor_parallel.py",
                   "tests/coat_ds/layers/test_transformers_tp.py")),
        Row("Tensor parallelism + `torch.compile`", "BF16", cpu=2),
        Row("`torch.compile`", cpu=1, h100=1, h200=1,
            condition="after `convert`; no fused layers; experts break the graph",
            proof=("tests/coat_ds/layers/test_gpu.py",)),
        Row("LoRA (PEFT)", cpu=2,
            condition="base weights in FP8, no fused layers; with `tp_plan` on column-parallel layers "
                      "only ([why](known_bugs.md#hugging-face))"),
        Row("LoRA on experts (`target_parameters`)", cpu=1,
            condition="weights with adapters are quantized in each forward, also with `weight_cache`"),
        Row("LoRA kernels that replace PEFT's (Axolotl, Unsloth)", "BF16",
            condition="Unsloth: not run"),
        Row("QLoRA and other quantized models", *NOT_RUN),
        Row("Gradient checkpointing", cpu=2),
        Row("Evaluation, generation", cpu=1, h100=1, h200=1,
            condition='in BF16 with `"evaluation": "stock"`',
            proof=("evaluation.csv", "evaluation_h100.csv")),
        Row("Padding", cpu=1, h100=1, h200=1, condition="layers share one mask",
            proof=("tests/coat_ds/layers/test_gpu.py",)),
        Row("Packed batches (`DataCollatorWithFlattening`, `padding_free`)", cpu=1, h200=1,
            condition="no mask with torch 2.11 and later; CUDA graphs up to 256 documents",
            proof=("drift.csv", "packed_h200.csv", "trainer_packed_h200.csv")),
        Row("Sliding windows (Mistral, Gemma 3)", cpu=1, h200=1,
            condition="no mask with torch 2.11 and later",
            proof=("tests/coat_ds/layers/test_packed.py", "packed_h200.csv")),
        Row("`sdpa`", cpu=2, h100=1, h200=2, condition="`attention_format` can save 8 bits",
            proof=(*CONVERTED, "trainer.csv")),
        Row("`flash_attention_2`, `flash_attention_3`", cpu=1,
            condition="converted like `sdpa`; stays with soft-capping or attention in both directions",
            proof=("tests/coat_ds/layers/test_packed.py",)),
        Row("Sinks (GPT-OSS)", cpu=1,
            condition="also with `eager`, without `output_attentions`; no mask with torch 2.11 and later",
            proof=("tests/coat_ds/layers/test_packed.py",)),
        Row("`eager`", cpu=1, condition="attention is stock"),
        Row("`flex_attention`", *NOT_RUN, condition="attention is left stock"),
        Row("Liger", cpu=1, condition="COAT replaces its norms and feed-forwards, keeps its loss"),
        Row("Mamba, Falcon-Mamba, Jamba, WavLM, MobileBERT", "BF16", cpu=1,
            condition="weights that a model multiplies without calling the layer; `convert` counts such "
                      "layers as FP8. Jamba's experts run in FP8"),
        Row("`device_map` over several devices", "BF16",
            condition="convert first, then `accelerate.dispatch_model`"),
        Row("Context parallelism (`cp_size`), continuous batching", *REFUSED,
            condition="by Trainer and transformers; leave attention out by `filter`. torch's "
                      "`context_parallel`: not run"),
        Row("FP16 parameters", "refused", ""),
        Row("`CoatAdamW` alone", "", cpu=4, h100=1, h200=1, condition="any GPU",
            proof=("adamw_h100.csv", "adamw.csv")),
    ],
    "Trainers": [
        Row("Lightning 2.6.6", cpu=1,
            condition="Trainer and Fabric; `bf16-true`, `bf16-mixed`, `32-true`; `16-true` is refused. "
                      "`DeepSpeedStrategy`: Fabric on a CPU, with Lightning's check for GPUs removed"),
        Row("LLaMA-Factory 0.9.5 (torch 2.14.1, transformers 5.6.0, DeepSpeed 0.19.8)", cpu=2,
            condition="`sft`, `pt`, `dpo`, `rm`; `full`, `freeze`, `lora`, DoRA, LoRA+; `neat_packing`; "
                      "export. ZeRO-2 and 3: SFT. `use_muon`, `fp16` are errors. Not run: FSDP, PPO, "
                      "KTO, Unsloth, Liger"),
        Row("ms-swift 4.6.0 (torch 2.13.0, transformers 5.19.0, DeepSpeed 0.19.8)", cpu=2,
            condition="SFT (full, LoRA), `pt`, `dpo`, export. ZeRO-2 and 3: SFT. Not run: FSDP, packing, "
                      "GRPO, Megatron-SWIFT"),
        Row("Axolotl 0.19.0 (torch 2.13.0, transformers 5.16.1, DeepSpeed 0.18.9)", cpu=2,
            condition="SFT (full, LoRA), `completion`, `dpo`, `merge-lora`. ZeRO-2 and 3: full SFT. Ran "
                      "with gloo, with Axolotl's check for GPUs removed. Not run: FSDP, packing, Liger"),
        Row("TRL 1.16.0: SFT, DPO", cpu=2),
        Row("TRL 1.16.0: GRPO, RLOO, KTO, reward models, ORPO, CPO", cpu=1,
            condition="without DeepSpeed and in ZeRO-2, the first four in ZeRO-3. LoRA: GRPO, KTO, "
                      "rewards. Not run: vLLM, FSDP"),
        Row("sentence-transformers 6.2.0", cpu=1,
            condition="BERT, ModernBERT, Qwen3; losses in ZeRO-2 and 3 except cached ones; cross "
                      "encoders in ZeRO-2"),
    ],
    "Several nodes": [
        Row("torchrun", cpu=2, h200=2, condition="two GPUs of one node ran as two nodes",
            proof=("tests/launch/test_pretrain_gpt.py",)),
        Row("pdsh", cpu=2, condition="across two network namespaces of one machine"),
        Row("Slurm 22.05", cpu=2, condition="on one machine"),
        Row("Several nodes with GPUs", *NOT_RUN),
    ],
}
# fmt: on

HEAD = """\
# Support matrix

<!-- made by: python docs/support.py > docs/support.md -->

What works with COAT, on which machines it ran, and what is refused.

**Find a feature**: {sections}, [other limits](#not-in-the-tables).
Or search the page for its name: `MoE + ZeRO-3`, `LoRA`, `AutoTP`.

The columns *layers* and *states*:

{legend}

The columns CPU, H100 and H200 hold the largest number of CPU processes or GPUs that ran the feature, in one
node. An empty cell means that it did not run there. CPU runs use gloo and small models.

## Hardware and versions

| | accepted | ran |
|---|---|---|
{versions}

**A100 and older** (compute capability below 8.9): only the 8-bit optimizer states work. Layers stay in BF16
under DeepSpeed, with a warning; `convert` and Megatron's layer specs raise an error. `CoatAdamW` runs on
every GPU and on CPUs. Kernels compile for Ada and Blackwell GPUs, but ran on neither. AMD GPUs were not
tried. A linear layer needs sizes that are multiples of 16: `convert` leaves other layers in BF16,
and Megatron's layers stay Megatron's, with a warning.
"""

TAIL = """\
## Not in the tables

- **Second derivatives** of converted layers are an error: `create_graph=True`, forward mode. First
  derivatives work.
- **Writes through `.data`** to weights, or to inputs of norms, are not noticed. Call
  `coat_kernels.weights.invalidate_weight_caches()` after them, and under FSDP2 after a checkpoint is loaded.
- **A module whose forward depends** on `self.training`, on sizes or on attributes that change: exclude it by
  `filter`.
- **A parameter group of frozen parameters only** is dropped. Remove it, or stock AdamW cannot load the
  checkpoint.
- **`flops_profiler`** does not count FP8 GEMMs.
- **Convergence**: [125M and 1B parameters](numerics.md#pre-training), [fine-tuning](numerics.md#fine-tuning)
  of 135M.
"""
# accepted by `coat_ds.versions`; what ran
VERSIONS = {
    "Python": ("3.11 to 3.13", ("3.11", "3.12", "3.13")),
    "torch": (TORCH, ("2.11", "2.13", "2.14.1", "2.15.0")),
    "triton": (">=3.6", ("3.6", "3.7", "3.8", "3.9")),
    "DeepSpeed": (DEEPSPEED, ("0.18.9", "0.19.8")),
    "megatron-core": (MEGATRON_CORE, ("0.16.1", "0.19.2")),
    "transformers": (TRANSFORMERS, ("5.17", "5.23", "5.24")),
    "Accelerate": (ACCELERATE, ("1.15",)),
    "Transformer Engine": ("optional", ("2.12", "2.20")),
}
# of these versions the ones that ran on GPUs, and other remarks
REMARKS = {
    "Python": "; 3.12 and 3.13 with megatron-core 0.19.2",
    "torch": "; on GPUs 2.11 and, less, 2.14.1",
    "triton": "; on GPUs 3.6 and, less, 3.8",
    "megatron-core": ", main at d98e8a64d; 0.17 and newer need Python 3.12",
    "transformers": "; on GPUs 5.17",
}


def versions() -> list[str]:
    return [
        f"| {name} | {accepted} | {', '.join(ran)}{REMARKS.get(name, '')} |"
        for name, (accepted, ran) in VERSIONS.items()
    ]


def text() -> str:
    """The content of docs/support.md."""
    meanings = [*LAYERS.items(), *STATES.items(), *EITHER.items()]
    legend = "\n".join(f"- {f'**{word}**' if word else 'empty'}: {meaning}" for word, meaning in meanings)
    sections = ", ".join(
        f"[{title}](#{re.sub('[() ]+', '-', title.lower()).strip('-')})" for title in SECTIONS
    )
    filled = {"sections": sections, "legend": legend, "versions": "\n".join(versions())}
    lines = [HEAD.format(**filled)]
    for title, rows in SECTIONS.items():
        lines += [f"## {title}", "", "| feature | layers | states | CPU | H100 | H200 | condition |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in rows:
            cells = (row.feature, row.layers, row.states, row.cpu, row.h100, row.h200, row.condition)
            lines.append(f"|{'|'.join(f' {cell} ' if cell else '' for cell in cells)}|")
        lines.append("")
    return "\n".join([*lines, TAIL])


if __name__ == "__main__":
    print(text(), end="")
