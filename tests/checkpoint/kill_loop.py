"""Two ranks train and save at every step; they are killed at random moments and started again, and must lose nothing.

Run as a program: `kill_loop.py FOLDER ROUNDS SEED`. A round loads the newest complete checkpoint and compares every loss
with the uninterrupted run's, to the bit; a last one, of `LAST_STEPS` steps, ends by itself. Nothing is tried twice: a rank that
does not load, one that ends before anybody was killed, and any error that is not a killed peer's, fails the loop. Ranks are
forked, so that a round costs no import.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from onecopy.errors import CheckpointError, CommunicationError  # noqa: E402
from tests.checkpoint import small  # noqa: E402

STEPS_PER_ROUND = 15  # more than a round of at most 0.3 s has come to on any machine: every kill finds ranks at work
LAST_STEPS = 20


class WrongLoss(Exception):
    """The checkpoint was not what the uninterrupted run had at that step."""


def rank_main(rank: int, port: int, folder: Path, reference: list[float] | None, ready: int, limit: int) -> list[float]:
    """Train from the newest checkpoint on; with a reference, compare. Returns the losses."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    engine = small.make_engine(3, checkpoint={"keep_last": 2}, onecopy={"timeout_seconds": 20})
    losses: list[float] = []
    if reference is not None:
        engine.load_checkpoint(folder)
        print(f"rank {rank} from step {engine.global_steps}", flush=True)
        os.write(ready, b"x")
    while engine.global_steps < limit:
        step = engine.global_steps
        (loss,) = small.train(engine, step, step + 1)
        losses.append(loss)
        if reference is not None:
            if loss != reference[step]:
                raise WrongLoss(f"step {step}: {loss} instead of {reference[step]}")
            engine.save_checkpoint(folder)
    return losses


def fork_ranks(folder: Path, reference: list[float] | None, limit: int) -> tuple[list[int], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reading, writing = os.pipe()
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                losses = rank_main(rank, port, folder, reference, writing, limit)
                if rank == 0 and reference is None:
                    torch.save(losses, folder / "reference.pt")
                os._exit(0)
            except (CommunicationError, CheckpointError) as error:  # one of these ends a rank whose peer is gone
                print(f"rank {rank}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                os._exit(1)
            except BaseException as error:
                print(f"WRONG: rank {rank}: {type(error).__name__}: {error}", flush=True)
                os._exit(3)
        children.append(child)
    os.close(writing)
    return children, reading


def main() -> int:
    folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    steps = STEPS_PER_ROUND * rounds + LAST_STEPS
    children, reading = fork_ranks(folder, None, steps)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    os.close(reading)
    reference = torch.load(folder / "reference.pt")
    run = folder / "run"
    alone = 0
    for number in range(rounds):
        children, reading = fork_ranks(run, reference, steps)
        for _ in range(2):
            if os.read(reading, 1) != b"x":
                print(f"WRONG: round {number}: a rank did not load")
                return 3
        os.close(reading)
        time.sleep(draw.uniform(0.0, 0.3))
        only_one = draw.random() < 0.3
        ended = [os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children]
        if any(result is not None for result in ended):
            print(f"WRONG: round {number}: a rank ended although nobody was killed")
            return 3
        victims = [draw.choice(children)] if only_one else children
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        if only_one:
            time.sleep(draw.uniform(0.0, 0.2))
            for child in children:
                os.kill(child, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        alone += only_one
        if 3 in codes:
            print(f"WRONG: round {number}: exit codes {codes}")
            return 3
        print(f"round {number}: {'one rank' if only_one else 'both ranks'} killed, exit codes {codes}", flush=True)
    newest = max(int(path.name.removeprefix("global_step")) for path in run.glob("global_step*"))
    children, reading = fork_ranks(run, reference, newest + LAST_STEPS)
    os.close(reading)
    if any(os.waitpid(child, 0)[1] != 0 for child in children):
        print("WRONG: the run to the end after the last kill")
        return 3
    tags = sorted(path.name for path in run.iterdir() if not path.name.startswith("."))
    print(
        f"{rounds} rounds, {alone} of them with one rank killed; then trained to step {newest + LAST_STEPS}; left: {tags}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
