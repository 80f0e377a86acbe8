"""Megatron-LM's own pretrain_gpt.py and pretrain_hybrid.py, unmodified, on a CPU: they train, save and go on
with our specs. In 0.16 the latter is called pretrain_mamba.py.

`MEGATRON_PATH` names a checkout of Megatron-LM, which needs the packages six, regex, pyyaml and pybind11,
make and a C++ compiler. Run on core_v0.16.1 (55ac7082), core_v0.19.0 (5be96267) and main (d98e8a64).
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from coat_ds.watch.readings import read
from tests.util import free_port

MEGATRON = os.environ.get("MEGATRON_PATH", "")
pytestmark = [
    pytest.mark.skipif(not MEGATRON, reason="MEGATRON_PATH names no checkout of Megatron-LM"),
    pytest.mark.long("Megatron-LM's scripts"),
]
ROOT = Path(__file__).parents[2]

# without dropout: on a CPU it shares its random state with data loaders, which draw from it at their start
ARGUMENTS = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 127,
    "make_vocab_size_divisible_by": 64,
    "eval_iters": 0,
    "eval_interval": 100,
    "log_interval": 1,
    "distributed_backend": "gloo",
    "ckpt_format": "torch_dist",
    **dict.fromkeys(("bf16", "swiglu", "disable_bias_linear", "mock_data"), ""),
    **dict.fromkeys(("no_persist_layer_norm", "no_rope_fusion", "no_gradient_accumulation_fusion"), ""),
    "untie_embeddings_and_output_weights": "",
}
DISTRIBUTED = {"use_distributed_optimizer": "", "dist_ckpt_optim_fully_reshardable": ""}
SAVED, END = 2, 5

# the script of a model, our specs for it, and the argument that sets two layers of attention and feed-forward
_PATTERN = "*-*-"
if Path(MEGATRON, "pretrain_hybrid.py").exists():
    _HYBRID = "pretrain_hybrid.py", "coat_hybrid_stack_spec", {"hybrid_layer_pattern": _PATTERN}
else:
    _OLD = {"hybrid_override_pattern": _PATTERN, "num_layers": len(_PATTERN), "is_hybrid_model": ""}
    _HYBRID = "pretrain_mamba.py", "coat_hybrid_stack_spec", _OLD
# as in DeepSeek: a dense layer, and one with experts in grouped GEMMs
_LATENT = {
    "num_layers": 2,
    "lr": 5e-3,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_layer_freq": "[0,1]",
    "moe_token_dispatcher_type": "allgather",
    **dict.fromkeys(("multi_latent_attention", "qk_layernorm", "moe_grouped_gemm"), ""),
}
MODELS = {
    "gpt": ("pretrain_gpt.py", "coat_layer_spec", {"num_layers": 2}),
    "hybrid": _HYBRID,
    "latent": ("pretrain_gpt.py", "coat_layer_spec", _LATENT),
}
# the hybrid stack reads checkpoints of GPTModel since 0.19
GPT_INTO_HYBRID = Path(MEGATRON, "megatron/core/dist_checkpointing/gpt_checkpoint_interop.py").exists()


def pretrain(model, processes=1, coat_config=None, check=True, **arguments):
    """(loss, norm of the gradient) by iteration, as Megatron logs them, and the whole output.

    coat_config: the file of COAT_CONFIG; without one layers are FP8 and states have 8 bits.
    """
    script, spec, shape = MODELS[model]
    # Megatron compiles with the python3 and python3-config of the path
    path = [str(Path(sys.executable).parent), sysconfig.get_config_var("BINDIR"), os.environ["PATH"]]
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": packages,
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command += [
        f"--master_port={free_port()}",
        "-m",
        "tests.megatron_ext.scripted",
        f"{MEGATRON}/{script}",
    ]
    command += ["--spec", "megatron_ext.spec", spec]
    for name, value in (ARGUMENTS | shape | {"train_iters": END} | arguments).items():
        command += [f"--{name.replace('_', '-')}", *str(value).split()]
    run = subprocess.run(
        command,
        env=os.environ | environment | ({"COAT_CONFIG": str(coat_config)} if coat_config else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert not check or run.returncode == 0, run.stdout[-6000:]
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)", run.stdout)
    return {int(iteration): (float(loss), float(norm)) for iteration, loss, norm in found}, run.stdout


@pytest.fixture(scope="module", params=MODELS)
def interrupted(request, tmp_path_factory):
    """A model, its losses without interruption, and the folder of a checkpoint in the middle of the run: two
    ranks."""
    folder = tmp_path_factory.mktemp("checkpoint")
    logged, output = pretrain(request.param, processes=2, save=folder, save_interval=SAVED, **DISTRIBUTED)
    assert "COAT: AdamW states" in output and "COAT_CONFIG is not set" in output
    # another run resumes from there, not from the end
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return request.param, logged, folder


def test_pretrain_script_trains(interrupted):
    _, logged, _ = interrupted
    assert list(logged) == [1, 2, 3, 4, 5]
    # from about ln 128; the mock tokens are learned quickly
    assert 4.5 < logged[1][0] < 5.2 and logged[END][0] < logged[1][0] - 0.5


def test_pretrain_script_computes_in_fp8(interrupted, tmp_path):
    model, logged, _ = interrupted
    if model == "latent":
        pytest.skip("sdpa_layer_spec takes no grouped experts")
    path = tmp_path / "coat.json"
    path.write_text('{"coat": {"enabled": true, "activations": false}}')
    plain, output = pretrain(model, processes=2, coat_config=path, train_iters=SAVED, **DISTRIBUTED)
    assert (
        f"FP8 layers off, 8-bit optimizer states on, FP8 inputs of recompute off (COAT_CONFIG={path})"
        in output
    )
    # equal layers would give equal bits, as `test_pretrain_script_resumes_to_the_bit` shows
    assert all(plain[iteration] != logged[iteration] for iteration in plain)
    # normed output and weights of 0.02 make logits of 0.02 * sqrt(64) = 0.16. FP8 changes these by less than
    # 2^-4, its largest change of a value; a token's loss is the difference of two such terms
    assert plain[1][0] == pytest.approx(logged[1][0], abs=2 * 0.16 * 2**-4)


def test_pretrain_script_resumes_to_the_bit(interrupted):
    model, logged, folder = interrupted
    for successor in {model, "hybrid"} if GPT_INTO_HYBRID and model == "gpt" else {model}:
        again, _ = pretrain(successor, processes=2, load=folder, **DISTRIBUTED)
        assert list(again) == [3, 4, 5]
        # what Megatron logs as the second loss after a start is the mean of two
        assert (again[3], again[4][1], again[5]) == (logged[3], logged[4][1], logged[5])


@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_pretrain_script_resumes_at_other_sizes(interrupted, size):
    model, logged, folder = interrupted
    sizes = {f"{size}_model_parallel_size": 2}
    if (model, size) == ("latent", "tensor"):
        # experts require it
        sizes["sequence_parallel"] = ""
    again, _ = pretrain(model, processes=2, load=folder, **sizes, **DISTRIBUTED)
    # the weights are the same bits, only the order of sums differs: BF16 roundings, 2^-9 of each logit
    assert again[3][0] == pytest.approx(logged[3][0], rel=2**-9)
    # updates come from moments that were rounded a second time in cut groups, by 2^-4 at most; this changes
    # the decrease of the loss, which is itself a tenth of the loss
    assert again[END][0] == pytest.approx(logged[END][0], rel=2**-4 / 4)


PRECISION = """
configs: {plain: {coat: {enabled: false}}}
matchers: {first: {type: glob, pattern: "*layers.0.mlp.linear_fc2", config: plain, enabled: true}}
"""


def test_pretrain_script_follows_coat_config(tmp_path):
    (tmp_path / "layers.yaml").write_text(PRECISION)
    block = {"enabled": True, "optimizer": {"exp_avg_format": "bf16"}, "fp8_activation_checkpointing": True}
    (tmp_path / "coat.json").write_text(json.dumps({"coat": block}))
    arguments = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "te_precision_config_file": tmp_path / "layers.yaml",
        **dict.fromkeys(("use_distributed_optimizer", "use_precision_aware_optimizer"), ""),
    }
    logged, output = pretrain("gpt", coat_config=tmp_path / "coat.json", **arguments)
    assert logged[END][0] < logged[1][0] - 0.5
    # 3 + 5 / 128 bytes of moments, norms in FP32, and the masters' 16 bits
    assert re.search(r"COAT: AdamW states 5\.\d\d\d bytes per parameter", output)


def test_pretrain_script_writes_readings(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    block = {"enabled": True, "optimizer": {"min_numel": 0}}
    block["watch"] = {"every": 1, "folder": str(tmp_path / "readings")}
    (tmp_path / "coat.json").write_text(json.dumps({"coat": block}))
    pretrain(
        "gpt",
        coat_config=tmp_path / "coat.json",
        processes=2,
        tensorboard_dir=tmp_path / "board",
        **DISTRIBUTED,
    )
    readings = read(tmp_path / "readings")
    # the last reading is of a step whose end is the run's
    assert [reading.step for reading in readings] == list(range(1, END))
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    for name, value in readings[-1].flat().items():
        assert board.Scalars(name)[-1].step == END - 1
        assert board.Scalars(name)[-1].value == pytest.approx(value)


def test_pretrain_script_errors_name_file_and_key(tmp_path):
    path = tmp_path / "coat.json"
    path.write_text('{"coat": {"enabled": true, "optimizer": {"group_sise": 64}}}')
    _, output = pretrain("gpt", coat_config=path, check=False)
    assert f"COAT_CONFIG={path}: coat.optimizer.group_sise: unknown key" in output


RESETS = dict.fromkeys(("reset_attention_mask", "reset_position_ids"), "")


def test_pretrain_script_reads_documents_of_masks():
    logged, _ = pretrain("gpt", train_iters=SAVED, **RESETS)
    assert all(loss < 5.2 for loss, _ in logged.values()) and len(logged) == SAVED
    _, output = pretrain("gpt", check=False, no_create_attention_mask_in_dataloader="", **RESETS)
    assert "--reset-attention-mask: expected a mask" in output
