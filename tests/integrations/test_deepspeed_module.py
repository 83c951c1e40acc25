"""The `deepspeed` module: found when installed, second to a real one, complete by name, and clear about what it refuses."""

from __future__ import annotations

from pathlib import Path

from tests.commands import run_python

NAMES = {
    "deepspeed": "initialize init_distributed DeepSpeedEngine add_config_arguments zero comm utils accelerator checkpointing "
    "ops runtime launcher init_inference tp_model_init PipelineModule OnDevice log_dist logger DeepSpeedConfig "
    "DeepSpeedConfigError __version__ get_accelerator",
    "deepspeed.zero": "Init GatheredParameters register_external_parameter ZeroParamStatus ZeroParamType TiledLinear "
    "TiledLinearReturnBias DeepSpeedTensorOverride DeepSpeedZeRoOffload unwrap_model_for_generation",
    "deepspeed.comm": "is_initialized init_distributed get_rank get_world_size get_local_rank barrier broadcast all_reduce "
    "all_gather all_gather_into_tensor all_gather_object reduce_scatter reduce_scatter_tensor all_to_all "
    "all_to_all_single reduce gather scatter send recv isend irecv new_group ReduceOp destroy_process_group log_summary "
    "monitored_barrier inference_all_reduce get_global_rank broadcast_object_list",
    "deepspeed.utils": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
    "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module RepeatingLoader OnDevice logger log_dist groups "
    "instrument_w_nvtx is_initialized timer zero_to_fp32",
    "deepspeed.utils.logging": "logger",
    "deepspeed.utils.groups": "_get_sequence_parallel_group _get_sequence_parallel_world_size _get_sequence_parallel_rank",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
    "convert_zero_checkpoint_to_fp32_state_dict get_model_state_file get_optim_files",
    "deepspeed.accelerator": "get_accelerator",
    "deepspeed.checkpointing": "configure checkpoint is_configured reset get_cuda_rng_tracker",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "configure checkpoint",
    "deepspeed.runtime.zero.partition_parameters": "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange "
    "get_accelerator unregister_external_parameter",
    "deepspeed.runtime.lr_schedules": "VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "deepspeed.runtime.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.utils": "see_memory_usage",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3 estimate_zero3_model_states_mem_needs "
    "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold",
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer estimate_zero2_model_states_mem_needs "
    "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion": "DeepSpeedCPULion FusedLion",
    "deepspeed.ops.lamb": "FusedLamb",
    "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
    "deepspeed.launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME main parse_args",
    "deepspeed.comm.comm": "all_reduce",
    "deepspeed.utils.timer": "SynchronizedWallClockTimer ThroughputTimer NoopTimer",
    "deepspeed.utils.nvtx": "instrument_w_nvtx",
    "deepspeed.utils.tensor_fragment": "safe_get_full_fp32_param",
    "deepspeed.utils.torch": "required_torch_version",
    "deepspeed.runtime.config": "DeepSpeedConfig DeepSpeedConfigError",
    "deepspeed.runtime.zero.config": "ZeroStageEnum DeepSpeedZeroConfig",
    "deepspeed.runtime.zero.utils": "is_zero_param ZeRORuntimeException",
    "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "deepspeed.runtime.zero.tiling": "TiledLinear TiledLinearReturnBias",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler CreateLossScaler",
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
    "deepspeed.runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": "TorchCheckpointEngine",
    "deepspeed.runtime.compiler": "is_compile_supported",
    "deepspeed.ops.adam.cpu_adam": "DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam": "FusedAdam",
    "deepspeed.ops.op_builder": "CPUAdamBuilder FusedAdamBuilder",
    "deepspeed.monitor.monitor": "MonitorMaster",
    "deepspeed.monitor.config": "get_monitor_config",
    "deepspeed.profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "deepspeed.git_version_info": "version",
    "deepspeed.env_report": "main",
}

INSTALL = "from onecopy.integrations.deepspeed import install, installed, uninstall; assert install(force=True)\n"


def python(code: str, *, folder: Path | None = None) -> str:
    """What `code` prints in a process of its own."""
    done = run_python("-c", code, **({} if folder is None else {"folder": folder}))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_name_of_the_contract_is_there() -> None:
    missing = python(
        INSTALL
        + f"""
import importlib, importlib.metadata, importlib.util
assert importlib.util.find_spec("deepspeed") is not None
version = importlib.metadata.version("deepspeed")
assert tuple(int(part) for part in version.split("+")[0].split(".")) >= (0, 18, 2), version
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
import deepspeed, onecopy
assert deepspeed.__version__ == version and deepspeed.DeepSpeedEngine is onecopy.Engine
for module, names in {NAMES!r}.items():
    found = importlib.import_module(module)
    print(*(module + "." + name for name in names.split() if not hasattr(found, name)), sep="\\n", end="")
"""
    )
    assert missing == ""


def test_onecopy_alone_brings_no_deepspeed_and_uninstall_takes_it_away(tmp_path: Path) -> None:
    answers = python(
        "import importlib.machinery, importlib.metadata, onecopy\n"
        "from onecopy.integrations.deepspeed import TREE, install, uninstall\n"
        "def ours():\n"
        "    spec = importlib.machinery.PathFinder.find_spec('deepspeed')\n"
        "    return spec is not None and spec.origin.startswith(str(TREE))\n"
        "print(ours()); install(force=True); print(ours()); uninstall(); print(ours())\n"
        "print(any(str(d.locate_file('')).startswith(str(TREE)) for d in importlib.metadata.distributions()))"
    )
    assert answers.split() == ["False", "True", "False", "False"]


def test_an_installed_deepspeed_is_preferred_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = 'real'")
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom onecopy.integrations.deepspeed import *\n"
    assert python(start + "print(install()); import deepspeed; print(deepspeed.__version__)").split() == [
        "False",
        "real",
    ]
    forced = python(start + "print(install(force=True), install()); import deepspeed; print(deepspeed.__version__)")
    assert forced.split() == ["True", "True", "0.19.8+onecopy"]
    late = run_python("-c", start + "import deepspeed; install(force=True)")
    assert "call install first" in late.stderr


def test_a_folder_of_that_name_beside_the_script_is_no_deepspeed(tmp_path: Path) -> None:
    """Users keep their JSON files in a folder called deepspeed."""
    (tmp_path / "deepspeed").mkdir()
    code = INSTALL + "import deepspeed; print(deepspeed.zero.GatheredParameters.__name__)"
    assert python(code, folder=tmp_path).strip() == "GatheredParameters"


def test_what_is_not_offered_says_so_and_what_to_use() -> None:
    said = python(
        INSTALL
        + """
import deepspeed, torch
calls = [lambda: deepspeed.init_inference(torch.nn.Linear(1, 1), mp_size=2), lambda: deepspeed.PipelineModule(layers=[]),
         lambda: deepspeed.tp_model_init(None, 2, None),
         lambda: deepspeed.add_tuning_arguments(None),
         lambda: deepspeed.utils.groups._get_sequence_parallel_group(), lambda: __import__("deepspeed.moe.layer")]
for call in calls:
    try:
        call()
    except (NotImplementedError, ModuleNotFoundError, AssertionError) as error:
        print(str(error).replace("\\n", "<break>"))
assert not isinstance(3, deepspeed.PipelineModule)
assert deepspeed.comm.log_summary(return_dict=True) == {}  # at the end of a run: no reason to lose it
"""
    ).splitlines()
    assert len(said) == 6
    assert all("onecopy" in sentence and "<break>" not in sentence for sentence in said)
    assert "tensor parallelism" in said[0] and "leaf_module" in said[5]


def test_checkpointing_without_storage_options_gives_the_same_gradients() -> None:
    """Lightning configures checkpointing always, with everything off."""
    python(
        INSTALL
        + """
import deepspeed, torch
deepspeed.checkpointing.configure(mpu_=None, partition_activations=False, contiguous_checkpointing=False,
                                  checkpoint_in_cpu=False, profile=False)
assert deepspeed.checkpointing.is_configured()
layer, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)), torch.randn(3, 4)
torch.manual_seed(0); layer(x).sum().backward(); plain = layer[0].weight.grad.clone(); layer.zero_grad()
torch.manual_seed(0); deepspeed.checkpointing.checkpoint(layer, x).sum().backward()
assert torch.equal(plain, layer[0].weight.grad)
"""
    )


def test_optimizer_classes_step_as_torch_does() -> None:
    python(
        INSTALL
        + """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
def stepped(make):
    torch.manual_seed(0); p = torch.nn.Parameter(torch.randn(7)); optimizer = make([p])
    for i in range(3):
        (p * (i + 1.0)).square().sum().backward(); optimizer.step(); optimizer.zero_grad()
    return p.detach()
adamw = stepped(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
adam = stepped(lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1))
assert torch.equal(adamw, stepped(lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1)))
assert torch.equal(adam, stepped(lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1, adamw_mode=False)))
assert torch.equal(adamw, stepped(lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1)))
assert torch.equal(adam, stepped(lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=False)))
"""
    )


def test_memory_estimates_are_the_formulas() -> None:
    numbers = python(
        INSTALL
        + """
from deepspeed.runtime.zero.stage3 import *
from deepspeed.runtime.zero.stage_1_and_2 import *
P, L = 1000, 100
print(*estimate_zero2_model_states_mem_needs(P, 8, 2), *estimate_zero2_model_states_mem_needs(P, 8, 2, False))
print(*estimate_zero3_model_states_mem_needs(P, L, 8, 2))
print(*estimate_zero3_model_states_mem_needs(P, L, 8, 2, cpu_offload_params=False, zero_init=False))
print(*estimate_zero3_model_states_mem_needs(P, L, 8, 2, cpu_offload=False, cpu_offload_params=False))
"""
    ).split()
    assert [int(number) for number in numbers] == [
        96000, 2000, 48000, 3125,
        13500, 400, 400,
        48000, 525, 400,
        4800, 1525, 400,
    ]  # fmt: skip
