"""The training loop of many DeepSpeed tutorials, with only the import changed: a small Llama in fp16 under ZeRO-3.

    torchrun --nproc_per_node=2 examples/train_zero3.py

The model starts from random weights and the text is a source file of torch, so nothing is downloaded. It needs the
`transformers` package. The configuration has a learning rate for fine-tuning, so that the loss falls slowly here.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, get_linear_schedule_with_warmup

import onecopy as deepspeed

HERE = Path(__file__).parent


def text_dataset(length: int) -> TensorDataset:
    """Sequences [length] of bytes of a text that every installation of torch has."""
    data = torch.tensor(list(Path(torch.nn.Module.__call__.__code__.co_filename).read_bytes()))
    return TensorDataset(data[: len(data) // length * length].view(-1, length))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=str(HERE / "ds_config_zero3.json"))
    parser.add_argument("--steps", type=int, default=400, help="micro-batches on each rank")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            use_cache=False,
        )
    )
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=options.config
    )
    window = engine.gradient_accumulation_steps()
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=5, num_training_steps=options.steps // window
    )

    dataset = text_dataset(64)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True)

    engine.train()
    step, epoch = 0, 0
    while step < options.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for (tokens,) in loader:
            tokens = tokens.to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            if step % engine.gradient_accumulation_steps() == 0:
                engine.step()
                scheduler.step()
                engine.zero_grad()
            if step % (5 * window) == 0 and engine.global_rank == 0:
                print(f"micro-batch {step:4d}  loss {loss.item():.4f}  learning rate {scheduler.get_last_lr()[0]:.2e}")
            step += 1
            if step == options.steps:
                break

    if engine.global_rank == 0:
        print(f"{engine.global_steps} optimizer steps, {engine.skipped_steps} of them skipped")
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
