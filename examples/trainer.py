"""Hugging Face's Trainer with FP8 layers and 8-bit optimizer states; a tiny Llama that reads bytes of Python.

    python examples/trainer.py             # DeepSpeed; COAT's part is one line of its JSON
    python examples/trainer.py --plain     # without DeepSpeed: two lines
    torchrun --nproc-per-node 2 examples/trainer.py

Without a GPU it runs on the CPU, in less than a minute.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 64
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
    "coat": {"enabled": True},
}


class Text(torch.utils.data.Dataset):
    """The bytes of some of the standard library's sources, in pieces of LENGTH."""

    def __init__(self):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
        self.data = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)

    def __len__(self):
        return len(self.data) // LENGTH

    def __getitem__(self, i):
        ids = self.data[i * LENGTH : (i + 1) * LENGTH].long()
        return {"input_ids": ids, "labels": ids}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--plain", action="store_true", help="without DeepSpeed")
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()

# DeepSpeed reads the number of ranks from variables that a launcher sets; without one it looks for MPI
single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
if not args.plain:
    os.environ.update({**single, "MASTER_PORT": "29500", **os.environ})

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
own = {"output_dir": "runs/trainer", "max_steps": args.steps, "logging_steps": 10, "save_strategy": "no"}
own |= {"learning_rate": 5e-3, "adam_beta2": 0.95, "bf16": True, "use_cpu": not torch.cuda.is_available()}
optimizers = (None, None)
if args.plain:
    import coat_ds

    coat_ds.convert(model)
    optimizers = (coat_ds.CoatAdamW(model.named_parameters(), lr=5e-3, betas=(0.9, 0.95)), None)
arguments = TrainingArguments(**own, deepspeed=None if args.plain else DEEPSPEED, report_to=[])
Trainer(model=model, args=arguments, train_dataset=Text(), optimizers=optimizers).train()
