"""How the samples beside this file were made: DeepSpeed on two CPU ranks trains the tests' small model.

Versions: 0.16.0, 0.17.6 and 0.18.9 where a sample's name says so, 0.19.8 elsewhere; torch 2.13.

    DS_ACCELERATOR=cpu python make.py OUT STAGE PRECISION
    DS_ACCELERATOR=cpu python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
        --input_folder OUT/global_step3 --output_folder UNIVERSAL/global_step3

It needs DeepSpeed installed; the tests do not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3] / "src"), str(Path(__file__).parents[3])]

import torch  # noqa: E402
import torch.multiprocessing  # noqa: E402

from tests.checkpoint import small  # noqa: E402
from tests.checkpoint.test_import import groups_of, plain_model  # noqa: E402


def work(rank: int, out: str, stage: int, precision: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29731",
        LOCAL_SIZE="2",
    )
    import deepspeed  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    config = small.config(stage, precision, 2)
    config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own would be compiled first
    model = plain_model(0)
    engine: Any
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    small.train(engine, 0, 3)
    engine.save_checkpoint(out, client_state={"epoch": 1, "words": ["a"]})
    losses = small.train(engine, 3, 5)
    if rank == 0:
        (Path(out) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1], int(sys.argv[2]), sys.argv[3]), nprocs=2)
