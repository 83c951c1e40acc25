"""`onecopy run`: ranks, the module, arguments to the byte, exit codes; a DeepSpeed script trains as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import run_python

# As such scripts look: nothing in it knows onecopy.
SCRIPT = """
import argparse, torch, deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--configs", nargs="+")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
for args.deepspeed_config in args.configs:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
    torch.manual_seed(deepspeed.comm.get_rank())
    for step in range(4):
        x = torch.randn(2, 6, device=get_accelerator().current_device_name())
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        total = sum(p.double().sum().item() for p in model.parameters())
    master = safe_get_full_fp32_param(model[0].weight).double().sum().item()
    engine.save_checkpoint(args.deepspeed_config + ".saved")
    if deepspeed.comm.get_rank() == 0:
        exported = get_fp32_state_dict_from_zero_checkpoint(args.deepspeed_config + ".saved")["0.weight"]
        print("TOTAL", total, master, exported.double().sum().item(), flush=True)
    engine.destroy()
deepspeed.comm.barrier()
"""


def test_a_deepspeed_script_trains_at_every_stage(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    names = [f"stage{stage}.json" for stage in range(4)]
    for stage, name in enumerate(names):
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        (tmp_path / name).write_text(json.dumps(config))
    words = ("--deepspeed", "--configs", *names)
    done = run_python("-m", "onecopy", "run", "--nproc", "2", "--force", "train.py", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [[float(word) for word in line.split()[1:]] for line in done.stdout.splitlines() if "TOTAL" in line]
    assert len(rows) == 4
    for total, master, exported in rows:
        assert total == rows[0][0]
        assert master == pytest.approx(exported, abs=1e-12)


def test_arguments_reach_the_script_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "beside.py").write_text("here = True")
    (tmp_path / "folder" / "show.py").write_text(
        "import beside, json, os, sys, deepspeed\n"
        "if __name__ == '__main__' and os.environ['RANK'] == '0':\n"
        "    print(json.dumps([sys.argv, deepspeed.__version__, os.environ['WORLD_SIZE']]))"
    )
    words = ["--nproc", "7", "a  b", "", "--", "-m", "--force", 'x="y"', "ä\n", "--help"]
    script = str(Path("folder") / "show.py")
    done = run_python("-m", "onecopy", "run", "--force", "--nproc=2", script, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[script, *words], "0.19.8+onecopy", "2"]


def test_modules_torchruns_options_and_spawned_processes(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "main.py").write_text(
        "import multiprocessing, sys, deepspeed\n"
        "def version(_):\n"
        "    import deepspeed\n"
        "    return deepspeed.__version__\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(*pool.map(version, [0]), *sys.argv[1:])\n"
    )
    words = ("--nproc_per_node", "1", "--max-restarts=0", "--force", "-m", "package.main", "--x")
    done = run_python("-m", "onecopy", "run", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0.19.8+onecopy", "--x"]


def test_mistakes_are_one_sentence_and_a_failing_rank_gives_its_exit_code(tmp_path: Path) -> None:
    done = run_python("-m", "onecopy", "run", "nowhere.py", folder=tmp_path)
    assert done.returncode == 1 and "'nowhere.py' is no file" in done.stderr and "Traceback" not in done.stderr
    done = run_python("-m", "onecopy", "run", "--no-python", "ls", folder=tmp_path)
    assert done.returncode == 1 and "start it with torchrun" in done.stderr
    (tmp_path / "fails.py").write_text("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    done = run_python("-m", "onecopy", "run", "--nproc", "2", "--force", "fails.py", folder=tmp_path)
    assert done.returncode == 7 and "rank 1 failed with exit code 7" in done.stderr
