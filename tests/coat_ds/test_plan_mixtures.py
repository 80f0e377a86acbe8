"""`coat plan --megatron`: mixtures of experts as they are read and spread, against what stands on paper.

`tests/megatron_ext/test_plan.py` has Megatron's own models beside them.
"""

import dataclasses

import pytest

from coat_ds import cli, plan
from coat_ds.plan import Layout, PlanError, from_megatron, layout, rungs
from coat_ds.plan.saved import saved_per_token

WORDS = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 512 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--use-distributed-optimizer --seq-length 32 --num-experts 8 --moe-ffn-hidden-size 48"
)
# a thousand operations or bytes a second: times in milliseconds are counts
COUNTING = dataclasses.replace(
    plan.GPUS["h200"], **dict.fromkeys(("bf16", "attention", "copy", "link"), 1e3), fp8=2e3
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


def test_products_are_those_of_the_experts_that_a_token_takes():
    """Those of the router and of grouped experts at BF16's rate, others at FP8's, which is twice that."""
    found = {}
    for words in ("", "--moe-grouped-gemm"):
        for system in ("BF16", "COAT"):
            found[words, system] = plan.step_time(*read(words), rungs()[system], COUNTING).products
    of_experts, fp8, head = 4 * 2 * EXPERT, 4 * ATTENTION, TABLE
    for words, system in found:
        grouped = bool(words)
        halved = 0 if system == "BF16" else fp8 + of_experts * (not grouped)
        whole = fp8 + of_experts + 4 * ROUTER + head
        assert found[words, system] == pytest.approx(6 * 32 * (whole - halved / 2))


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


# of 32 tokens a GPU sends so many rows: its tokens to all others, or a token's six to their experts
DISPATCHED = {
    "allgather": ("--expert-model-parallel-size 8", 1, 32 * 7),
    "alltoall": ("--expert-model-parallel-size 8", 1, 32 * 6 * 7 / 8),
    "allgather of half": ("--expert-model-parallel-size 4", 2, 16 * 7),
    # and each of the two that share an expert's channels gets the other's
    "alltoall of half": ("--expert-model-parallel-size 4", 2, 16 * 6 * (3 / 4 + 1)),
}


@pytest.mark.parametrize("name", DISPATCHED)
@pytest.mark.parametrize("shared", [0, 48])
def test_messages_are_those_on_paper(name, shared):
    words, tensor, rows = DISPATCHED[name]
    words += f" --moe-router-topk 6 --moe-token-dispatcher-type {name.split()[0]}"
    words += f" --tensor-model-parallel-size {tensor} --sequence-parallel"
    words += f" --moe-shared-expert-intermediate-size {shared}" if shared else ""
    model, spread = read(words, 8)
    rest = (4 * (ATTENTION + 3 * 64 * shared) + 2 * TABLE + 9 * 64) / tensor + 4 * ROUTER
    # reduced and gathered once; each GPU's experts are nobody else's
    weights = 2 * 2 * rest * (1 - tensor / 8)
    # around attention, and around shared experts
    hidden = 4 * (10 if shared else 5) * 2 * 32 * 64 * (tensor - 1) / tensor
    # there and back, and their gradients, in each layer
    found = plan.step_time(model, spread, rungs()["BF16"], COUNTING).messages
    assert found == pytest.approx(weights + hidden + 4 * 4 * 2 * 64 * rows)


def test_the_optimizer_steps_each_experts_part():
    """Masters and both moments read and written, gradients made FP32, weights written."""
    found = plan.step_time(*read("--expert-model-parallel-size 4", 8), rungs()["BF16"], COUNTING).optimizer
    rest = 4 * (ATTENTION + ROUTER) + 2 * TABLE + 9 * 64
    assert found == pytest.approx((4 * 2 * EXPERT / 2 + rest / 8) * (16 + 8 + 2 + 2 + 10))


def test_the_allgather_dispatcher_holds_a_buffer():
    peaks = [
        plan.predict(*read(f"--expert-model-parallel-size 8 --moe-token-dispatcher-type {name}", 8), system)
        for system in [rungs()["COAT"]]
        for name in ("allgather", "alltoall")
    ]
    gathered, sent = (found.peak.buffers for found in peaks)
    assert gathered - sent == 2 * 8 * 32 * 64


def test_the_fullest_stage_of_a_pipeline_is_found():
    """The second of four, which alone has experts, and few tokens."""
    words = "--moe-layer-freq [0,1,0,0] --pipeline-model-parallel-size 4"
    model, spread = read(words, 4)
    found = plan.predict(model, spread, rungs()["BF16"]).peak
    assert found.weights == 2 * (ATTENTION + 8 * EXPERT + ROUTER + 2 * 64)


def test_a_shorter_last_stage_is_taken_for_a_full_one():
    """Of three layers each of two stages has two, the second those from the second layer on."""
    model, spread = read(
        "--num-layers 3 --moe-layer-freq [0,0,1] --pipeline-model-parallel-size 2 --vocab-size 51200", 2
    )
    found = plan.predict(model, spread, rungs()["BF16"]).peak
    assert found.logits
    assert found.weights == 2 * (2 * ATTENTION + DENSE + 8 * EXPERT + ROUTER + 100 * TABLE + 5 * 64)


def test_gradients_of_grouped_experts_are_whole_tensors():
    """COAT's reach `main_grad` through BF16 ones, of all experts of a GPU."""
    words = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    model, spread = read(words, 2)
    bf16, coat = (
        {memory.moment: memory for memory in plan.predict(model, spread, rungs()[name]).moments}["layers"]
        for name in ("BF16", "COAT")
    )
    assert coat.temporaries - bf16.temporaries == 2 * 4 * EXPERT


def test_gradients_come_back_to_all_tokens():
    """What the allgather dispatcher gathered: of 8 GPUs' tokens, beside those of two rows a token."""
    model, spread = read("--expert-model-parallel-size 8", 8)
    moments = {memory.moment: memory for memory in plan.predict(model, spread, rungs()["BF16"]).moments}
    assert moments["layers"].temporaries == 2 * 32 * (64 + (2 + 8) * 64)


def test_a_dense_layers_size_counts_where_there_is_one():
    """A wide one's gradients, of gate, up and the activation, are more than those of experts."""
    found = {}
    for where in ("[1,1,1,1]", "[0,1,1,1]"):
        model, spread = read(f"--ffn-hidden-size 6400 --moe-layer-freq {where}")
        moments = {memory.moment: memory for memory in plan.predict(model, spread, rungs()["COAT"]).moments}
        found[where] = moments["layers"].temporaries
    # hidden states; of two experts a row the gradients of input and output, one expert in front of its gate
    assert found["[1,1,1,1]"] == 2 * 32 * (64 + 2 * (2 * 64 + 2 * 48 / 8))
    assert found["[0,1,1,1]"] == 2 * 32 * (64 + 3 * 6400)


def test_gradients_of_a_wide_shared_expert_are_the_largest():
    """Of gate, up and the activation, as those of a dense layer."""
    model, spread = read("--moe-shared-expert-intermediate-size 6400")
    moments = {memory.moment: memory for memory in plan.predict(model, spread, rungs()["COAT"]).moments}
    assert moments["layers"].temporaries == 2 * 32 * (64 + 3 * 6400)


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
    assert "--spec megatron_ext.with_optimizer coat_layer_spec" in out


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


def test_a_rows_weights_are_those_of_its_gpus_experts():
    """With biases each of two rows a token keeps a weight for each of four experts, not of eight, in BF16."""
    kept = []
    for size in (1, 2):
        words = f"{WORDS} --moe-grouped-gemm --expert-model-parallel-size {size}".split()
        words.remove("--disable-bias-linear")
        model, said = from_megatron.from_arguments(words)
        kept.append(saved_per_token(model, layout.from_megatron(said, gpus=2), rungs()["COAT"]))
    assert kept[0] - kept[1] == 2 * 2 * (8 - 4)


def test_grouped_experts_have_any_gate():
    """Of GPT-OSS, for one."""
    words = (
        f"{WORDS} --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --moe-grouped-gemm"
    )
    words = words.split()
    words.remove("--swiglu")
    assert from_megatron.from_arguments(words)[0].experts.gated
