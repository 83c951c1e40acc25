"""One GPU: what the plan says beside the allocator's own count, and step time beside plain torch and FSDP2.

    python -m benchmarks.gpu --measure memory     # a 1B model on 1 rank, and as rank 0 of 8 and 64 imagined ones
    python -m benchmarks.gpu --measure time       # one rank: the cost of an engine without any communication

Imagined ranks (torch's fake back end) answer at once with whatever lies in memory: sizes and kernels are real, values
are not. So these numbers say what the device holds and what the host costs, and nothing about the network.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.launch import ROOT, table

MODEL = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
SETTINGS = [(1, 0), (8, 1), (8, 3), (64, 1), (64, 3)]  # world size, stage
GIB = 2**30


def document(stage: int, micro_batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=["memory", "time"], default="memory")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="recompute every block in the backward")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(json.loads(arguments.child), arguments)))
    elif arguments.measure == "memory":
        memory(arguments)
    else:
        times(arguments)


def in_process(job: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", json.dumps(job)]
    command += ["--micro-batch", str(arguments.micro_batch), "--sequence", str(arguments.sequence)]
    command += ["--layers", str(arguments.layers), *(["--checkpointing"] if arguments.checkpointing else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def child(job: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    if job["what"] == "plan":
        return planned(job["world"], job["stage"], arguments)
    if job["what"] == "run":
        return run_onecopy(job["world"], job["stage"], arguments)
    return run_torch(job["what"], job["world"], arguments)


def subject(arguments: argparse.Namespace) -> Any:
    from onecopy.plan.models import from_config_dict

    return from_config_dict({**MODEL, "num_hidden_layers": arguments.layers}, "llama-1b")


def build(arguments: argparse.Namespace) -> nn.Module:
    """The model with random weights, made on the device: on the host it would take most of the benchmark's time."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = subject(arguments).build()
    model.train()
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


# ------------------------------------------------------------------------------------------------------------- children
def planned(world: int, stage: int, arguments: argparse.Namespace) -> dict[str, Any]:
    from onecopy.plan.estimate import Setting, exact

    kind = "full" if arguments.checkpointing else "none"
    start = time.process_time()
    rehearsal = exact(
        subject(arguments),
        Setting(stage, arguments.micro_batch, 1, kind, "bf16"),
        world,
        arguments.sequence,
        document(stage, arguments.micro_batch),
    )
    return {"peak": rehearsal.peak, "by": rehearsal.at_peak(), "cpu_seconds": time.process_time() - start}


def start_world(world: int) -> None:
    if world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    else:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
        dist.init_process_group("nccl")


def batch(arguments: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.micro_batch, arguments.sequence)
    return torch.randint(0, int(MODEL["vocab_size"]), shape, generator=generator).cuda()  # type: ignore[call-overload]


def measured(step: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Three steps to warm up, then ten: seconds by the device's clock, the host's own seconds, and the peak."""
    tokens = batch(arguments)
    for _ in range(3):
        step(tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(tokens)
    torch.cuda.synchronize()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    seconds, host = [], []
    for _ in range(10):
        begin = time.perf_counter()
        step(tokens)
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {
        "peak": peak, "reserved": reserved, "seconds": statistics.median(seconds), "host": statistics.median(host),
        "nccl": torch.cuda.nccl.version() if hasattr(torch.cuda, "nccl") else None,
    }  # fmt: skip


def run_onecopy(world: int, stage: int, arguments: argparse.Namespace) -> dict[str, Any]:
    import onecopy

    start_world(world)
    model = build(arguments)
    engine, *_ = onecopy.initialize(model=model, config=document(stage, arguments.micro_batch))

    def step(tokens: torch.Tensor) -> None:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()

    found = measured(step, arguments)
    found["memory"] = engine.memory()
    return found


def run_torch(name: str, world: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plain mixed-precision torch (bf16 weights, fp32 masters stepped by fused AdamW), or FSDP2."""
    start_world(world)
    model = build(arguments)
    options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if name == "torch":
        model.cuda().to(torch.bfloat16)
        parameters = list(model.parameters())
        masters = [nn.Parameter(p.detach().float()) for p in parameters]
        optimizer = torch.optim.AdamW(masters, **options)

        def step(tokens: torch.Tensor) -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
            nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)

        return measured(step, arguments)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.cuda()
    mesh = init_device_mesh("cuda", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=name == "fsdp2")
    sharded = torch.optim.AdamW(model.parameters(), **options)

    def sharded_step(tokens: torch.Tensor) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sharded.step()
        sharded.zero_grad()

    return measured(sharded_step, arguments)


# --------------------------------------------------------------------------------------------------------------- tables
def memory(arguments: argparse.Namespace) -> None:
    rows = []
    for world, stage in SETTINGS:
        plan = in_process({"what": "plan", "world": world, "stage": stage}, arguments)
        run = in_process({"what": "run", "world": world, "stage": stage}, arguments)
        if "failed" in plan or "failed" in run:
            rows.append([world, stage, plan.get("failed", ""), run.get("failed", ""), "", "", ""])
            continue
        rows.append(
            [world, stage, f"{plan['peak'] / GIB:.3f}", f"{run['peak'] / GIB:.3f}", f"{plan['peak'] / run['peak'] - 1:+.2%}",
             f"{run['reserved'] / GIB:.3f}", f"{run['seconds']:.4f}"]
        )  # fmt: skip
        print(json.dumps({"world": world, "stage": stage, "plan": plan, "run": run}), file=sys.stderr, flush=True)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(
        table(
            ["ranks", "stage", "plan, GiB", "max_memory_allocated, GiB", "difference", "reserved, GiB", "step, s"], rows
        )
    )


def times(arguments: argparse.Namespace) -> None:
    rows = []
    jobs = [
        ("torch", 1, 0),
        ("fsdp2", 1, 0),
        ("run", 1, 0),
        ("run", 1, 1),
        ("run", 1, 3),
        ("fsdp2", 8, 0),
        ("run", 8, 3),
        ("run", 8, 1),
    ]
    for what, world, stage in jobs:
        found = in_process({"what": what, "world": world, "stage": stage}, arguments)
        name = f"onecopy, stage {stage}" if what == "run" else what
        if "failed" in found:
            rows.append([name, world, found["failed"], "", "", ""])
            continue
        tokens = arguments.micro_batch * arguments.sequence / found["seconds"]
        rows.append(
            [
                name,
                world,
                f"{found['seconds'] * 1e3:.1f}",
                f"{found['host'] * 1e3:.1f}",
                f"{tokens:,.0f}",
                f"{found['peak'] / GIB:.2f}",
            ]
        )
        gc.collect()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(table(["engine", "ranks (imagined above 1)", "step, ms", "host, ms", "tokens/s", "peak, GiB"], rows))


if __name__ == "__main__":
    main()
