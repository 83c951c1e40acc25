"""What Hugging Face's Trainer adds to a step: the Trainer on onecopy's `deepspeed` module against a bare loop of the engine.

    python -m benchmarks.hf_trainer [--stage 3] [--ranks 2] [--rounds 3] [--steps 20]

Both train the yardstick model on the same micro-batches, in turn in one launch. A step reaches from the end of one to the end of
the next, so it holds fetching the batch, callbacks and schedules. Given as wall time and as CPU time of the process, which
other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import engines, workload
from benchmarks.launch import on_ranks, table

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workload.add_arguments(parser)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(arguments).items() if name != "worker"]
    (found,) = on_ranks("benchmarks.hf_trainer", arguments.ranks, options)
    rows = []
    for way in ("bare loop", "Trainer"):
        row: list[object] = [way]
        for kind in ("wall", "cpu"):
            middle = statistics.median(found[way][kind])
            row += [f"{middle:.4f}", f"{middle / statistics.median(found['bare loop'][kind]):.3f}"]
        rows.append([*row, f"{found[way]['loss']:.4f}"])
    print(table(["way", "wall s a step", "/ bare", "CPU s a step", "/ bare", "mean loss"], rows))


def worker(arguments: argparse.Namespace) -> None:
    """Both ways in turn on this rank; rank 0 prints what it measured of itself."""
    from onecopy.integrations import deepspeed

    deepspeed.install(force=True)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ways = {"bare loop": bare_loop, "Trainer": hf_trainer}
    found: dict[str, dict[str, Any]] = {way: {"wall": [], "cpu": []} for way in ways}
    for _ in range(arguments.rounds):
        for way, run in ways.items():
            marks, found[way]["loss"] = run(arguments)
            for kind, column in zip(("wall", "cpu"), zip(*marks[WARM_UP:], strict=True), strict=True):
                found[way][kind] += [after - before for before, after in itertools.pairwise(column)]
            gc.collect()
            dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def examples(arguments: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """This rank's examples, as many as all steps need."""
    batches = workload.batches(arguments, dist.get_rank(), arguments.accumulation * (WARM_UP + arguments.steps))
    return [{"input_ids": row, "labels": row} for batch in batches for row in batch]


def bare_loop(arguments: argparse.Namespace) -> tuple[list[tuple[float, float]], float]:
    """(a mark at the end of each step, the mean loss): the loop of the README over a plain loader."""
    trainer = engines.Configured("onecopy", arguments.stage, arguments)
    loader = torch.utils.data.DataLoader(examples(arguments), batch_size=arguments.micro_batch)  # type: ignore[arg-type]
    marks, losses = [], []
    for place, batch in enumerate(loader):
        loss = trainer.engine(**batch).loss
        trainer.engine.backward(loss)
        trainer.engine.step()
        losses.append(loss.detach())
        if (place + 1) % arguments.accumulation == 0:
            marks.append(now())
    trainer.engine.destroy()
    mean = torch.stack(losses).float().mean()
    dist.all_reduce(mean)
    return marks, float(mean) / dist.get_world_size()


def hf_trainer(arguments: argparse.Namespace) -> tuple[list[tuple[float, float]], float]:
    """The same by the Trainer, with the same configuration."""
    from accelerate.state import AcceleratorState
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(dataset if dataset is not None else self.train_dataset)

    class Marks(TrainerCallback):
        def __init__(self) -> None:
            self.found: list[tuple[float, float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.found.append(now())

    AcceleratorState._reset_state(reset_partial_state=False)
    marks = Marks()
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, examples(arguments))
    # accelerate deals batches out in turn: rank 0's first batch, rank 1's first, rank 0's second ...
    size = arguments.micro_batch
    dealt = [row for start in range(0, len(rows[0]), size) for own in rows for row in own[start : start + size]]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            deepspeed=engines.document(arguments.stage, arguments),
            bf16=arguments.dtype == "bf16",
            use_cpu=True,
            max_steps=WARM_UP + arguments.steps,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=arguments.accumulation,
            learning_rate=workload.LEARNING_RATE,
            adam_beta1=workload.BETAS[0],
            adam_beta2=workload.BETAS[1],
            weight_decay=workload.DECAY,
            lr_scheduler_type="constant",
            logging_steps=WARM_UP + arguments.steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = InOrder(workload.make_model(arguments), settings, train_dataset=dealt, callbacks=[marks])
        trainer.remove_callback(PrinterCallback)  # it prints what looks like a record
        mean = trainer.train().training_loss
        trainer.model_wrapped.destroy()
    return marks.found, mean


if __name__ == "__main__":
    main()
