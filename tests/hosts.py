"""What stock DeepSpeed 0.18 lacks to run on the machines that test it. Later versions need nothing."""

import importlib.metadata

import torch


def repair_old_deepspeed() -> None:
    """Works around three faults of DeepSpeed 0.18 that stock AdamW meets too, and that 0.19 has not.

    With torch 2.13 the step of ZeRO 1 and 2 fails on more than one rank: it gathers into views of parameters
    outside of `no_grad`. On a CPU `deepspeed.checkpointing.checkpoint` fails: it makes a stream that it never
    uses, which the CPU accelerator does not have. A pipeline divides its gradients by the number of
    micro-batches in the last stage, as it should, and once more in every other one.
    """
    if not importlib.metadata.version("deepspeed").startswith("0.18."):
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    divide = DeepSpeedEngine._backward_prologue_per_tensor

    def divide_once(engine, gradient):
        return divide(engine, gradient) if engine.is_last_stage() else gradient

    PipelineEngine._backward_prologue_per_tensor = divide_once
    DeepSpeedZeroOptimizer.step = torch.no_grad()(DeepSpeedZeroOptimizer.step)
    if get_accelerator().Stream is None:
        type(get_accelerator()).Stream = lambda self, device=None: None
