"""Megatron's experts of `--moe-grouped-gemm`: one grouped FP8 GEMM for each projection, saved in 8 bits.

They need no Transformer Engine. A projection's weights of all experts of a rank are one parameter, which the
grouped GEMM reads without a copy. Checkpoints have the names and parts of Megatron's SequentialMLP.
"""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules, apply_swiglu_sharded_factory
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from coat_ds.config import ActivationsConfig, CoatConfigError
from coat_ds.layers.conversion import describe_saved
from coat_ds.layers.inventory import Part
from coat_ds.layers.modules.converted_forward import is_evaluated
from coat_kernels.experts import ExpertsState, KernelGate, TorchGate, permuted_experts
from megatron_ext.layers.decoder_layer import wait_for_parameters
from megatron_ext.layers.linear import without_accumulation_fusion
from megatron_ext.layers.mlp import kernel_kind
from megatron_ext.layers.settings import Configurable

_PROJECTIONS = ("linear_fc1", "linear_fc2")
# the axis of an expert's weight that is split over tensor parallel ranks; Megatron refuses biases if it is
# split
_SPREAD = {"linear_fc1.weight": 0, "linear_fc2.weight": 1}


class GroupedLinear(torch.nn.Module):
    """One projection of all experts of a rank: `weight` [e, out, in], and `bias` [e, out] or None.

    linears: Megatron's, one for each expert; their values and attributes are copied. The module multiplies
        nothing by itself: `CoatGroupedMLP` reads the parameters.
    """

    def __init__(self, linears: list[torch.nn.Module]):
        super().__init__()
        self.count = len(linears)
        for name in ("weight", "bias"):
            of_each, stacked = [getattr(linear, name) for linear in linears], None
            if of_each[0] is not None:
                stacked = torch.nn.Parameter(torch.stack([p.detach() for p in of_each]))
                marks = dict(vars(of_each[0]))
                if marks.get("tensor_model_parallel"):
                    marks["partition_dim"] += 1
                vars(stacked).update(marks)
            self.register_parameter(name, stacked)

    def finish_init(self, quant_config) -> None:
        """Raises CoatConfigError if Megatron's `--te-precision-config-file` sets FP8 options here."""
        if wanted := {} if quant_config is None else quant_config.config.get("coat", {}):
            raise CoatConfigError(
                f"--te-precision-config-file: configs.{quant_config.config_key}.coat, for "
                f"{quant_config.match_input.module_path}: found {wanted}, but all experts of "
                "--moe-grouped-gemm multiply in E4M3. Narrow the pattern to other layers, or remove "
                "--moe-grouped-gemm."
            )

    def coat_part(self) -> Part:
        return Part("linear", f"e4m3, {self.count} experts in one grouped GEMM")

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}, bias={self.bias is not None}"


class CoatGroupedMLP(Configurable, SequentialMLP):
    """Megatron's SequentialMLP with all of a rank's experts in one grouped FP8 GEMM for each projection.

    It saves its input and the input of the activation for backward, both in 8 bits. Initial values and
    attributes of parameters are SequentialMLP's, and so are its state dicts, sharded or not; state dicts of
    Transformer Engine's grouped experts load, too. Any activation made of torch's operations works, gated or
    not, and so do biases.
    """

    def __init__(self, num_local_experts: int, config, submodules=None, *args, **kwargs):
        # stock linear layers, for their initial values
        stock = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(num_local_experts, without_accumulation_fusion(config), stock, *args, **kwargs)
        for name in _PROJECTIONS:
            setattr(self, name, GroupedLinear([getattr(expert, name) for expert in self.local_experts]))
        del self.local_experts
        self.register_state_dict_post_hook(_to_sequential)
        self.register_load_state_dict_pre_hook(_from_others)
        self.apply_activations(ActivationsConfig())

    def apply_activations(self, activations: ActivationsConfig) -> None:
        super().apply_activations(activations)
        self._state = ExpertsState(activations.weight_cache, activations.fast_accumulation != "none")
        config, gated = self.config, self.config.gated_linear_unit
        how = {"saved_format": activations.saved_format, "gated": gated}
        self._gate = TorchGate(self._act, **how)
        if kind := kernel_kind(config):
            limit, offset = (
                (config.activation_func_clamp_value, config.glu_linear_offset) if gated else (None, 0.0)
            )
            self._gate = KernelGate(kind, **how, limit=limit, offset=offset)

    def _act(self, x: torch.Tensor) -> torch.Tensor:
        """The activation as Megatron defines it."""
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(x)
        gate, up = x.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return config.activation_func(gate) * (up + config.glu_linear_offset)

    def coat_part(self) -> Part:
        return Part("feed_forward", describe_saved(self.activations))

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Rows [n, h] in the order of this rank's experts, how many each has [e] and the router's weights [n]
        -> the weighted outputs [n, h], and None: biases are added."""
        x, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x = (probs.unsqueeze(-1) * x).to(x.dtype)
            probs = torch.ones_like(probs)
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        wait_for_parameters(fc1)
        wait_for_parameters(fc2)
        rows = x.to(torch.bfloat16)
        if self.activations.evaluation == "stock" and is_evaluated(self):
            y = self._in_bf16(rows, tokens_per_expert, probs)
        else:
            y = permuted_experts(
                rows,
                tokens_per_expert,
                probs,
                fc1.weight,
                fc2.weight,
                self._gate,
                gate_up_bias=fc1.bias,
                down_bias=fc2.bias,
                state=self._state,
            )
        return y.to(x.dtype), None

    def _in_bf16(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs) -> torch.Tensor:
        """The weighted outputs without FP8 and without gradients."""
        offs = tokens_per_expert.cumsum(0).to(rows.device, torch.int32)
        expert = torch.searchsorted(
            offs, torch.arange(len(rows), dtype=offs.dtype, device=offs.device), right=True
        )

        def project(x: torch.Tensor, linear: GroupedLinear) -> torch.Tensor:
            y = F.grouped_mm(x, linear.weight.to(x.dtype).transpose(1, 2), offs=offs)
            return y if linear.bias is None else y + linear.bias.to(x.dtype)[expert]

        a = self._act(project(rows, self.linear_fc1)).to(rows.dtype)
        return (project(a, self.linear_fc2) * probs.unsqueeze(-1)).to(rows.dtype)

    def backward_dw(self) -> None:
        """Does nothing: weights have their gradients when backward is over."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None) -> dict:
        """The parts of a distributed checkpoint, which are SequentialMLP's, for any number of ranks."""
        alone = (metadata or {}).get("singleton_local_shards", False)
        data, tensor = self.dp_group.rank(), self.tp_group.rank()
        found = {}
        for name in _PROJECTIONS:
            for kind, p in getattr(self, name).named_parameters():
                build = functools.partial(self._parts, f"{name}.{kind}", sharded_offsets, alone)
                key = f"{prefix}experts.{name}.{kind}"
                found[f"{prefix}{name}.{kind}"] = ShardedTensorFactory(key, p, build, _merged, (0, 0, data))
            for i in range(self.num_local_experts):
                # SequentialMLP's linear layers have such an entry, which is empty
                number, offsets = self._place(i, sharded_offsets, alone)
                key = f"{prefix}experts.{number}{name}._extra_state"
                found[f"{prefix}{name}._extra_state{i}"] = make_sharded_object_for_checkpoint(
                    None, key, offsets, (0, tensor, data)
                )
        return found

    def _place(self, i: int, sharded_offsets: tuple, alone: bool) -> tuple[str, tuple]:
        """The prefix of an expert's keys, and the expert's index in tensors of all experts."""
        number = self.ep_group.rank() * self.num_local_experts + i
        if alone:
            return f"{number}.", sharded_offsets
        count = self.ep_group.size() * self.num_local_experts
        return "", (*sharded_offsets, (len(sharded_offsets), number, count))

    @torch.no_grad()
    def _parts(
        self, name: str, sharded_offsets: tuple, alone: bool, key: str, stacked, replica_id, *_
    ) -> list:
        """The parts of each expert of `stacked`, a parameter or a state of its shape: one, or gate and up."""
        halves = self.config.gated_linear_unit and name.startswith("linear_fc1")
        parts = []
        for i, tensor in enumerate(stacked):
            number, offsets = self._place(i, sharded_offsets, alone)
            spread = ()
            if name in _SPREAD:
                spread = ((len(offsets) + _SPREAD[name], self.tp_group.rank(), self.tp_group.size()),)
            part = ShardedTensor.from_rank_offsets(
                key.removesuffix(name) + number + name,
                tensor,
                *offsets,
                *spread,
                replica_id=replica_id,
                prepend_axis_num=len(offsets),
            )
            parts.append(apply_swiglu_sharded_factory(part, offsets, alone).build() if halves else [part])
        return parts


def _merged(parts: list) -> torch.Tensor:
    """The inverse of `_parts`."""
    return torch.stack([torch.cat(of_one) for of_one in parts])


def _names(module: CoatGroupedMLP, prefix: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """By name of each parameter in a state dict: the names of each expert's part in SequentialMLP's state
    dict, and in that of Transformer Engine's grouped experts."""
    count = range(module.num_local_experts)
    for name in _PROJECTIONS:
        for kind, _ in getattr(module, name).named_parameters():
            sequential = [f"{prefix}local_experts.{i}.{name}.{kind}" for i in count]
            yield f"{prefix}{name}.{kind}", sequential, [f"{prefix}{name}.{kind}{i}" for i in count]


def _to_sequential(module: CoatGroupedMLP, state_dict: dict, prefix: str, _) -> None:
    """Renames the keys of a state dict to SequentialMLP's. ZeRO-3's empty parameters keep their names."""
    for own, sequential, _ in _names(module, prefix):
        if own in state_dict and len(state_dict[own]):
            state_dict.update(zip(sequential, state_dict.pop(own), strict=True))


def _from_others(module: CoatGroupedMLP, state_dict: dict, prefix: str, *_) -> None:
    """Accepts a state dict with the names of SequentialMLP, of Transformer Engine or of this module."""
    for own, *others in _names(module, prefix):
        for names in others:
            if all(name in state_dict for name in names):
                state_dict[own] = torch.stack([state_dict.pop(name) for name in names])
    for name in [name for name in state_dict if name.startswith(prefix) and "_extra_state" in name]:
        del state_dict[name]
