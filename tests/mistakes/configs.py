"""Mistakes in a DeepSpeed JSON: in the coat block, and outside of it."""

import torch

from tests.mistakes.makers import (
    ADAMW,
    BLOCK,
    Mistake,
    adapters_under_autotp,
    beside,
    block,
    engine,
    params,
)

MISTAKES = {
    'The `"coat"` block': [
        Mistake("a misspelt key", block(optimiser={}), ("coat.optimiser: ", "Did you mean 'optimizer'")),
        Mistake(
            "a misspelt key of an inner block",
            block(optimizer={"minnumel": 128}),
            ("coat.optimizer.minnumel: ", "(value 128)", "Known keys", "Did you mean 'min_numel'"),
        ),
        Mistake("a key that means nothing", block(x=1), ("coat.x: unknown key (value 1)", "Drop it")),
        Mistake(
            "no `enabled`", engine({"coat": {"optimizer": {}}}), ("coat.enabled: missing", 'Add "enabled"')
        ),
        Mistake("an empty block", engine({"coat": {}}), ("coat.enabled: missing", 'Add "enabled"')),
        Mistake(
            "`true` in place of the block", engine({"coat": True}), ("coat: ", "found True", "Use braces")
        ),
        Mistake(
            "`true` in place of an object",
            block(optimizer=True),
            ("coat.optimizer: ", "found True", "braces"),
        ),
        Mistake("a boolean in quotes", block(enabled="true"), ("coat.enabled: ", "true or false", "'true'")),
        Mistake('`"auto"`', block(enabled="auto"), ("coat.enabled: ", "No trainer fills in", "drop the key")),
        Mistake(
            "a size of groups",
            block(optimizer={"group_size": 64}),
            ("coat.optimizer.group_size: ", "found 64", "removed", "128 elements", "Drop the key"),
        ),
        Mistake(
            "a choice in quotes",
            block(activations={"cuda_graphs": "true"}),
            ("coat.activations.cuda_graphs: ", "found 'true'", "Leave the quotes out"),
        ),
        Mistake(
            "a negative number", block(optimizer={"min_numel": -1}), ("min_numel: ", "0 or more", "found -1")
        ),
        Mistake(
            "a layer that changes its format during a run",
            block(watch={"act": "act"}),
            ("coat.watch.act: ", "found 'act'", "removed", "coat watch", "Drop the key"),
        ),
        Mistake(
            "a misspelt format",
            block(optimizer={"exp_avg_format": "fp8_expand"}),
            ("coat.optimizer.exp_avg_format: ", "found 'fp8_expand'", "Did you mean 'fp8_expanded'"),
        ),
        Mistake(
            "formats of moments that do not go together",
            block(optimizer={"exp_avg_format": "ratio8", "exp_avg_sq_format": "fp8_expanded"}),
            (
                "coat.optimizer.exp_avg_format: ",
                "found coat.optimizer.exp_avg_sq_format",
                "Take exp_avg_sq_format",
            ),
        ),
        Mistake(
            "a format of first moments for second ones",
            block(optimizer={"exp_avg_sq_format": "ratio8"}),
            ("coat.optimizer.exp_avg_sq_format: ", "'log8'", "found 'ratio8'"),
        ),
        Mistake(
            "a boolean for a choice",
            block(activations={"weight_cache": True}),
            ("coat.activations.weight_cache: ", "'none', 'fp8'", "found True"),
        ),
        Mistake(
            "a key of an earlier version",
            block(activations={"forward_format": "e5m2"}),
            ("coat.activations.forward_format: ", "found 'e5m2'", "was removed", "Drop the key"),
        ),
        Mistake(
            "one pattern in place of a list",
            block(optimizer={"keep_fp32": "*norm*"}),
            ("coat.optimizer.keep_fp32: ", "a list of name patterns", "found '*norm*'"),
        ),
    ],
    "The DeepSpeed JSON around it": [
        Mistake("the block in capitals", engine({"COAT": BLOCK}), ("COAT: ", "ignored", 'Write "coat"')),
        Mistake("a misspelt block", engine({"coats": BLOCK}), ("coats: ", "ignored", 'Write "coat"')),
        Mistake(
            'the block inside `"optimizer"`',
            engine({"optimizer": {**ADAMW, "coat": BLOCK}}),
            ("optimizer.coat: ", "ignored", 'next to "optimizer"'),
        ),
        Mistake(
            "a learning rate in quotes", params(lr="1e-3"), ("params.lr: ", "'1e-3'", "Leave the quotes out")
        ),
        Mistake(
            '`"lr": "auto"` without Trainer', params(lr="auto"), ("params.lr: ", "'auto'", "write a number")
        ),
        Mistake("one beta", params(lr=1e-3, betas=0.9), ("params.betas: ", "[0.9, 0.95]", "found 0.9")),
        Mistake(
            "the optimizer's name alone",
            beside(optimizer="AdamW"),
            ("optimizer: ", '{"type": "AdamW"', "found 'AdamW'", "Use braces"),
        ),
        Mistake(
            "another optimizer",
            beside(optimizer={"type": "Lamb", "params": {"lr": 1e-3}}),
            ("optimizer.type: ", '"AdamW" or "Adam"', "found 'Lamb'", "coat.optimizer.enabled to false"),
        ),
        Mistake(
            "the optimizer's options under a misspelt key",
            beside(optimizer={"type": "AdamW", "param": {"lr": 1e-3}}),
            ("optimizer.param: ", "unknown key (value {'lr': 0.001})", "Did you mean 'params'"),
        ),
        Mistake(
            "an option that AdamW does not have",
            params(lr=1e-3, momentum=0.9),
            ("optimizer.params.momentum: ", "found 0.9", "Known: lr, betas", "Drop it"),
        ),
        Mistake(
            "an option of the block",
            params(lr=1e-3, min_numel=64),
            ("optimizer.params.min_numel: found 64", "a key of coat.optimizer", "Write it there"),
        ),
        Mistake(
            "AMSGrad",
            params(lr=1e-3, amsgrad=True),
            ("params.amsgrad: ", "needs False, found True", "Drop it"),
        ),
        Mistake(
            "another optimizer as argument of `initialize`",
            engine({"coat": BLOCK}, torch.optim.SGD([torch.zeros(1)])),
            ("found torch.optim.sgd.SGD", "pass a coat_ds.CoatAdamW"),
        ),
        Mistake(
            "offload to NVMe",
            beside(zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}}),
            ("offload_optimizer.device: found 'nvme'", "to the CPU only", 'Use "cpu"'),
        ),
        Mistake(
            "offload in parts",
            beside(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
            ("offload_optimizer.ratio: found 0.5", "Drop the key"),
        ),
        Mistake(
            "offload with BF16 masters",
            beside(
                bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
                zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}},
            ),
            ("bf16.bf16_master_weights_and_grads: found True", "Drop one of the two"),
        ),
        Mistake(
            "BF16 masters without BF16 states",
            beside(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
            ("bf16.bf16_master_weights_and_grads: ", "Set bf16.bf16_optimizer_states to true too"),
        ),
        Mistake("apex's amp", beside(amp={"enabled": True}), ("amp.enabled: found True", 'Use "bf16"')),
        Mistake(
            "checkpoints that cannot be read back",
            beside(zero_optimization={"stage": 1, "elastic_checkpoint": True}),
            ("zero_optimization.elastic_checkpoint: ", "Use universal checkpoints"),
        ),
        Mistake(
            "compressed recompute with partitioned inputs",
            engine(
                {
                    "coat": BLOCK | {"fp8_activation_checkpointing": True},
                    "optimizer": ADAMW,
                    "activation_checkpointing": {"partition_activations": True},
                }
            ),
            ("activation_checkpointing.partition_activations: found True", "Drop the key"),
        ),
        Mistake(
            "AutoTP over a model with adapters",
            adapters_under_autotp,
            (
                "tensor_parallel.autotp_size: found 2",
                "adapters of PEFT (0 and 0 more)",
                "Drop the key, or merge",
            ),
        ),
    ],
}
