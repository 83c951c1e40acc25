"""Hugging Face's Trainer in 16 bits on CPU ranks, with the best model at the end; a line of results for each run."""

from __future__ import annotations

import json
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from tests.integrations.hf_runs import small_model, zero


def run(stage: int, **precision: bool) -> dict[str, Any]:
    """Losses, what the best model evaluates to, and the dtype of the saved model."""
    AcceleratorState._reset_state(reset_partial_state=True)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 8, (12,), generator=generator) for _ in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    folder = f"stage{stage}_{'_'.join(precision)}"
    arguments = TrainingArguments(
        folder,
        deepspeed=zero(stage),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
        **precision,
    )
    trainer = Trainer(model=small_model(), args=arguments, train_dataset=data, eval_dataset=data[:16])
    trainer.train()
    assert trainer.is_deepspeed_enabled and arguments.world_size == 2
    found = {
        "stage": stage,
        "precision": list(precision),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "best": trainer.state.best_metric,
        "evaluation": trainer.evaluate()["eval_loss"],
        "computed in": str(trainer.model_wrapped.configuration.compute_dtype),
    }
    trainer.save_model(f"{folder}/final")
    trainer.accelerator.wait_for_everyone()
    found["saved in"] = str(next(LlamaForCausalLM.from_pretrained(f"{folder}/final").parameters()).dtype)
    return found


if __name__ == "__main__":
    for one in (2, 3):
        for choice in ({"use_cpu": True}, {"use_cpu": True, "bf16": True}, {"fp16": True}):
            result = run(one, **choice)
            if torch.distributed.get_rank() == 0:
                print("RESULT", json.dumps(result), flush=True)
