"""`init_inference`: the model's answers from sharded weights, with no training state, and ranks that stop when they like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import onecopy
from onecopy import zero
from onecopy.errors import ConfigError, ModelError
from onecopy.inference import default_inference_config
from onecopy.train.model import GPT, GPTConfig
from tests.reference import configuration
from tests.worlds import World, world

CONFIG = GPTConfig(vocabulary_size=31, context=24, layers=3, heads=2, width=16)


class Speaker(GPT):
    """A model with a `generate` of its own, which knows nothing of other ranks."""

    def generate(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        while tokens.shape[1] < length:
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def plain_model() -> Speaker:
    torch.manual_seed(2)
    return Speaker(CONFIG).eval()


def prompt() -> torch.Tensor:
    return torch.randint(0, 31, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))


def infer(folder: str, source: str, zero_stage: int) -> dict[str, int]:
    """Answers, generation to a length of the rank's own, and memory."""
    plain, tokens = plain_model(), prompt()
    if source == "file":
        with torch.device("meta"):
            model = Speaker(CONFIG)
        engine = onecopy.init_inference(model, dtype=torch.float32, checkpoint=f"{folder}/model.safetensors")
    elif source == "checkpoint":
        torch.manual_seed(9)
        with zero.Init():
            model = Speaker(CONFIG)
        engine = onecopy.init_inference(model, {"dtype": "fp32", "zero": {"stage": zero_stage}})
        engine.load_checkpoint(f"{folder}/run")
    else:
        engine = onecopy.init_inference(plain_model(), dtype="float32", zero={"stage": zero_stage})
    assert not engine.training and engine.module.config is CONFIG if hasattr(engine.module, "config") else True
    wanted = plain(tokens)
    for _ in range(2):
        answer = engine(tokens)
        assert torch.equal(answer, wanted) and not answer.requires_grad
        length = 8 + 3 * dist.get_rank()
        with torch.no_grad():
            assert torch.equal(engine.generate(tokens, length), plain.generate(tokens, length))
    with engine.whole_weights() as whole, torch.no_grad():
        for _ in range(1 + dist.get_rank()):  # a loop of the rank's own
            assert torch.equal(whole(tokens), wanted)
    memory = engine.memory()
    engine.destroy()
    return memory


def train_and_save(folder: str) -> None:
    engine, *_ = onecopy.initialize(model=plain_model(), config=configuration(2))
    engine.save_checkpoint(f"{folder}/run")
    if dist.get_rank() == 0:
        save_file({n: p.detach() for n, p in plain_model().named_parameters()}, f"{folder}/model.safetensors")
    dist.barrier()
    engine.destroy()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_and_generation_from_every_source(tmp_path: Path, size: int) -> None:
    world(2).run(train_and_save, str(tmp_path))
    elements = sum(parameter.numel() for parameter in plain_model().parameters())
    for source, stage in (("model", 3), ("model", 0), ("file", 3), ("checkpoint", 3)):
        for memory in world(size).run(infer, str(tmp_path), source, stage):
            assert memory["gradients"] == memory["masters"] == memory["moments"] == 0
            share = 4 * elements if stage == 0 else 4 * elements / size
            assert memory["parameters"] <= share + 4 * 64 * size * 40, (
                source,
                memory,
            )  # 40 parameters' paddings at most


def memory_of_a_large_model(dtype: str) -> tuple[dict[str, int], int]:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    whole = 16 * 256 * 256 * (4 if dtype == "fp32" else 2)
    engine = onecopy.init_inference(model, dtype=dtype)
    engine(torch.randn(2, 256, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16))
    memory = engine.memory()
    engine.destroy()
    return memory, whole


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_larger_than_a_ranks_share(world4: World, dtype: str) -> None:
    for memory, whole in world4.run(memory_of_a_large_model, dtype):
        assert memory["parameters"] == whole // 4
        assert sum(memory.values()) <= whole // 4 + 2 * whole // 16  # the shard and two slots of a layer each


def refused(kwargs: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, ModelError, ValueError)) as caught:
        onecopy.init_inference(nn.Linear(2, 2), **kwargs)
    assert not any(hasattr(p, "_onecopy") for p in nn.Linear(2, 2).parameters())
    return str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"tensor_parallel": {"tp_size": 2}}, "tensor parallelism is not in onecopy"),
        ({"config": {"tp": {"tp_size": 4}}}, "tensor parallelism is not in onecopy"),
        ({"mp_size": 2}, "mp_size=2"),
        ({"replace_with_kernel_inject": True}, "injects no kernels"),
        ({"kernel_inject": True}, "injects no kernels"),
        ({"enable_cuda_graph": True}, "enable_cuda_graph=True"),
        ({"dtype": torch.int8}, "quantised"),
        ({"quant": {"enabled": True}}, "quantised"),
        ({"injection_policy": {nn.Linear: ("x",)}}, "injection_policy"),
        ({"config": {"dtype": "fp16"}, "dtype": "bf16"}, "'dtype' twice"),
        ({"dtyp": "fp16"}, "did you mean 'dtype'"),
        ({"dtype": torch.float64}, "give torch.float16"),
        ({"zero": 3}, "zero_optimization block"),
        ({"checkpoint": "nowhere"}, "no file or folder"),
    ],
)
def test_what_onecopy_does_not_have_is_refused_in_one_sentence(
    world1: World, kwargs: dict[str, Any], words: str
) -> None:
    said = world1.run(refused, kwargs)[0]
    assert words in said and "\n" not in said


def test_defaults_are_deepspeeds() -> None:
    defaults = default_inference_config()
    assert (
        defaults["dtype"] is torch.float16 and defaults["max_out_tokens"] == 1024 and defaults["return_tuple"] is True
    )


def no_generate() -> str:
    engine = onecopy.init_inference(nn.Linear(2, 2), dtype="fp32", max_out_tokens=5, replace_method="auto")
    with pytest.raises(ModelError, match="whole_weights") as caught:
        engine.generate(1)
    with pytest.raises(ModelError, match="give the model itself"):
        onecopy.init_inference(engine)
    engine.destroy()
    return str(caught.value)


def test_a_model_without_generate_says_what_to_do(world2: World) -> None:
    world2.run(no_generate)
