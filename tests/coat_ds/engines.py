"""DeepSpeed's JSON and engines of it."""

# a block without layers in FP8
STATES = {"activations": False}


def adamw(lr: float, **params) -> dict:
    """AdamW for an engine with or without COAT: DeepSpeed would compile its own for the stock engine."""
    return {"type": "AdamW", "params": {"lr": lr, "torch_adam": True, **params}}


def config_of(stage: int = 1, block: dict | None = None, zero: dict | None = None, **keys) -> dict:
    """A JSON of BF16 and AdamW, with a coat block.

    block, zero: keys of the enabled block, and of "zero_optimization", besides. keys: other keys of the JSON;
    None drops one.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        # DeepSpeed allocates a gigabyte for gradients unless told
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, **(zero or {})},
        "coat": {"enabled": True, **(block or {})},
        **keys,
    }
    return {key: value for key, value in config.items() if value is not None}


def engine_of(model, stage: int = 1, block: dict | None = None, given: dict | None = None, **config):
    """An engine of `config_of`. given: arguments of deepspeed.initialize besides, such as an optimizer."""
    import deepspeed

    return deepspeed.initialize(model=model, config=config_of(stage, block, **config), **(given or {}))[0]
