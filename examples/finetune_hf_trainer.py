"""Train or fine-tune a causal language model with Hugging Face's Trainer under ZeRO-3; nothing here knows onecopy.

    pip install "onecopy[hf]"
    onecopy run --nproc 2 examples/finetune_hf_trainer.py --deepspeed examples/ds_config_hf_zero3.json \\
        --output_dir runs/hf --max_steps 60 --per_device_train_batch_size 8 --learning_rate 3e-3 --report_to none

Without --model a small Llama learns the bytes of the text from random weights; with --model FOLDER that model and its
tokenizer are fine-tuned (smollm2_folder.py makes one of a real model). All options of TrainingArguments are there,
--resume_from_checkpoint among them.
"""

import resource
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Options:
    """What this script adds to the options of the Trainer."""

    text: str = str(Path(__file__).parents[1] / "README.md")
    model: str | None = None
    context: int = 64
    held_out: int | None = None  # examples for evaluation; default a tenth of the text


def model_and_tokens(options: Options) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model to train, and the text as one row of token numbers [n]."""
    text = Path(options.text).read_text(encoding="utf-8")
    if options.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        return AutoModelForCausalLM.from_pretrained(options.model), torch.tensor(tokenizer(text)["input_ids"])
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max(256, options.context),
    )
    return LlamaForCausalLM(config), torch.tensor(list(text.encode()))


def main() -> None:
    """Train, evaluate on the last tenth of the text, and save a folder that `from_pretrained` opens."""
    options, arguments = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    model, tokens = model_and_tokens(options)
    rows = tokens[: tokens.numel() // options.context * options.context].view(-1, options.context)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    held_out = options.held_out or max(1, len(examples) // 10)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=examples[:-held_out], eval_dataset=examples[-held_out:]
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"most memory of rank 0's process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
        print(f"evaluation loss {loss:.4f} after {trainer.state.global_step} steps; saved in {arguments.output_dir}")


if __name__ == "__main__":
    main()
