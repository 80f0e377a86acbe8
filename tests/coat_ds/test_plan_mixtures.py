"""`coat plan --megatron`: mixtures of experts as they are read and spread, against what stands on paper.

`tests/megatron_ext/test_plan.py` compares with Megatron's own models.
"""

import dataclasses

import pytest

from coat_ds import cli, plan
from coat_ds.plan import Layout, PlanError, from_megatron, layout, rungs

WORDS = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 512 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--use-distributed-optimizer --seq-length 32 --num-experts 8 --moe-ffn-hidden-size 48"
)
ATTENTION, DENSE, EXPERT, ROUTER, TABLE = 64 * (128 + 64), 3 * 64 * 128, 3 * 64 * 48, 64 * 8, 64 * 512


def read(more: str = "", gpus: int = 1) -> tuple[plan.Sizes, Layout]:
    model, said = from_megatron.from_arguments(f"{WORDS} {more}".split())
    return model, layout.from_megatron(said, gpus=gpus)


@pytest.mark.parametrize(
    ("frequency", "where"),
    [
        ("1", [1, 1, 1, 1]),
        ("2", [1, 0, 1, 0]),
        ("[0,1,1,0]", [0, 1, 1, 0]),
        ("([0]*1+[1]*3)", [0, 1, 1, 1]),
        ("([0,1]*2)", [0, 1, 0, 1]),
        ("2*[1]+[0]*2", [1, 1, 0, 0]),
    ],
)
def test_layers_with_experts(frequency, where):
    model, _ = read(f"--moe-layer-freq {frequency}")
    assert list(model.experts.where) == where
    assert [ROUTER in (n for module in layer for n in module) for layer in model.stack()] == where
    assert model.parameters == 4 * ATTENTION + 2 * TABLE + 9 * 64 + sum(
        8 * EXPERT + ROUTER if sparse else DENSE for sparse in where
    )


@pytest.mark.parametrize(
    ("words", "gpus", "routed", "shared"),
    [
        # of one GPU's elements: the experts, and all else; and by how much the optimizer divides each
        ("--expert-model-parallel-size 4", 8, (4, 2), (1, 8)),
        (
            "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            8,
            (4, 2),
            (2, 4),
        ),
        (
            "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 "
            "--sequence-parallel",
            8,
            (8, 1),
            (2, 4),
        ),
    ],
)
def test_experts_are_divided_by_their_own_sizes(words, gpus, routed, shared):
    model, spread = read(words, gpus)
    experts, norms, routers = 4 * 8 * EXPERT / routed[0], 9 * 64, 4 * ROUTER
    rest = (4 * ATTENTION + 2 * TABLE) / shared[0] + norms + routers
    memory = plan.predict(model, spread, rungs()["BF16"]).peak
    assert memory.weights == pytest.approx(2 * (experts + rest))
    assert memory.gradients == pytest.approx(4 * (experts + rest))
    assert memory.masters == pytest.approx(4 * (experts / routed[1] + rest / shared[1]))
    assert memory.states == pytest.approx(2 * memory.masters)
    whole = plan.predict(model, dataclasses.replace(spread, stage=0), rungs()["BF16"]).peak
    assert whole.masters == pytest.approx(4 * (experts + rest))
    # of FP8 copies there are two, of all but tables, norms and routers
    copies = plan.predict(model, spread, rungs()["COAT, fastest"]).peak.copies
    assert copies == pytest.approx(2 * (experts + 4 * ATTENTION / shared[0]))


def test_the_fullest_stage_of_a_pipeline_is_found():
    """The second of four, which alone has experts, and few tokens."""
    words = "--moe-layer-freq [0,1,0,0] --pipeline-model-parallel-size 4"
    model, spread = read(words, 4)
    found = plan.predict(model, spread, rungs()["BF16"]).peak
    assert found.weights == 2 * (ATTENTION + 8 * EXPERT + ROUTER + 2 * 64)


def test_gradients_have_the_type_that_is_reduced():
    for words, size in (("", 4), ("--grad-reduce-in-bf16", 2)):
        model, spread = read(words)
        assert plan.predict(model, spread, rungs()["BF16"]).peak.gradients == size * model.parameters


def test_the_command_plans_them(capsys):
    words = (
        f"{WORDS} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --moe-ffn-hidden-size 14336 "
        "--seq-length 4096 --expert-model-parallel-size 8 --global-batch-size 256 --micro-batch-size 1"
    )
    arguments = ["plan", "--gpus", "64", "--gpu", "h200", "--fit", "141GB"]
    assert cli.main([*arguments, "--megatron", *words.split()]) == 0
    out = capsys.readouterr().out
    assert "64 x H200, Megatron, expert 8, micro-batch 1 x 4096 tokens" in out
    assert "experts: 8 in a layer, 2 for a token, over 8 GPUs; under COAT they multiply in FP8" in out
    assert "Tokens are taken to be spread evenly over experts" in out
    assert "--spec megatron_ext.spec coat_layer_spec" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--moe-layer-freq [1,0,1]",
            "--moe-layer-freq: expected one number for each of 4 layers, found 3",
        ),
        ("--moe-router-topk 0", "--moe-router-topk: expected a whole number above 0, found 0"),
        ("--moe-layer-freq open(1)", r"a list as \(\[0\].*found 'open"),
        ("--moe-layer-freq [1]*[1]", r"expected a number .*found '\[1\]"),
        ("--moe-layer-freq 0", "expected a number above 0 .*found '0'"),
        (
            "--num-experts 1",
            "--moe-router-topk: expected at most 1, --num-experts, found 2",
        ),
        (
            "--moe-expert-capacity-factor 1.5",
            "--moe-expert-capacity-factor: found 1.5, and tokens that are dropped are not planned. Drop it",
        ),
        (
            "--moe-shared-expert-overlap",
            "--moe-shared-expert-overlap: found True, and COAT's layers refuse it",
        ),
        (
            "--quick-geglu",
            "--quick-geglu: COAT has it in experts of --moe-grouped-gemm alone",
        ),
        (
            "--quick-geglu --moe-grouped-gemm --moe-layer-freq 2",
            "--quick-geglu: .* and this model has other feed-forward layers",
        ),
        (
            "--quick-geglu --moe-grouped-gemm --moe-shared-expert-intermediate-size 64",
            "--quick-geglu: .* and this model has other feed-forward layers",
        ),
        ("--moe-latent-size 32", "--moe-latent-size: found 32.0, and experts of fewer channels"),
        (
            "--num-experts 6 --expert-model-parallel-size 4",
            "--num-experts: 6 is no multiple of --expert-model-parallel-size, 4",
        ),
        (
            "--moe-token-dispatcher-type all2all",
            "--moe-token-dispatcher-type: .*'all2all'.* 'allgather'",
        ),
        (
            "--pipeline-model-parallel-size 8",
            "--pipeline-model-parallel-size: expected at most 4, --num-layers, found 8",
        ),
        (
            "--decoder-first-pipeline-num-layers 1",
            "--decoder-first-pipeline-num-layers: found 1, and only stages with equal numbers of layers",
        ),
        (
            "--decoder-last-pipeline-num-layers 0",
            "--decoder-last-pipeline-num-layers: found 0, and only stages",
        ),
        (
            "--pipeline-model-parallel-layout Et*3|tL",
            "--pipeline-model-parallel-layout: found Et.*, and only stages",
        ),
        (
            "--tensor-model-parallel-size 2",
            "--sequence-parallel: Megatron wants it for experts and tensor parallelism",
        ),
    ],
)
def test_what_cannot_be_planned_is_named(words, message):
    with pytest.raises(PlanError, match=message):
        read(words)


def test_experts_that_do_not_fit_the_gpus_are_named():
    with pytest.raises(PlanError, match="gpus: 4 is no multiple of expert, expert tensor and .*, 4 x 2 x 1"):
        Layout(gpus=4, tensor=2, expert=4)
    with pytest.raises(PlanError, match="expert_tensor: expected a whole number above 0, found 0"):
        Layout(expert_tensor=0)


def test_shared_experts_with_biases_are_named():
    words = f"{WORDS} --moe-shared-expert-intermediate-size 64".split()
    words.remove("--disable-bias-linear")
    with pytest.raises(
        PlanError, match="--moe-shared-expert-intermediate-size: .* Add --disable-bias-linear"
    ):
        from_megatron.from_arguments(words)


@pytest.mark.parametrize(
    "words", ["--quick-geglu", "--activation-func-clamp-value 7", "--glu-linear-offset 1"]
)
def test_gates_that_dense_layers_do_not_have_are_named(words):
    dense = WORDS.partition(" --num-experts")[0]
    with pytest.raises(
        PlanError, match=f"{words.split()[0]}: COAT has it in experts of --moe-grouped-gemm alone"
    ):
        from_megatron.from_arguments(f"{dense} {words}".split())


def test_grouped_experts_have_any_gate():
    """Of GPT-OSS, for one."""
    words = (
        f"{WORDS} --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --moe-grouped-gemm"
    )
    words = words.split()
    words.remove("--swiglu")
    assert from_megatron.from_arguments(words)[0].experts.gated
