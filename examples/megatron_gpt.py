"""megatron-core's GPTModel with FP8 layers and 8-bit optimizer states, in a loop of one's own.

    python examples/megatron_gpt.py

Without a GPU it runs on the CPU, in less than a minute. Megatron-LM's own script needs no code at all, only
`--spec megatron_ext.spec coat_layer_spec`.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import coat_ds
from megatron_ext import cpu
from megatron_ext.layer_specs import coat_layer_spec

LENGTH = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

# Megatron asks for a GPU in a dozen places; this answers for the CPU, and does nothing where there is a GPU
cpu.enable()
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(0)

config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=192,
    num_attention_heads=4,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func=F.silu,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bf16=True,
    params_dtype=torch.bfloat16,
    use_cpu_initialization=True,
    masked_softmax_fusion=False,
)
# what is COAT's: the spec, and the optimizer
model = GPTModel(
    config, coat_layer_spec, vocab_size=256, max_sequence_length=LENGTH, position_embedding_type="rope"
)
model.to(device, torch.bfloat16)
optimizer = coat_ds.CoatAdamW(model.named_parameters(), lr=3e-3, betas=(0.9, 0.95))

files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
data = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
positions = torch.arange(LENGTH, device=device).expand(8, -1)
for step in range(args.steps):
    starts = torch.randint(len(data) - LENGTH - 1, (8, 1), generator=torch.Generator().manual_seed(step))
    ids = data[starts + torch.arange(LENGTH + 1)].long().to(device)
    loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} loss {loss.item():.6f}")
found = coat_ds.state_bytes(optimizer)["bytes_per_parameter"]
print(f"bytes of states per parameter: {found:.3f}, two of them to make FP32 masters of the BF16 weights")
dist.destroy_process_group()
