"""Runs of Hugging Face's Trainer, Accelerate, TRL, PEFT and DeepSpeed itself, and what is left of them."""

import contextlib
import io
import itertools
import warnings

import deepspeed
import torch

import coat_ds
from tests.hosts import TEST_ALL
from tests.util import listening

VOCAB, LENGTH, STEPS, BATCH = 64, 32, 4, 4
# Trainer runs stage 2
STAGES = (0, 1, 2, 3) if TEST_ALL else (0, 1, 3)
BLOCK = {"enabled": True}
STATES_ALONE = {**BLOCK, "activations": False}
BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.95}


def llama(**config):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes, **config))


class Data(torch.utils.data.Dataset):
    """Sequences that count up, from various numbers."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = (torch.arange(LENGTH) * (1 + i % 3) + i) % VOCAB
        return {"input_ids": ids, "labels": ids}


def host_config(stage, block, **more):
    """Of Hugging Face's documentation, and the block."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "coat": block,
        **more,
    }


def arguments(cls, folder, deepspeed=None, **more):
    return cls(
        output_dir=str(folder),
        deepspeed=deepspeed,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // torch.distributed.get_world_size(),
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy=more.pop("save_strategy", "no"),
        report_to=[],
        disable_tqdm=True,
        seed=1,
        **BETAS,
        **more,
    )


def trained(trainer, resume=None):
    """What is left of a run: the mean losses, and of an engine with the block what it says of itself."""
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    coat = getattr(trainer.model_wrapped, "coat", None)
    return {"losses": losses, "coat": coat and str(coat), "states": coat and coat.states}


def trainer(folder, block, stage, model=None, section=None, resume=None, **more):
    from transformers import Trainer, TrainingArguments

    given = arguments(TrainingArguments, folder, host_config(stage, block, **(section or {})), **more)
    model = model or llama()
    found = trained(Trainer(model=model, args=given, train_dataset=Data(), eval_dataset=Data()), resume)
    return found | {"left": coat_ds.conversion_of(model) and coat_ds.conversion_of(model).left}


def with_sections(folder):
    """The optimizer and scheduler of the JSON, with what Trainer fills in."""
    return trainer(
        folder,
        BLOCK,
        2,
        section={
            "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps"), "auto")},
            "scheduler": {
                "type": "WarmupLR",
                "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto"),
            },
        },
        # without any, transformers before 5.18 gives DeepSpeed a number that it refuses
        warmup_steps=1,
    )


def lora(folder):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trainer(folder, BLOCK, 1, model=model) | {"trains": trains}


def tokenizer():
    """Of words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB - 2)} | {"<unk>": VOCAB - 2, "<end>": VOCAB - 1}
    split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=split, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )


def sft(folder, **more):
    """TRL with words that its tokenizer splits."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(f"w{(i + j) % 50}" for j in range(10 + i % 20)) for i in range(32)]
    run = SFTTrainer(
        model=llama(),
        args=arguments(SFTConfig, folder, host_config(2, BLOCK), max_length=LENGTH, **more),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
    )
    return trained(run)


def dpo(folder):
    """TRL and ZeRO-3 with a reference model, whose engine has no optimizer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def texts(step):
        return [" ".join(f"w{(i + step * j) % 50}" for j in range(6 + i % 9)) for i in range(16)]

    # counting what is saved hides ZeRO-3's parameters from TRL's kernel
    block = BLOCK
    run = DPOTrainer(
        model=llama(),
        # as LLaMA-Factory does
        ref_model=llama().requires_grad_(False),
        args=arguments(DPOConfig, folder, host_config(3, block), max_length=LENGTH),
        train_dataset=Dataset.from_dict({"prompt": texts(1), "chosen": texts(2), "rejected": texts(3)}),
        processing_class=tokenizer(),
    )
    return trained(run) | {"reference": str(run.ref_model.coat)}


def accelerated(block, stage=3):
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    section = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}}
    config = host_config(stage, block, optimizer=section, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), mixed_precision="bf16")
    model = llama()
    size = BATCH // accelerator.num_processes
    loader = torch.utils.data.DataLoader(Data(), batch_size=size)
    engine, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters(), lr=5e-3), loader)
    losses = []
    for batch in itertools.islice(loader, STEPS):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    return {"losses": losses, "coat": str(engine.coat)}


def without_deepspeed(folder, layout="stock", resume=None, **more):
    """Trainer alone: the two lines of the README."""
    from transformers import Trainer, TrainingArguments

    model = llama()
    keys = list(model.state_dict())
    coat_ds.convert(model)
    optimizer = coat_ds.CoatAdamW(
        model.named_parameters(), lr=5e-3, betas=(0.9, 0.95), checkpoint_layout=layout
    )
    run = Trainer(
        model=model,
        args=arguments(TrainingArguments, folder, **more),
        train_dataset=Data(),
        optimizers=(optimizer, None),
    )
    found = trained(run, resume)
    used = run.optimizer
    while hasattr(used, "optimizer"):
        used = used.optimizer
    found |= {"used": used is optimizer, "bytes": list(coat_ds.state_bytes(optimizer)["by_codec"])}
    return found | {
        "keys": list(model.state_dict()) == keys,
        "summary": coat_ds.conversion_of(model).summary(),
    }


def resumed_without_deepspeed(folder):
    """Losses of Trainer alone, of the compressed layout, and once more from the second step on."""
    saves = {"layout": "compressed", "save_strategy": "steps", "save_steps": 2}
    whole, again = (
        without_deepspeed(folder, resume=resume, **saves) for resume in (None, f"{folder}/checkpoint-2")
    )
    return whole["losses"], again["losses"]


def accelerated_alone(folder):
    """Accelerate without DeepSpeed, two micro-batches a step: the losses from a saved state on, and again."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="bf16", gradient_accumulation_steps=2
    )
    model = coat_ds.convert(llama())
    optimizer = coat_ds.CoatAdamW(model.named_parameters(), lr=5e-3, betas=(0.9, 0.95))
    loader = torch.utils.data.DataLoader(Data(), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = list(itertools.islice(loader, 2 * STEPS))

    def losses():
        found = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    before = losses()
    accelerator.save_state(folder)
    after = losses()
    accelerator.load_state(folder)
    held = coat_ds.state_bytes(optimizer.optimizer)["by_codec"]
    return {"losses": [before, after, losses()], "bytes": list(held)}


def engine_of(stage, block, model=None, **more):
    config = {
        "train_batch_size": BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95]}},
        "coat": block,
        **more,
    }
    return deepspeed.initialize(model=model or llama(), config=config)[0]


def step(engine, number):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ids = torch.stack([Data()[number * BATCH + i]["input_ids"] for i in range(rank, BATCH, world)])
    ids = ids.to(engine.device)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    loss = loss.detach().float()
    torch.distributed.all_reduce(loss)
    return loss.item() / world


def by_stages(lines):
    """Losses of each stage."""
    out = {}
    # on a CPU test_zero.py has states alone
    states = [(1, STATES_ALONE), (3, STATES_ALONE)] if torch.cuda.is_available() else []
    for stage, block in [(s, BLOCK) for s in STAGES] + states:
        lines.clear()
        engine = engine_of(stage, block)
        losses = [step(engine, i) for i in range(STEPS)]
        out[stage, block is BLOCK] = losses, str(engine.coat)
        converted = coat_ds.conversion_of(engine.module) is not None
        engine.destroy()
        out[stage, block is BLOCK] += (converted, coat_ds.conversion_of(engine.module) is not None)
    return out


def partitioned(lines):
    """A model whose weights are partitioned while it is built, so that they cannot be read when it is
    converted, and the table of its states."""
    config = {"train_batch_size": BATCH, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = llama()
    lines.clear()
    engine = engine_of(3, BLOCK, model)
    tables = [line for line in lines if "AdamW states of the whole model" in line]
    return {
        "losses": [step(engine, i) for i in range(STEPS)],
        "coat": str(engine.coat),
        "tables": tables,
    }


def cached(folder, **zero):
    """Losses without FP8 codes of weights kept over the two passes of a step, and with them: two steps, back
    to the checkpoint in the middle of the fourth, and on."""
    out = []
    for cache in ("none", "fp8"):
        block = {**BLOCK, "activations": {"weight_cache": cache}}
        engine = engine_of(
            3,
            block,
            gradient_accumulation_steps=2,
            train_batch_size=2 * BATCH,
            zero_optimization={"stage": 3, **zero},
        )
        losses = [step(engine, i) for i in range(4)]
        engine.save_checkpoint(f"{folder}/{cache}")
        losses += [step(engine, i) for i in range(4, 7)]
        engine.load_checkpoint(f"{folder}/{cache}")
        # of the step that was left in the middle nothing is there
        engine.optimizer.zero_grad()
        engine.micro_steps = 4
        losses += [step(engine, i) for i in range(4, 7)]
        out.append(losses)
        engine.destroy()
    return out


def meetings():
    """What an engine says where the script has converted the model before, and of FP16. Of other engines:
    test_engines_in_turn.py."""
    from coat_ds import CoatConfigError

    def said(*given, **more):
        try:
            engine = engine_of(1, *given, **more)
        except CoatConfigError as error:
            return f"error: {error}"
        return str(engine.coat)

    e4m3, out = {**BLOCK, "activations": {"backward_format": "e4m3"}}, {}
    own = coat_ds.convert(llama(), {"backward_format": "e4m3"})
    out["the script's, equal"] = said(e4m3, own)
    out["the script's, other"] = said({**BLOCK, "activations": {"backward_format": "e5m2"}}, own)
    out["the script's, off"] = said(STATES_ALONE, own)
    fp16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
    out["FP16"] = said(BLOCK, **fp16)
    old = {"bf16": None, "bfloat16": {"enabled": True}}
    for name, more in (("loaded in FP16", {}), ("loaded in FP16, DeepSpeed's old key", old)):
        loaded = llama().half()
        # some are loaded so
        loaded.model.norm.float()
        out[name] = said(BLOCK, loaded, **more)
    return out


def fresh():
    """Accelerate's state is one for a process."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(True)
    unset_hf_deepspeed_config()


def work(folder):
    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo")
    coat_ds.install()
    out, runs = {}, {
        "without DeepSpeed": lambda: without_deepspeed(f"{folder}/plain"),
        "resumed without DeepSpeed": lambda: resumed_without_deepspeed(f"{folder}/compressed"),
        "Trainer": lambda: trainer(f"{folder}/trainer", BLOCK, 2),
        "states alone": lambda: trainer(f"{folder}/states", STATES_ALONE, 2),
        "Trainer with sections": lambda: with_sections(f"{folder}/sections"),
        "LoRA": lambda: lora(f"{folder}/lora"),
        "SFT": lambda: sft(f"{folder}/sft"),
        "DPO": lambda: dpo(f"{folder}/dpo"),
        "Accelerate": lambda: accelerated(BLOCK),
        "Accelerate alone": lambda: accelerated_alone(f"{folder}/accelerate"),
    }  # fmt: skip
    if not TEST_ALL:
        # its Trainer is that of transformers; DPO's is TRL's
        del runs["SFT"]
    with listening() as lines, contextlib.redirect_stdout(io.StringIO()):
        for name, run in runs.items():
            lines.clear()
            out[name] = run()
            if isinstance(out[name], dict):
                out[name]["lines"] = [line for line in lines if "COAT" in line or "coat." in line]
            fresh()
        out["meetings"] = meetings()
        out["stages"] = by_stages(lines)
        out["zero.Init"] = partitioned(lines)
        out["cached"] = [
            cached(f"{folder}/released", stage3_param_persistence_threshold=100),
            # weights stay where they are in memory
            *([cached(f"{folder}/kept", stage3_param_persistence_threshold=10**6)] if TEST_ALL else []),
        ]
    return out
