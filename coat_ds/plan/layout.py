"""How training is spread over GPUs, as a DeepSpeed JSON or Megatron's arguments say it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coat_ds.plan.errors import PlanError
from coat_ds.plan.gathers import Limits
from coat_ds.zero.block import enabled, flag

HOSTS = ("deepspeed", "megatron")
DEVICES = ("gpu", "cpu")
# what Trainer and Accelerate make of "auto", from the model's channels
_FILLED_IN = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
# as DeepSpeed takes it
_FP32_NAMES = ("fp32", "float32", "float", "torch.float32")
# DeepSpeed's own
BUCKET, SUB_GROUP = 500_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a training step on each GPU, and who has which part of the model.

    Raises PlanError for what cannot be spread so.
    """

    micro_batch: int = 1
    """Sequences of a forward pass on a GPU (on the GPUs that share a model, with tensor parallelism)."""
    sequence: int = 2048
    """Tokens of a sequence."""
    gpus: int = 1
    """All of them."""
    stage: int = 1
    """Of ZeRO; with Megatron 1 is the distributed optimizer, 0 without it."""
    tensor: int = 1
    """Tensor parallel size."""
    pipeline: int = 1
    """Pipeline parallel size."""
    expert: int = 1
    """Expert parallel size, Megatron's."""
    expert_tensor: int | None = None
    """Tensor parallel size of routed experts. None: that of the rest."""
    gathers_tokens: bool = False
    """Each expert parallel rank has all tokens in a buffer (Megatron's allgather dispatcher)."""
    sequence_parallel: bool = True
    """Activations between tensor parallel products are split, too."""
    accumulation: int = 1
    """Micro-batches of a step."""
    global_batch: int | None = None
    """Sequences of a step on all GPUs, where they are fixed: accumulation follows from them."""
    host: str = "deepspeed"
    fp32_gradients: bool = False
    """Gradients are added up in FP32, as in Megatron, and by DeepSpeed's `data_types.grad_accum_dtype`."""
    immediate_update: bool = False
    """DeepSpeed's `bf16.immediate_grad_update`: each is added as it comes. Counts at stage 1 in FP32."""
    fp32_messages: bool = False
    """DeepSpeed's `communication_data_type`: gradients are reduced in FP32. Counts as the one before."""
    flat_gradients: bool = True
    """At stages 1 and 2 COAT has 16-bit gradients reduced into the flat tensor that its step reads. Not
    without DeepSpeed's `contiguous_gradients`, nor before DeepSpeed 0.19.8."""
    optimizer_device: str = "gpu"
    """The device of masters and states; "cpu" is DeepSpeed's `offload_optimizer`."""
    parameter_device: str = "gpu"
    """The device of ZeRO-3's parts of the weights; "cpu" is DeepSpeed's `offload_param`."""
    reduce_bucket: int = BUCKET
    """Elements of gradients that are reduced together."""
    overlap: bool | None = None
    """Whether gradients are reduced during backward. None is DeepSpeed's default: only at stage 3."""
    sub_group: int = SUB_GROUP
    """Elements that ZeRO-3 steps together."""
    prefetch: int | None = None
    """Elements that ZeRO-3 gathers ahead. None is DeepSpeed's own, and where layers are units a layer."""
    limits: Limits = field(default_factory=Limits)
    """The others of ZeRO-3's gathers."""
    second_copy: int = 1
    """GPUs that share ZeRO-3's second copy of the weights (`zero_hpz_partition_size`); 1: there is none."""
    quantized_gathers: bool = False
    """Weights are gathered in 8 bits (`zero_quantized_weights`)."""

    def __post_init__(self):
        for name in (
            "micro_batch",
            "sequence",
            "gpus",
            "tensor",
            "pipeline",
            "expert",
            *(["expert_tensor"] if self.expert_tensor is not None else []),
            "accumulation",
            "reduce_bucket",
            "second_copy",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name}: expected a whole number above 0, found {value!r}. Correct it.")
        for name, choices in (
            ("stage", (0, 1, 2, 3)),
            ("host", HOSTS),
            ("optimizer_device", DEVICES),
            ("parameter_device", DEVICES),
        ):
            if getattr(self, name) not in choices:
                raise PlanError(f"{name}: expected one of {choices}, found {getattr(self, name)!r}.")
        if self.gpus % (self.tensor * self.pipeline):
            raise PlanError(
                f"gpus: {self.gpus} is no multiple of tensor times pipeline parallel size, "
                f"{self.tensor} x {self.pipeline}. Change one of them."
            )
        if self.gpus % (self.expert_shares * self.pipeline):
            raise PlanError(
                f"gpus: {self.gpus} is no multiple of expert, expert tensor and pipeline parallel size, "
                f"{self.expert} x {self.of_experts_tensor} x {self.pipeline}. Change one of them."
            )
        if self.stage > 1 and (self.pipeline > 1 or self.host == "megatron"):
            raise PlanError(
                f"stage: {self.stage} does not go with {self.host} and a pipeline of {self.pipeline}. Set "
                "it to 1."
            )
        if self.fp32_gradients and self.host == "deepspeed" and not self.stage:
            raise PlanError(
                "data_types.grad_accum_dtype: DeepSpeed adds gradients up in FP32 from stage 1 on, found "
                "stage 0. Set zero_optimization.stage, or leave it out."
            )
        if self.parameter_device == "cpu" and self.stage != 3:
            raise PlanError('parameter_device: "cpu" is for stage 3 alone. Set the stage to 3, or drop it.')

    @property
    def data(self) -> int:
        """Data parallel size."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def in_one_buffer(self) -> bool:
        """Whether all gradients lie in one buffer in FP32: that of DeepSpeed's BF16_Optimizer."""
        adds_in_fp32 = self.host == "deepspeed" and self.stage == 1 and self.fp32_gradients
        return adds_in_fp32 and self.optimizer_device == "gpu"

    @property
    def of_experts_tensor(self) -> int:
        """Tensor parallel size of routed experts."""
        return self.expert_tensor or self.tensor

    @property
    def expert_shares(self) -> int:
        """GPUs that share a layer's routed experts."""
        return self.expert * self.of_experts_tensor

    @property
    def expert_data(self) -> int:
        """Data parallel size of routed experts."""
        return self.gpus // (self.expert_shares * self.pipeline)

    @property
    def dispatched(self) -> float:
        """Tokens of all GPUs that share experts, for each of a micro-batch's."""
        return self.expert_shares / self.tensor

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.sequence

    def grown(self, most: int) -> list["Layout"]:
        """With a micro-batch of `most`; where the global batch is fixed, with each up to that which divides
        it, the largest first. Many small ones keep a pipeline busy."""
        if self.global_batch is None:
            return [replace(self, micro_batch=most)]
        sequences = self.global_batch // self.data
        sizes = (n for n in range(most, 0, -1) if sequences % n == 0)
        return [replace(self, micro_batch=n, accumulation=sequences // n) for n in sizes]

    @property
    def between(self) -> int:
        """By how much activations between tensor parallel products are split."""
        return self.tensor if self.sequence_parallel else 1


def from_deepspeed(config: Mapping, hidden: int | None = None, **rest) -> Layout:
    """The layout of a DeepSpeed JSON. `rest`: further fields of `Layout`, which the JSON lacks.

    What `rest` gives goes before the JSON. hidden: the model's channels, from which Trainer and Accelerate
    fill in "auto" for the sizes of ZeRO's buckets. Raises PlanError for values that cannot be honoured.
    """
    zero = dict(section(config, "zero_optimization"))
    for key, filled_in in _FILLED_IN.items():
        if zero.get(key) == "auto":
            if hidden is None:
                raise PlanError(f'zero_optimization.{key}: "auto" needs the size of a model. Write a number.')
            zero[key] = filled_in(hidden)
    # DeepSpeed leaves such keys out
    zero = {key: value for key, value in zero.items() if value != "auto"}
    found: dict = {"stage": _number(zero, "zero_optimization.", "stage", 0)}
    for ours, theirs in (
        ("reduce_bucket", "reduce_bucket_size"),
        ("sub_group", "sub_group_size"),
        ("prefetch", "stage3_prefetch_bucket_size"),
    ):
        if theirs in zero:
            found[ours] = _number(zero, "zero_optimization.", theirs, None)
    limits = {
        ours: _number(zero, "zero_optimization.", theirs, None)
        for ours, theirs in (
            ("max_live", "stage3_max_live_parameters"),
            ("max_reuse", "stage3_max_reuse_distance"),
            ("persistence", "stage3_param_persistence_threshold"),
        )
        if theirs in zero
    }
    found |= {"limits": Limits(**limits), "quantized_gathers": bool(zero.get("zero_quantized_weights"))}
    found["flat_gradients"] = zero.get("contiguous_gradients") is not False
    if isinstance(zero.get("overlap_comm"), bool):
        found["overlap"] = zero["overlap_comm"]
    found |= _gradients(config, found["stage"])
    # 0 is as 1
    found["second_copy"] = max(1, _number(zero, "zero_optimization.", "zero_hpz_partition_size", 1))
    for ours, theirs, old in (
        ("optimizer_device", "offload_optimizer", "cpu_offload"),
        ("parameter_device", "offload_param", "cpu_offload_param"),
    ):
        offload = zero.get(theirs) or {"device": "cpu" if zero.get(old) else "none"}
        if not isinstance(offload, Mapping):
            raise PlanError(
                f'zero_optimization.{theirs}: expected an object such as {{"device": "cpu"}}, found '
                f"{offload!r}. Use braces."
            )
        if (device := offload.get("device", "none")) != "none":
            # what goes on to a disk goes past the CPU's memory
            found[ours] = "cpu"
            if device not in ("cpu", "nvme"):
                raise PlanError(f"zero_optimization.{theirs}.device: expected cpu or nvme, found {device!r}.")
    for ours, theirs in (
        ("micro_batch", "train_micro_batch_size_per_gpu"),
        ("accumulation", "gradient_accumulation_steps"),
    ):
        if config.get(theirs, "auto") != "auto":
            found[ours] = _number(config, "", theirs, None)
    given = found | rest
    layout = Layout(**given)
    if config.get("train_batch_size", "auto") == "auto":
        return layout
    total = _number(config, "", "train_batch_size", None)
    if not {"micro_batch", "accumulation"} <= given.keys():
        layout = _of_a_global_batch(layout, total, "micro_batch" in given)
    # fields in `rest` may change the global batch
    holds = "accumulation" not in rest and layout.micro_batch * layout.accumulation * layout.data == total
    return replace(layout, global_batch=total) if holds else layout


def _gradients(config: Mapping, stage: int) -> dict[str, bool]:
    """Fields that say in which type gradients are added up and reduced."""
    fp32 = section(config, "data_types").get("grad_accum_dtype") in _FP32_NAMES
    fp16 = enabled(config, "fp16")
    if fp32 and fp16 and stage == 1:
        raise PlanError(
            "data_types.grad_accum_dtype: FP32 is not planned at stage 1 with fp16. Leave it out for a plan, "
            "and add 2 bytes a parameter."
        )
    return {
        "fp32_gradients": fp32,
        "immediate_update": flag(section(config, "bf16").get("immediate_grad_update")),
        "fp32_messages": str(config.get("communication_data_type")).lower() == "fp32",
    }


def _of_a_global_batch(layout: Layout, total: int, micro_batch_is_given: bool) -> Layout:
    """With what follows from `train_batch_size` in DeepSpeed: accumulation, or else the micro-batch."""
    known = layout.micro_batch if micro_batch_is_given else layout.accumulation
    at_once = known * layout.data
    if not total or total % at_once:
        name = "train_micro_batch_size_per_gpu" if micro_batch_is_given else "gradient_accumulation_steps"
        raise PlanError(
            f"train_batch_size: {total} is no multiple of {at_once}, {name} times data parallel size, "
            f"{known} x {layout.data}. Change one of them."
        )
    return replace(layout, **{"accumulation" if micro_batch_is_given else "micro_batch": total // at_once})


def from_megatron(said: Mapping, **rest) -> Layout:
    """Of what `from_megatron.from_arguments` found, with what it does not say in `rest`."""
    layout = Layout(**said | rest)
    total = layout.global_batch
    if total is None:
        return layout
    at_once = layout.micro_batch * layout.data
    if total % at_once:
        raise PlanError(
            f"--global-batch-size: {total} is no multiple of {at_once}, which are computed at once."
        )
    return replace(layout, accumulation=total // at_once)


def section(config: Mapping, key: str) -> Mapping:
    """An object of a DeepSpeed JSON; empty if there is none. Raises PlanError for anything else."""
    value = config.get(key, {})
    if not isinstance(value, Mapping):
        raise PlanError(f"{key}: expected an object, found {value!r}. Use braces.")
    return value


def _number(values: Mapping, prefix: str, key: str, default: int | None) -> int:
    value = values.get(key, default)
    if isinstance(value, str) and value.isdigit():
        # as pydantic reads it
        value = int(value)
    # of floats neither NaN nor infinity is
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    if not is_whole or value < 0:
        raise PlanError(f"{prefix}{key}: expected a whole number, found {value!r}. Write the number.")
    return int(value)
