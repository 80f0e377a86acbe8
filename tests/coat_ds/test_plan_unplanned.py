"""What `coat plan` names as not planned."""

import pytest

from coat_ds.plan import unplanned

BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "config, keys",
    [
        (BF16, []),
        ({"bf16": {"enabled": "auto"}}, []),
        ({"bfloat16": {"enabled": True}}, []),
        ({"fp16": {"enabled": True}}, []),
        ({}, ["bf16.enabled is not set"]),
        ({"bf16": {"enabled": False}}, ["bf16.enabled is not set"]),
        ({"torch_autocast": {"enabled": True}}, ["torch_autocast.enabled"]),
        (BF16 | {"tensor_parallel": {"autotp_size": 2}}, ["tensor_parallel.autotp_size"]),
        (BF16 | {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1}, []),
        (BF16 | {"sequence_parallel_size": 4}, ["sequence_parallel_size"]),
        (BF16 | {"zero_optimization": {"mics_shard_size": -1, "zero_quantized_gradients": False}}, []),
        (
            BF16 | {"zero_optimization": {"mics_shard_size": 8, "zero_quantized_gradients": True}},
            ["zero_optimization.mics_shard_size", "zero_optimization.zero_quantized_gradients"],
        ),
        (
            BF16 | {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
            ["activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing"],
        ),
        (BF16 | {"compile": {"deepcompile": True}}, ["compile.deepcompile"]),
    ],
)
def test_what_of_a_json_is_not_planned_is_named(config, keys):
    assert [line.split(":")[0] for line in unplanned.of_deepspeed(config)] == keys


@pytest.mark.parametrize(
    "words, names",
    [
        ("--num-layers 2 --bf16 --swiglu", []),
        ("--context-parallel-size 1 --mtp-num-layers 0", []),
        ("--context-parallel-size 2 --mtp-num-layers 1", ["context-parallel-size", "mtp-num-layers"]),
        ("--optimizer-cpu-offload --fp8-format hybrid", ["fp8-format", "optimizer-cpu-offload"]),
        ("--swiglu --fp8-format", ["fp8-format"]),
        (
            "--recompute-granularity full --use-megatron-fsdp --num-layers-per-virtual-pipeline-stage=2",
            ["num-layers-per-virtual-pipeline-stage", "recompute-granularity", "use-megatron-fsdp"],
        ),
    ],
)
def test_what_of_megatrons_arguments_is_not_planned_is_named(words, names):
    assert [line.split(":")[0] for line in unplanned.of_megatron(words.split())] == [f"--{n}" for n in names]
