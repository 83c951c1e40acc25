"""Runs of Hugging Face's Trainer for the tests: one line of results as JSON for each stage named on the command line.

Stage "plain" is the Trainer without DeepSpeed. Each run trains for 6 steps, and again from the checkpoint of step 3.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_allow_untested_optimizer": True,
}


def zero(stage: int) -> dict[str, Any]:
    """The configuration of a stage."""
    block: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 64}
    block["stage3_gather_16bit_weights_on_model_save"] = True
    return {**CONFIG, "zero_optimization": block}


def small_model() -> LlamaForCausalLM:
    """A Llama of about 30 thousand parameters with a tied embedding."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def run(stage: str, resume: bool) -> dict[str, Any]:
    """Losses, gradient norms, evaluation loss and the sum of the saved model's weights."""
    AcceleratorState._reset_state(reset_partial_state=False)
    plain = stage == "plain"
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 8, (12,), generator=generator) for _ in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=f"stage_{stage}",
        deepspeed=None if plain else zero(int(stage)),
        use_cpu=plain,
        max_steps=6,
        per_device_train_batch_size=8 if plain else 2,
        gradient_accumulation_steps=1 if plain else 2,
        gradient_checkpointing=not plain,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=small_model(), args=arguments, train_dataset=data, eval_dataset=data[:16])
    trainer.train(resume_from_checkpoint=f"stage_{stage}/checkpoint-3" if resume else None)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluation = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"stage_{stage}/final")
    trainer.accelerator.wait_for_everyone()
    saved = None
    if trainer.is_world_process_zero():
        from safetensors.torch import load_file

        weights = load_file(f"stage_{stage}/final/model.safetensors")
        saved = sum(weight.double().abs().sum().item() for weight in weights.values())
    return {
        "stage": stage,
        "loss": [entry["loss"] for entry in logs],
        "norm": [float(entry["grad_norm"]) for entry in logs],
        "evaluation": evaluation,
        "saved": saved,
        "rank": trainer.args.process_index,
        "ranks": trainer.args.world_size,
    }


if __name__ == "__main__":
    for one in sys.argv[1:]:
        for resumed in (False, True):
            result = run(one, resumed)
            if result["rank"] == 0:
                print("RESULT", json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
