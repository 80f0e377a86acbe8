"""Losses of a model that has nearly converged and goes on in COAT's layers.

Quickstart's GPT learns real text in FP32, with weights that are rounded to BF16: phase `long` of
`state_train`. From there each arm goes on by itself, in phase `tail`: layers that compute in BF16 or in FP8,
at learning rates that end at a thousandth of the quickstart's. All arms see the same text, with FP32 moments
and exact masters, so that layers are all that differs.
"""

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.pairs import paired, show
from benchmarks.common.spawn import one_process
from benchmarks.common.training import BETAS, SMALL, gpt
from benchmarks.state_train import BASELINE, PHASES, QUICK, Learner, Trial
from coat_ds.config import ActivationsConfig

PHASE, BF16, COAT, SAVED_ALONE = "tail", "BF16", "COAT", "COAT, linear layers in BF16"
# on a CPU nothing is summed with fewer bits, so that "fastest" is that with E4M3 gradients
LAYERS = {
    BF16: None,
    COAT: ActivationsConfig(),
    "COAT, E4M3 gradients": ActivationsConfig(backward_format="e4m3"),
    "COAT, saved in E4M3": ActivationsConfig(saved_format="e4m3"),
    "COAT, 8-bit attention": ActivationsConfig(attention_format="sqrt8"),
    SAVED_ALONE: ActivationsConfig(),
}
# of `SAVED_ALONE`, as --te-precision-config-file has it
NO_FP8 = {
    "configs": {"stock": {"coat": {"enabled": False}}},
    "matchers": {"linear": {"type": "glob", "pattern": "*linear*", "config": "stock", "enabled": True}},
}


def learner(vocab_size: int, name: str) -> Learner:
    """Of `LAYERS`. Its weights are to be given."""
    from megatron.core.quantization.quant_config import RecipeConfig

    spec = "coat_layer_spec" if LAYERS[name] else "sdpa_layer_spec"
    recipe = RecipeConfig.from_config_dict(NO_FP8) if name == SAVED_ALONE else None
    config = {"activations": LAYERS[name], "quant_recipe": recipe}
    return Learner(gpt(SMALL, vocab_size, 0, spec, bf16=True, **config))


def summary(rows: list[dict]) -> list[dict]:
    """Each arm in BF16 layers and in COAT's, beside what BF16's weights of the same seeds lose in BF16's."""
    return paired(rows, ("phase", "steps"), ("layers", "evaluated"), (BF16, BF16))


def options(parser) -> None:
    parser.add_argument("--seeds", type=int, default=8, help="how many, from 1 on (default %(default)s)")


@benchmark(needs_gpu=False, options=options)
def layer_train(arguments, table: Table) -> None:
    """Losses of a small GPT that goes on in COAT's layers near the end of its training, over seeds.

    `layers`: those that went on; `evaluated`: those that then computed `val_loss`, with the same weights.
    `to_baseline`: less the loss of the same seed that BF16 layers trained and computed, mean over seeds;
    `error`: its standard error. The file has single runs.
    """
    phases, seeds = PHASES, arguments.seeds
    if arguments.quick:
        phases, seeds = QUICK, 1
    with one_process():
        for seed in range(1, seeds + 1):
            trial = Trial(seed, phases, BETAS[1])
            evaluators = {name: learner(trial.corpus.vocab_size, name) for name in (BF16, COAT)}
            for name in LAYERS:
                state = trial.start(PHASE)
                trial.train(phases[PHASE], state, BASELINE, learner(trial.corpus.vocab_size, name))
                for evaluated, by in evaluators.items():
                    table.add(
                        phase=PHASE,
                        layers=name,
                        evaluated=evaluated,
                        seed=seed,
                        steps=phases[PHASE].steps,
                        val_loss=trial.val_loss(state, by),
                    )
    show(summary(table.rows))
