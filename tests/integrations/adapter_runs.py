"""LoRA adapters under Hugging Face's Trainer and TRL's SFTTrainer, for each stage named on the command line.

Stage "plain" is without DeepSpeed. Rank 0 prints one line of results as JSON for each stage.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.integrations.hf_runs import small_model, zero

ADAPTERS = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
HEADED = LoraConfig(
    r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM", lora_dropout=0.0
)
WORDS = [f"w{number}" for number in range(30)]


def options(stage: str, folder: str) -> dict[str, Any]:
    """Of both trainers: the same batches with and without DeepSpeed."""
    plain = stage == "plain"
    return {
        "output_dir": folder,
        "deepspeed": None if plain else zero(int(stage)),
        "use_cpu": plain,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
    }


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapters(stage: str, resume: bool = False, base: torch.dtype = torch.float32) -> tuple[Trainer, torch.nn.Module]:
    """Train adapters on a frozen base with gradient checkpointing; save every second step."""
    AcceleratorState._reset_state(reset_partial_state=False)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 8, (12,), generator=generator) for _ in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    model = get_peft_model(small_model().to(base), ADAPTERS)
    folder = f"lora_{stage}"
    arguments = TrainingArguments(**options(stage, folder), save_steps=2, gradient_checkpointing=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    return trainer, model


def sums(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: weight.double().abs().sum().item() for name, weight in weights.items()}


def merged(trainer: Trainer, model: Any) -> dict[str, float]:
    """The adapters merged into the base, whatever the stage, on every rank."""
    from onecopy.zero import GatheredParameters

    with GatheredParameters(list(model.parameters())):
        whole = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    alone = get_peft_model(small_model(), ADAPTERS)
    alone.load_state_dict(whole)
    expected = alone.merge_and_unload().state_dict()
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        base = model.merge_and_unload()
        found = {name: weight.detach().clone() for name, weight in base.state_dict().items()}
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, msg=lambda text, name=name: f"{name}: {text}")
    return sums(found)


def run_adapters(stage: str) -> dict[str, Any]:
    """Losses, the saved adapters, and what they give when they are opened again and when they are merged."""
    trainer, model = adapters(stage)
    folder = Path(f"lora_{stage}")
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    found: dict[str, Any] = {"losses": losses(trainer)}
    if trainer.is_world_process_zero():
        from safetensors.torch import load_file

        found["saved"] = sums(load_file(folder / "final" / "adapter_model.safetensors"))
        found["checkpoint"] = sums(load_file(folder / "checkpoint-4" / "adapter_model.safetensors"))
        again = PeftModel.from_pretrained(small_model(), folder / "final")
        found["opened"] = sums(again.merge_and_unload().state_dict())
    if stage != "plain":
        found["merged"] = merged(trainer, model)
    resumed, _ = adapters(stage, resume=True)
    found["resumed"] = losses(resumed)
    mixed, _ = adapters(stage, base=torch.bfloat16)  # PEFT keeps the adapters in fp32
    found["on bf16"] = losses(mixed)
    return found


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of 30 words, made on the spot."""
    numbers = {word: number for number, word in enumerate([*WORDS, "<pad>", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def sft(stage: str, folder: str, adapters: LoraConfig | None, resume: bool = False) -> SFTTrainer:
    """TRL's SFTTrainer on texts, saved every second step where there are adapters."""
    AcceleratorState._reset_state(reset_partial_state=False)
    texts = [" ".join(WORDS[(start + step * start) % 30] for step in range(10)) for start in range(64)]
    saving = {"save_strategy": "no"} if adapters is None else {"save_steps": 2}
    config = SFTConfig(**options(stage, folder), **saving, max_length=16, dataset_num_proc=None)
    trainer = SFTTrainer(
        model=small_model(),
        args=config,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=words(),
        peft_config=adapters,
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    return trainer


def run_sft(stage: str, adapters: LoraConfig | None) -> dict[str, Any]:
    """Losses, what was saved as its users save, and the losses of a resumed run where there are adapters."""
    folder = f"sft_{stage}_{len(adapters.modules_to_save or ()) if adapters else None}"
    trainer = sft(stage, folder, adapters)
    trainer.save_model(folder)
    trainer.accelerator.wait_for_everyone()
    found: dict[str, Any] = {"losses": losses(trainer)}
    if trainer.is_world_process_zero():
        from safetensors.torch import load_file

        name = "adapter_model.safetensors" if adapters else "model.safetensors"
        found["saved"] = sums(load_file(Path(folder) / name))
    if adapters is not None:
        found["resumed"] = losses(sft(stage, folder, adapters, resume=True))
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for one in sys.argv[1:]:
        result = {"stage": one, "adapters": run_adapters(one)}
        result |= {"sft": run_sft(one, None), "sft adapters": run_sft(one, ADAPTERS), "sft head": run_sft(one, HEADED)}
        if int(torch.distributed.get_rank()) == 0:
            print("RESULT", json.dumps(result), flush=True)
