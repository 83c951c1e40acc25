"""Helpers of the `deepspeed` module that scripts use on their own: loss scales, norms, timers, profiles, monitors, the command."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from onecopy.integrations.deepspeed.launcher import chosen_devices, parse_args, run_words
from tests.commands import run_python

HELPERS = """
from onecopy.integrations.deepspeed import install; assert install(force=True)
import json, logging, math, sys
import torch
from torch import nn
import deepspeed
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScaler
from deepspeed.runtime.utils import (CheckOverflow, call_to_str, clip_grad_norm_, get_global_norm, partition_balanced,
                                     partition_uniform, required_torch_version)
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile

scaler = CreateLossScaler(torch.float16, 0, True, dict(init_scale=8, scale_window=2, min_scale=4, delayed_shift=1,
                                                       consecutive_hysteresis=False))
scales = []
for overflow in (True, False, False, False):
    scaler.update_scale(overflow)
    scales.append(scaler.cur_scale)
assert scales == [4, 4, 4, 8] and scaler.dynamic and not LossScaler(2).dynamic, scales
scaler.update_scale(True)
try:
    scaler.update_scale(True)
except Exception as error:
    assert "already at minimum" in str(error)

weight = nn.Parameter(torch.zeros(4))
weight.grad = torch.full((4,), 3.0)
assert clip_grad_norm_([weight], 1.0).item() == 6.0 and abs(weight.grad.norm().item() - 1.0) < 1e-5
assert get_global_norm([3.0, 4.0]) == 5.0 and not CheckOverflow().has_overflow([weight])
weight.grad[0] = math.inf
assert CheckOverflow([[weight]]).check()
assert partition_uniform(7, 3) == [0, 3, 5, 7] and partition_balanced([1, 1, 1, 9], 2) == [0, 3, 4]
assert call_to_str("f", 1, a=2) == "f(1, a=2)" and required_torch_version(min_version=2.1)

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
assert get_model_profile(model, (2, 8), print_profile=False, as_string=False) == (800, 384, 212)
assert get_model_profile(model, (2, 8), print_profile=False) == ("800 ", "384 MACs", "212")
profiler = FlopsProfiler(model)
profiler.start_profile(); model(torch.zeros(2, 8)); profiler.stop_profile()
assert profiler.get_total_macs() == 384 and profiler.get_total_duration() > 0
profiler.print_model_profile(output_file=sys.argv[1] + "/profile.txt"); profiler.end_profile()

from deepspeed.utils.timer import SynchronizedWallClockTimer, trim_mean
timers = SynchronizedWallClockTimer()
timers("a").start(); timers("a").stop()
assert timers("a").elapsed(reset=True) > 0 and timers("a").elapsed() == 0 and trim_mean([1, 2, 9], 0.34) == 2
assert logging.getLogger("DeepSpeed") is deepspeed.utils.logger
builder = deepspeed.ops.op_builder.CPUAdamBuilder()
assert not builder.is_compatible() and deepspeed.get_accelerator().create_op_builder("CPUAdamBuilder") is not None

import deepspeed.utils.torch, deepspeed.utils.nvtx  # submodules must not hide what the package itself uses
with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
    built = nn.Linear(2, 2)
assert (built.weight.dtype, built.weight.device.type) == (torch.float16, "meta") and torch.get_default_dtype() == torch.float32
assert deepspeed.utils.instrument_w_nvtx(lambda x: x + 1)(2) == 3
whole = nn.Linear(7, 5)
for splits in ((1, 1), (3, 2), (7, 5)):
    tiled = deepspeed.zero.TiledLinear(7, 5, in_splits=splits[0], out_splits=splits[1], init_linear=whole)
    assert torch.allclose(tiled(torch.ones(2, 7)), whole(torch.ones(2, 7)), atol=1e-6)
    assert sum(p.numel() for p in tiled.parameters()) == 40
from deepspeed.monitor.monitor import MonitorMaster
config = {"train_batch_size": 1, "csv_monitor": {"enabled": True, "output_path": sys.argv[1], "job_name": "job"}}
monitor = MonitorMaster(deepspeed.DeepSpeedConfig(config).monitor_config)
assert monitor.enabled
monitor.write_events([("Train/loss", 2.5, 7)])
"""


def test_helpers_on_their_own(tmp_path: Path) -> None:
    done = run_python("-c", HELPERS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "384 MACs" in (tmp_path / "profile.txt").read_text()
    rows = list(csv.reader((tmp_path / "job" / "Train_loss.csv").open()))
    assert rows == [["step", "loss"], ["7", "2.5"]]


def test_the_deepspeed_command_starts_ranks_with_a_local_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, deepspeed; print(deepspeed.__version__, os.environ['WORLD_SIZE'], sys.argv[1:])")
    words = ["--num_gpus", "1", str(script), "--a", "b"]
    done = run_python("-m", "onecopy", "exec", "--force", "deepspeed", *words)
    assert done.stdout.strip() == "0.19.8+onecopy 1 ['--local_rank=0', '--a', 'b']", done.stderr


def test_the_commands_options_are_those_of_onecopy_run(tmp_path: Path) -> None:
    def words(text: str) -> str:
        return " ".join(run_words(parse_args(text.split())))

    assert words("--num_gpus 2 --master_port 1234 t.py --x 1") == (
        "--force --nproc 2 --master-port 1234 --pass-local-rank t.py --x 1"
    )
    assert words("--include localhost:0,3 --no_local_rank --module pkg.train") == "--force --nproc 2 -m pkg.train"
    assert words("--num_nodes 2 --node_rank 1 --no_ssh --master_addr host0 --num_gpus 4 t.py") == (
        "--force --nproc 4 --nnodes 2 --node-rank 1 --master-addr host0 --master-port 29500 --pass-local-rank t.py"
    )
    (tmp_path / "hosts").write_text("localhost slots=3  # this one\n")
    excluding = f"-H {tmp_path}/hosts -e localhost:1 t.py"
    assert words(excluding).startswith("--force --nproc 2 ") and chosen_devices(parse_args(excluding.split())) == [
        "0",
        "2",
    ]
    everything = f"-H {tmp_path}/hosts -e localhost:0,1,2 t.py"
    for refused in ("--num_nodes 2 t.py", "--include a:0@b:1 t.py", "--autotuning run t.py", everything):
        with pytest.raises(SystemExit, match="deepspeed: "):
            words(refused)
