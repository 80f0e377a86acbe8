"""Fine-tunes a model of Hugging Face on your own data with TRL, all weights or LoRA, and saves it.
finetune.ipynb has the same steps for one GPU.

    coat plan Qwen/Qwen3-8B --gpus 8 --fit 80GB --for trainer       # prints ds.json and --batch
    torchrun --nproc-per-node 8 examples/finetune.py Qwen/Qwen3-8B chats.jsonl --deepspeed ds.json --batch 4
    python examples/finetune.py Qwen/Qwen3-8B chats.jsonl --lora    # one GPU, without DeepSpeed

Each line of the data is {"messages": [{"role": "user", "content": ...}, ...]} or {"text": ...}. The last
twentieth is held out. Needs `pip install trl`, with --lora also peft.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import coat_ds

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("model", help="a folder, or a model of the Hub")
parser.add_argument("data", help="a file of JSON lines")
parser.add_argument("--output", default="runs/finetune")
parser.add_argument("--deepspeed", metavar="JSON", help='with the "coat" block')
parser.add_argument("--lora", action="store_true", help="train adapters alone")
parser.add_argument("--lr", type=float, help="default: 2e-4 with --lora, else 1e-5")
parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch on a GPU")
parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence, at most")
parser.add_argument("--epochs", type=float, default=1.0)
args = parser.parse_args()

# %% Data, tokenizer and model

lr = args.lr or (2e-4 if args.lora else 1e-5)
config = SFTConfig(
    args.output,
    deepspeed=args.deepspeed,
    learning_rate=lr,
    per_device_train_batch_size=args.batch,
    per_device_eval_batch_size=args.batch,
    max_length=args.length,
    num_train_epochs=args.epochs,
    lr_scheduler_type="cosine",
    warmup_steps=0.03,
    adam_beta2=0.95,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    gradient_checkpointing=False,
    logging_steps=10,
    eval_strategy="epoch",
    save_strategy="no",
    report_to=[],
)
data = load_dataset("json", data_files=args.data, split="train").train_test_split(0.05, shuffle=False)
tokenizer = AutoTokenizer.from_pretrained(args.model)
# after the config: under ZeRO-3 each rank loads its part
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="sdpa")
if args.lora:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)

# %% FP8 layers and 8-bit AdamW

optimizers = (None, None)
if args.deepspeed is None:
    coat_ds.convert(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizers = (coat_ds.CoatAdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0), None)

# %% Train

trainer = SFTTrainer(
    model,
    config,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    optimizers=optimizers,
)
trainer.train()

# %% Evaluate and save

if args.deepspeed is None:
    # what will be deployed computes in BF16. With DeepSpeed "activations": {"evaluation": "stock"} does that
    coat_ds.unconvert(model)
    print(f"held-out loss in BF16: {trainer.evaluate()['eval_loss']:.4f}")
trainer.save_model(args.output)
