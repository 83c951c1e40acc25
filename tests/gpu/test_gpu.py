"""What only an accelerator can show: streams, NCCL, the allocator's own count, and that the host never waits.

    ONECOPY_TEST_GPU=1 python -m pytest tests/gpu tests/engine/test_equality.py

Ranks of the test pool share the devices there are (gloo carries their tensors); NCCL is tried with one rank, and with
imagined ones. The variable decides, because asking the driver here would break the ranks that are forked later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecopy
from tests.reference import Case, assert_like, assert_ranks_agree, assert_same_bits, expected, train_all
from tests.worlds import world
from tests.zoo import Shape

pytestmark = pytest.mark.skipif("ONECOPY_TEST_GPU" not in os.environ, reason="needs an accelerator (ONECOPY_TEST_GPU)")
ROOT = Path(__file__).resolve().parent.parent.parent
WIDE = Shape(13, ("linear", "linear", "linear", "linear"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_equals_plain_torch_on_the_cpu(size: int, precision: str) -> None:
    case = Case(WIDE, precision=precision, clip=0.1, groups="decay", windows=(1, 1, 1, 1))
    every = [case.with_(stage=stage) for stage in range(4)]
    ranks = world(size).run(train_all, every, timeout=300)
    for place, one in enumerate(every):
        assert_ranks_agree([rank[place] for rank in ranks], one)
        assert_like(ranks[0][place], expected(one, size), one)
        assert_same_bits(ranks[0][0], ranks[0][place], one)


def test_accumulated_windows_equal_plain_torch() -> None:
    cases = [Case(WIDE, stage=stage, windows=(3, 3, 3), clip=1.0) for stage in range(4)]
    ranks = world(2).run(train_all, cases, timeout=300)
    for place, case in enumerate(cases):
        assert_like(ranks[0][place], expected(case, 2), case)


def big_steps(stage: int, overlap: bool, steps: int) -> list[float]:
    """Losses and norms of a model whose kernels take long enough that a missing wait shows."""
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
        for _ in range(12)
    ]
    model = torch.nn.Sequential(*blocks)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "overlap_comm": overlap, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = onecopy.initialize(model=model, config=config)
    found = []
    generator = torch.Generator().manual_seed(engine.communicator.rank)
    for _ in range(steps):
        x = torch.randn(512, 1024, generator=generator).to(engine.device, torch.bfloat16)
        loss = (engine(x).float() - x.float()).square().mean()
        engine.backward(loss)
        engine.step()
        found += [float(loss.detach()), engine.get_global_grad_norm()]
    engine.destroy()
    return found


def test_overlap_changes_no_bit() -> None:
    plain = world(2).run(big_steps, 0, False, 12, timeout=300)
    for stage in (1, 2, 3):
        for overlap in (True, False):
            assert world(2).run(big_steps, stage, overlap, 12, timeout=300) == plain, (stage, overlap)


# ------------------------------------------------------------------------------------------- in processes of their own
def alone(function: str, *arguments: Any, ranks: int = 1, timeout: float = 240.0, **environment: str) -> str:
    """Run a function of this file in a process of its own (or several ranks of torchrun); what it printed."""
    call = f"from tests.gpu import test_gpu; test_gpu.{function}(*{arguments!r})"
    command = [sys.executable, "-c", call]
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    inherited["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    if ranks > 1:
        script = f"import sys; sys.argv = ['x']; {call}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += ["--no-python", sys.executable, "-c", script]
    done = subprocess.run(
        command,
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def train_without_waiting(stage: int, imagined: int) -> None:
    """Steps during which torch refuses every synchronisation of the host with the device."""
    if imagined:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=imagined)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = onecopy.initialize(model=model, config=config)
    x = torch.randn(8, 256, device=engine.device, dtype=torch.bfloat16)
    for step in range(12):
        if step == 4:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        engine.backward(engine(x).float().square().mean())
        engine.step()
    torch.cuda.set_sync_debug_mode("default")
    print("backend", dist.get_backend(), "device", engine.device, "norm", engine.get_global_grad_norm())
    engine.destroy()


@pytest.mark.parametrize("imagined", [0, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_never_waits_for_the_device(stage: int, imagined: int) -> None:
    assert "device cuda:0" in alone("train_without_waiting", stage, imagined)


def collective_on_nccl(ranks: int) -> None:
    """Gather, reduce and sum through the back end that GPUs use."""
    from onecopy.comm import connect, ensure_process_group
    from onecopy.comm.connect import default_device

    ensure_process_group()
    device = default_device()
    communicator = connect(None, device)
    rank, size = communicator.rank, communicator.world_size
    assert dist.get_backend(communicator.group) == "nccl", dist.get_backend(communicator.group)
    part = 1 << 20
    buffer = torch.zeros(size * part, device=device)
    buffer[rank * part : (rank + 1) * part] = rank + 1
    communicator.gather(buffer, 2, "buffer")
    expected_sum = part * size * (size + 1) / 2
    assert float(buffer.double().sum()) == expected_sum
    out = torch.empty(part, device=device)
    reduce = communicator.start_reduce(communicator.wire(buffer), 4, "buffer")
    reduce.finish(out, accumulate=False)
    assert float(out.double().sum()) == part * size * (rank + 1)
    total = communicator.sum_vector(torch.tensor([1.0, 2.0], device=device, dtype=torch.float64), "vector")
    assert total.tolist() == [size, 2.0 * size]
    print("nccl", size)
    communicator.close()
    dist.destroy_process_group()


def test_the_collective_back_end_runs_on_nccl() -> None:
    assert "nccl 1" in alone("collective_on_nccl", 1)


def train_on_nccl(stage: int) -> None:
    print("losses", big_steps(stage, True, 8))
    print("backend", dist.get_backend())


def test_several_nccl_ranks_train_where_the_library_lets_them_share_a_device() -> None:
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    try:
        alone("collective_on_nccl", 2, ranks=2, **shared)
    except AssertionError as error:
        if torch.version.cuda and "uplicate GPU" in str(error):
            pytest.skip("NCCL takes one rank a device")
        raise
    plain = alone("train_on_nccl", 0, ranks=2, **shared)
    for stage in (1, 2, 3):
        assert alone("train_on_nccl", stage, ranks=2, **shared) == plain


def checkpoint_round(folder: str, stage: int, load_stage: int) -> None:
    """Save asynchronously and at once; load into another stage; continue with the same losses."""
    torch.manual_seed(0)

    def build(stage: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)])
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "checkpoint": {"async": True},
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        }
        return onecopy.initialize(model=model, config=config)[0]

    def losses(engine: Any, count: int) -> list[float]:
        found = []
        for step in range(count):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(engine.device, torch.bfloat16)
            loss = (engine(x).float() - 1).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        return found

    first = build(stage)
    losses(first, 3)
    first.save_checkpoint(folder, "three")
    want = losses(first, 3)
    first.save_checkpoint(folder, "six")
    assert first.save_16bit_model(folder, "weights.safetensors")
    first.destroy()
    second = build(load_stage)
    second.load_checkpoint(folder, "three")
    got = losses(second, 3)
    assert got == want, (got, want)
    second.destroy()
    print("same losses")


@pytest.mark.parametrize(("stage", "load_stage"), [(3, 3), (1, 3), (3, 0)])
def test_checkpoints_continue_with_the_same_losses(tmp_path: Path, stage: int, load_stage: int) -> None:
    assert "same losses" in alone("checkpoint_round", str(tmp_path), stage, load_stage)


def compiled_steps() -> None:
    """Each unit compiled by inductor, next to the same steps without."""

    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)) for _ in range(4)
        ]
        model = torch.nn.Sequential(*blocks)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = onecopy.initialize(model=model, config=config)
        if compiled:
            engine.compile()
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(engine.device)
        found = []
        for _ in range(5):
            loss = (engine(x) - x).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        engine.destroy()
        return found

    torch.testing.assert_close(losses(True), losses(False), rtol=1e-4, atol=1e-5)
    print("compiled losses agree")


def test_compiled_units_train_alike() -> None:
    assert "agree" in alone("compiled_steps")
