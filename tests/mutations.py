"""Forty mistakes, each made in a copy of the tree. The tests have to fail for each one.

    make mutations                     # all of them, one after the other
    python -m tests.mutations 3 12     # some

Prints a table. Fails if the tests pass with a mistake, or if its text does not occur exactly once. Files are
found by the text, wherever they are.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "coat_ds", "megatron_ext")
FAILED = 1


class Mutation(NamedTuple):
    """`old`, which occurs once in the packages, is replaced by `new`; `tests` are arguments of pytest below
    `tests/`."""

    what: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "wrong beta: the second moment takes the first's",
        "b_v += rate2 * (b_g * b_g - b_v)",
        "b_v += rate1 * (b_g * b_g - b_v)",
        "kernels/test_adamw.py -k kernel_agrees",
    ),
    Mutation(
        "wrong bias correction: no root",
        "math.sqrt(1 - self.beta2**step)",
        "1 - self.beta2**step",
        "coat_ds/test_optimizer.py -k is_torch_adamw",
    ),
    Mutation(
        "wrong sign: weights grow instead of decaying",
        'b_p -= tl.where(tl.abs(b_p) < float("inf"),',
        'b_p += tl.where(tl.abs(b_p) < float("inf"),',
        "kernels/test_adamw.py -k decays",
    ),
    Mutation(
        "off by one: a master on a tie is split the other way",
        "(b_bits + 0x8000) >> 16, (b_bits >> 16) | 0x40",
        "(b_bits + 0x7FFF) >> 16, (b_bits >> 16) | 0x40",
        "kernels/test_adamw_masters.py -k special_weights",
    ),
    Mutation(
        "gate and up swapped in backward",
        "    return b_x, b_up\n",
        "    return b_up, b_x\n",
        "kernels/test_activation.py -k kernels_agree_with",
    ),
    Mutation(
        "a norm without epsilon",
        "tl.sum(b_x * b_x, axis=1) / h + eps)",
        "tl.sum(b_x * b_x, axis=1) / h)",
        "kernels/test_norm.py -k hard_inputs",
    ),
    Mutation(
        "wrong sign in the rotation's backward",
        "b_2 * b_cos_2 - b_1 * b_sin_1",
        "b_2 * b_cos_2 + b_1 * b_sin_1",
        "kernels/test_rope.py",
    ),
    Mutation(
        "lost check: infinity counts for a tensor's scale",
        'tl.where(b_abs < float("inf"), b_abs, 0.0)), axis=0)',
        "b_abs), axis=0)",
        "kernels/test_tensorwise.py -k bit_for_bit",
    ),
    Mutation(
        "missing clamp: subnormal scales",
        "e.clamp_min(-126)",
        "e",
        "kernels/test_tensorwise.py -k scales",
    ),
    Mutation(
        "off by half a level in the logarithmic code",
        "b_offset = 254.5 - log2_tile(b_scale)",
        "b_offset = 254.0 - log2_tile(b_scale)",
        "kernels/test_codecs.py -k 'agrees and log8'",
    ),
    Mutation(
        "stale cache: changes of a weight are not seen",
        "w.data_ptr(), w._version,",
        "w.data_ptr(), 0,",
        "kernels/test_weights.py",
    ),
    Mutation(
        "stale cache: steps of an optimizer are not seen",
        "    global _epoch\n    _epoch = next(_counter)",
        "    global _epoch",
        "kernels/test_weights.py",
    ),
    Mutation(
        "dropped all-reduce: ranks do not agree on a scale",
        "    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)\n",
        "",
        "kernels/test_parallel.py",
    ),
    Mutation(
        "dropped all-reduce of the gradient of a column-parallel layer's input",
        "return all_reduce(grad_x, parallel.group)",
        "return lambda: grad_x",
        "megatron_ext/test_parallel.py",
    ),
    Mutation(
        "missing group: norms of tensor-parallel parameters count like those of others",
        "kind = is_model_parallel_parameter(p), getattr(p, PIPE_REPLICATED, False)",
        "kind = getattr(p, PIPE_REPLICATED, False)",
        "megatron_ext/test_mpu.py",
    ),
    Mutation(
        "missing group: context-parallel ranks are not data-parallel",
        "_data_parallel_group(with_context_parallel=True)",
        "_data_parallel_group(with_context_parallel=False)",
        "megatron_ext/test_mpu.py",
    ),
    Mutation(
        "dropped all-reduce: norms drift apart under sequence parallelism",
        "        dist.all_reduce(total, group=group)\n",
        "",
        "megatron_ext/test_data_parallel.py",
    ),
    Mutation(
        "an unscaled gradient: of two factors the last counts",
        "self.scale * factor",
        "factor",
        "coat_ds/test_narrow_grad.py",
    ),
    Mutation(
        "wrong offset: ZeRO-3's parts lie where the next rank's do",
        "share * torch.distributed.get_rank(p.ds_process_group)",
        "share * (1 + torch.distributed.get_rank(p.ds_process_group))",
        "coat_ds/test_checkpoints.py -k groups_follow",
    ),
    Mutation(
        "wrong order: the first moment is taken before the one that it is relative to",
        "for name in SECOND_FIRST:\n            set_moment(self, p, group, name, tensors[name])",
        "for name in MOMENTS:\n            set_moment(self, p, group, name, tensors[name])",
        "megatron_ext/test_optimizer.py",
    ),
    Mutation(
        "wrong sign: the gradient of rotated head norms turns the other way",
        "tl.where((o_d < d // 2)[None, :], b_partner, -b_partner)",
        "tl.where((o_d < d // 2)[None, :], -b_partner, b_partner)",
        "kernels/test_head_norm.py",
    ),
    Mutation(
        "wrong sign: LayerNorm's gradient adds its mean",
        "b_grad_x -= (tl.sum(b_scaled, axis=1) / h)[:, None]",
        "b_grad_x += (tl.sum(b_scaled, axis=1) / h)[:, None]",
        "kernels/test_norm.py",
    ),
    Mutation(
        "missing factor: the gradient of an expert's weight is not times the router's",
        "to_tensor_words(b_output * b_weight, scale, False)",
        "to_tensor_words(b_output, scale, False)",
        "kernels/test_experts.py",
    ),
    Mutation(
        "wrong order: rows of experts go back to other tokens",
        "sums(rows, self, weights, bias)",
        "sums(rows, self._replace(back=self.order.view_as(self.back)), weights, bias)",
        "kernels/test_experts.py",
    ),
    Mutation(
        "off by one: a window is one token shorter",
        "seen.triu(-self.window)",
        "seen.triu(1 - self.window)",
        "kernels/test_packed.py",
    ),
    Mutation(
        "wrong order: gradients of stacked weights are swapped",
        "grad_w.split([len(w) for w in weights]) if",
        "grad_w.split([len(w) for w in weights])[::-1] if",
        "kernels/test_merged.py",
    ),
    Mutation(
        "lost check: an input of a recomputed region may change in place",
        "if counter._version != version:",
        "if counter is None:",
        "kernels/test_saved.py",
    ),
    Mutation(
        "lost bits: the lower half of a master weight is cast and not viewed",
        "shard_of(remainder, p).view(torch.int16)",
        "shard_of(remainder, p).to(torch.int16)",
        "coat_ds/test_optimizer_bf16.py",
    ),
    Mutation(
        "codes of a checkpoint: only larger exponents are tried",
        "for sign in (1, -1))",
        "for sign in (1, 1))",
        "coat_ds/test_recover.py",
    ),
    Mutation(
        "checkpoint layout: a restored first moment has no second moment to be relative to",
        "state_device(optimizer, p, group)).relative_to(second)",
        "state_device(optimizer, p, group)).relative_to(None)",
        "coat_ds/test_optimizer_state_dicts.py",
    ),
    Mutation(
        "checkpoint layout: the lower half of a master weight is written as a number and not as bits",
        "laid_out_like(value, local(value).view(torch.float16))",
        "laid_out_like(value, local(value).to(torch.float16))",
        "coat_ds/test_optimizer_bf16.py",
    ),
    Mutation(
        "wrong offset: groups do not begin where those of a parameter do",
        "head = -offset % GROUP_SIZE",
        "head = offset % GROUP_SIZE",
        "coat_ds/test_checkpoints.py -k groups_follow",
    ),
    Mutation(
        "wrong length: parts of ZeRO 1 and 2 reach over the end of a rank's partition",
        "min(p.numel() - offset, size - start)",
        "p.numel() - offset",
        "coat_ds/test_partitions.py",
    ),
    Mutation(
        "lost overflow: one finite gradient suffices",
        "~torch.stack(norms).isfinite().all()",
        "~torch.stack(norms).isfinite().any()",
        "coat_ds/test_grad_norm.py",
    ),
    Mutation(
        "config: 1 passes for true",
        "type(value) is type(c) and value == c",
        "value == c",
        "coat_ds/test_config.py",
    ),
    Mutation(
        "config: a block in the wrong place is not looked for",
        "if (key := misplaced_block(config)) is not None:",
        "if (key := None) is not None:",
        "coat_ds/test_host_config.py",
    ),
    Mutation(
        "main_grad: Megatron adds gradients that are there already",
        "weight.grad_added_to_main_grad = True",
        "weight.grad_added_to_main_grad = False",
        "megatron_ext/test_linear.py",
    ),
    Mutation(
        "main_grad: Megatron adds a gradient without content",
        "(torch.zeros_like if adds else torch.empty_like)(weight)",
        "torch.ones_like(weight)",
        "megatron_ext/test_linear.py",
    ),
    Mutation(
        "Megatron's checkpoints: states of frozen parameters go to others",
        "if here != there:",
        "if False:",
        "megatron_ext/test_optimizer.py",
    ),
    Mutation(
        "patches: any parameters of a framework's function will do",
        'if name == "..." else f"{name},"',
        'if name else f"{name},"',
        "coat_ds/test_patches.py",
    ),
)


def place_of(text: str, tree: Path) -> Path:
    """The one file of the packages that contains `text`; LookupError unless it occurs exactly once."""
    files = [
        path for room in ROOMS for path in sorted((tree / room).rglob("*.py")) if text in path.read_text()
    ]
    if len(files) != 1 or files[0].read_text().count(text) != 1:
        raise LookupError(f"expected once in {', '.join(ROOMS)}, found in {files}: {text}")
    return files[0]


def run(tests: str, tree: Path) -> tuple[int, str]:
    """The exit code of pytest, and its first failure."""
    environment = {
        **os.environ,
        # comes before the installed packages
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        # a file is restored within a second with the same size, so cached bytecode would be stale
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    file, *picked = shlex.split(tests)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{file}", *picked]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, failures[0] if failures else done.stdout[-2000:] + done.stderr[-2000:]


def outcome(mutation: Mutation, tree: Path) -> str:
    """The result of the tests with the mistake, which is undone afterwards."""
    path = place_of(mutation.old, tree)
    right = path.read_text()
    path.write_text(right.replace(mutation.old, mutation.new))
    try:
        code, said = run(mutation.tests, tree)
    finally:
        path.write_text(right)
    if code == FAILED:
        return f"caught: {said.split('::')[1].split(' - ')[0]}"
    return "NOT CAUGHT" if code == 0 else f"pytest ended with {code}: {said}"


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    chosen = {number: MUTATIONS[number - 1] for number in numbers}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        # the name under which the folder is installed
        (tree / "coat_kernels").symlink_to("kernels")
        for mutation in MUTATIONS:
            place_of(mutation.old, tree)
        # the tests pass in the copy without a mistake
        for tests in dict.fromkeys(mutation.tests for mutation in chosen.values()):
            code, said = run(tests, tree)
            if code:
                sys.exit(f"{tests}: fails without a mistake: {said}")
        outcomes = []
        print("| | mistake | tests | |\n|---|---|---|---|")
        for number, mutation in chosen.items():
            outcomes.append(outcome(mutation, tree))
            print(f"| {number} | {mutation.what} | `{mutation.tests}` | {outcomes[-1]} |", flush=True)
    if not all(found.startswith("caught") for found in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
