"""How training is spread over GPUs."""

from dataclasses import dataclass, replace

from coat_ds.plan.errors import PlanError

# DeepSpeed's defaults
BUCKET, SUB_GROUP, MAX_LIVE = 500_000_000, 1_000_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a training step on each GPU, and which part of the model a GPU has.

    Raises PlanError for a layout that is impossible or not planned.
    """

    micro_batch: int = 1
    """Sequences of a forward pass on a GPU (on the GPUs that share a model, with tensor parallelism)."""
    sequence: int = 2048
    """Tokens of a sequence."""
    gpus: int = 1
    """Number of all GPUs."""
    framework: str = "deepspeed"
    """"deepspeed", or "megatron" with its distributed optimizer."""
    stage: int = 1
    """DeepSpeed's ZeRO stage, from 1 on."""
    tensor: int = 1
    """Tensor parallel size, with sequence parallelism."""
    pipeline: int = 1
    """Pipeline parallel size, Megatron's."""
    expert: int = 1
    """Expert parallel size, Megatron's: a part of the data parallel size."""
    accumulation: int = 1
    """Micro-batches of a step."""
    global_batch: int | None = None
    """Sequences of a step on all GPUs, where they are fixed: accumulation follows from them."""
    fp32_gradients: bool = False
    """Gradients are accumulated in FP32: Megatron's default, DeepSpeed's `data_types.grad_accum_dtype`."""
    flat_gradients: bool = True
    """At stages 1 and 2 COAT has 16-bit gradients reduced into the flat tensor that its step reads. Not
    without DeepSpeed's `contiguous_gradients`, nor before DeepSpeed 0.19.8."""
    offload_optimizer: bool = False
    """Masters and states are in the CPU's memory."""
    offload_parameters: bool = False
    """ZeRO-3's parts of the weights are in the CPU's memory."""
    reduce_bucket: int = BUCKET
    """Elements of gradients that are reduced together."""
    overlap: bool = False
    """At stages 1 and 2 gradients are reduced during the rest of backward."""
    sub_group: int = SUB_GROUP
    """Elements that ZeRO-3 steps together."""
    max_live: int = MAX_LIVE
    """Elements of weights that ZeRO-3 gathers ahead (`stage3_max_live_parameters`)."""

    def __post_init__(self):
        for name in ("micro_batch", "sequence", "gpus", "tensor", "pipeline", "expert", "accumulation"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name}: expected a whole number above 0, found {value!r}. Correct it.")
        if self.stage not in (1, 2, 3):
            raise PlanError(
                f"stage: expected 1, 2 or 3, found {self.stage!r}. Give a --stage, or set "
                "zero_optimization.stage."
            )
        if self.framework == "megatron" and self.stage != 1:
            raise PlanError("--megatron: it has no ZeRO stages. Drop --stage.")
        for name in ("pipeline", "expert"):
            if self.framework != "megatron" and getattr(self, name) > 1:
                raise PlanError(f"--{name}: planned with --megatron alone. Drop it, or add --megatron.")
        if self.gpus % (self.tensor * self.pipeline):
            raise PlanError(
                f"gpus: {self.gpus} is no multiple of tensor times pipeline parallel size, "
                f"{self.tensor} x {self.pipeline}. Change one of them."
            )
        if self.data % self.expert:
            raise PlanError(
                f"--expert: {self.expert} does not divide the data parallel size, {self.data}. Change it, or "
                "--gpus."
            )
        if self.fp32_gradients and self.framework == "deepspeed" and self.stage == 1:
            raise PlanError(
                "data_types.grad_accum_dtype: FP32 is not planned at stage 1. Leave it out and add 4 bytes a "
                "parameter, or take stage 2."
            )
        if self.offload_parameters and self.stage != 3:
            raise PlanError(
                "zero_optimization.offload_param: it needs stage 3. Set zero_optimization.stage to 3."
            )

    @property
    def data(self) -> int:
        """Data parallel size."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def remote_expert_share(self) -> float:
        """The share of experts that a GPU does not have."""
        return 1 - 1 / self.expert

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch for each GPU. Tensor and sequence parallelism divide all of their bytes."""
        return self.micro_batch * self.sequence / self.tensor

    def of_global_batch(self, total: int) -> "Layout":
        """The same with the number of micro-batches that `total` sequences a step take."""
        at_once = self.micro_batch * self.data
        if not total or total % at_once:
            raise PlanError(
                f"global batch: {total} is no multiple of micro-batch times data parallel size, "
                f"{self.micro_batch} x {self.data}. Change one of them."
            )
        return replace(self, accumulation=total // at_once, global_batch=total)

    def grown(self, most: int) -> list["Layout"]:
        """With a micro-batch of `most`; where the global batch is fixed, with each up to `most` that divides
        it, the largest first."""
        if self.global_batch is None:
            return [replace(self, micro_batch=most)]
        sequences = self.global_batch // self.data
        sizes = (n for n in range(most, 0, -1) if sequences % n == 0)
        return [replace(self, micro_batch=n, accumulation=sequences // n) for n in sizes]
