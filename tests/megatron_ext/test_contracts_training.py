"""What the optimizer, recompute, options and the CPU runner rely on in Megatron, by name.

Seams check the signatures that they replace when they are installed; here stands the rest.
"""

import inspect

import pytest
import torch

from megatron_ext.optimizer.seam import BUILD


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.fixture(scope="module")
def host():
    from megatron.core import optimizer

    return optimizer


def test_adam_is_taken_from_globals(host):
    # our function is in its place if another test has installed the watch
    build = BUILD.original()
    assert {"Adam", "USING_PYTORCH_OPTIMIZER"} <= set(build.__code__.co_names)
    # called by name, so that our function is found
    assert build.__name__ in host.get_megatron_optimizer.__code__.co_names
    assert {"config", "model_chunks"} <= set(parameters(build))


def test_arguments_of_adam(host):
    source = inspect.getsource(host._get_megatron_optimizer_based_on_param_groups)
    names = ["adam_w_mode", "exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"]
    names += ["master_weights", "master_weight_dtype", "store_param_remainders"]
    for name in names:
        assert f'"{name}"' in source, name


def test_distributed_optimizer_takes_an_adamw(host):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    assert "torch.optim.AdamW" in inspect.getsource(DistributedOptimizer.__init__)


def test_states_pass_through_two_methods(host):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as cls

    readers = (cls.get_parameter_state_dp_reshardable, cls.get_parameter_state_dp_zero)
    writers = (cls.load_parameter_state_from_dp_reshardable, cls.load_parameter_state_from_fully_reshardable)
    for names, functions in (
        ("_get_main_param_and_optimizer_states", readers),
        ("_set_main_param_and_optimizer_states", writers),
    ):
        for function in functions:
            function = inspect.unwrap(function)
            assert f".{names}(" in inspect.getsource(function), function.__name__
    assert parameters(cls._get_model_param_range_map) == ["self", "param"]
    assert "self.model_param_group_index_map" in inspect.getsource(cls.__init__)


def test_what_other_optimizers_call_their_groups(host):
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    source = inspect.getsource(Float16OptimizerWithFloat16Params.__init__)
    for name in ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups"):
        assert f"self.{name}" in source, name


def test_the_check_for_transformer_engine_is_the_last_one(host):
    source = inspect.getsource(inspect.unwrap(host.OptimizerConfig.__post_init__))
    first, last = source.split("requires FusedAdam from TransformerEngine")
    # the code after it runs without --use-precision-aware-optimizer only
    assert "self." not in last.split("else:")[0]
    assert "use_precision_aware_optimizer_no_fp8_or_ds_fp8" in first


def test_checkpoint_keeps_inputs_by_a_class_of_its_module():
    from megatron.core.tensor_parallel import random

    assert issubclass(random.CheckpointFunction, torch.autograd.Function)
    assert parameters(random.checkpoint)[:2] == ["function", "distribute_saved_activations"]
    assert "ctx.save_for_backward(*args)" in inspect.getsource(random.CheckpointFunction.forward)


def test_a_spec_is_an_object_of_a_module():
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    assert isinstance(import_module(("megatron_ext.layer_specs", "coat_layer_spec")), ModuleSpec)


def test_layers_are_told_of_the_precision_file():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.quantization.quant_config import QuantizationConfig

    source = inspect.getsource(GPTModel.__init__)
    assert "module.finish_init(" in source and "config.quant_recipe" in source
    assert parameters(QuantizationConfig.__init__) == ["self", "config", "match_input", "config_key"]
