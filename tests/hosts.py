"""Changes to stock frameworks for the machines that test them: repairs of DeepSpeed 0.18, and less
compilation and fewer imports."""

import importlib.metadata
import multiprocessing.dummy
import os
from types import SimpleNamespace

import torch
from torch.optim.adamw import adamw

# set by make test-all; without it tests try fewer inputs and leave out long cases
TEST_ALL = os.environ.get("COAT_TEST_ALL") == "1"


def repair_old_deepspeed() -> None:
    """Works around four faults of DeepSpeed 0.18 that also affect stock AdamW, and that 0.19.8 does not have.

    With torch 2.13 the step of ZeRO 1 and 2 fails on more than one rank: it gathers into views of parameters
    outside of `no_grad`. On a CPU `deepspeed.checkpointing.checkpoint` fails: it makes a stream that it never
    uses, which the CPU accelerator does not have. A pipeline divides its gradients by the number of
    micro-batches in the last stage, as it should, and a second time in every other stage. After a step of
    ZeRO-3 it gathers all persistent parameters at once and waits for the last one only, which under gloo does
    not imply that the others have arrived: on busy cores some runs end in NaN (DeepSpeed #8539).
    """
    if not importlib.metadata.version("deepspeed").startswith("0.18."):
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    divide = DeepSpeedEngine._backward_prologue_per_tensor

    def divide_once(engine, gradient):
        return divide(engine, gradient) if engine.is_last_stage() else gradient

    gather = Init._allgather_params_coalesced

    def gather_one_by_one(init, params, *args, **kwargs):
        for param in params:
            gather(init, [param], *args, **kwargs)

    PipelineEngine._backward_prologue_per_tensor = divide_once
    Init._allgather_params_coalesced = gather_one_by_one
    DeepSpeedZeroOptimizer.step = torch.no_grad()(DeepSpeedZeroOptimizer.step)
    if get_accelerator().Stream is None:
        type(get_accelerator()).Stream = lambda self, device=None: None


class TorchAdam:
    """The functions of DeepSpeed's C++ for its CPU optimizers, in torch."""

    def create_adam(self, *_):
        pass

    destroy_adam = create_adam

    def adam_update(
        self, _, step, lr, beta1, beta2, eps, weight_decay, correction, param, grad, exp_avg, exp_avg_sq
    ):
        lists, counts = [[t] for t in (param, grad, exp_avg, exp_avg_sq)], [torch.tensor(step - 1.0)]
        with torch.no_grad():
            adamw(
                *(*lists, [], counts), amsgrad=False, maximize=False, foreach=False,
                beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps,
            )  # fmt: skip

    def multi_tensor_adam(self, _, __, lists, lr, beta1, beta2, eps, step, ___, correction, weight_decay):
        for grad, param, *moments in zip(*lists, strict=True):
            options = lr, beta1, beta2, eps, weight_decay, correction
            self.adam_update(None, step, *options, param, grad, *moments)


def without_compilation() -> None:
    """Unless all tests run, DeepSpeed's CPU optimizers compute with torch, because compilation takes minutes.

    DeepSpeed's own code makes their states, counts steps, saves and loads in either case. Of the CPU it reads
    the vendor alone, for which a second of measurements is made.
    """
    import cpuinfo
    from deepspeed.ops import op_builder

    if not TEST_ALL:
        for builder in (op_builder.CPUAdamBuilder, op_builder.FusedAdamBuilder):
            builder.load = lambda self: TorchAdam()
        cpuinfo.get_cpu_info = dict


def write_checkpoints_in_threads() -> None:
    """Megatron's checkpoints are written by two forked processes for each rank, whose results are in a queue
    of another process, a new Python that imports torch. Here threads write, and the queue is theirs."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.mp = SimpleNamespace(get_context=lambda method: multiprocessing.dummy)


def share_groups_of_the_same_ranks() -> None:
    """Megatron makes about 50 process groups for each layout, most of them of the same ranks. Without a GPU
    each costs 15 ms in all ranks, which connect and wait for each other: here the same ranks share one.

    Megatron destroys groups that name their backend, so these stay its own.
    """
    from megatron.core import parallel_state

    make, made = parallel_state.create_group, {}

    def create_group(ranks=None, backend=None, **kwargs):
        if backend is not None:
            return make(ranks, backend=backend, **kwargs)
        if tuple(ranks) not in made:
            made[tuple(ranks)] = make(ranks, **kwargs)
        return made[tuple(ranks)]

    parallel_state.create_group = create_group
