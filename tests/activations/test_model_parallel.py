"""Two model-parallel ranks by two data-parallel ones: training, norms, checkpoints, and inputs shared out over the pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy import checkpointing
from onecopy.activations import settings
from onecopy.errors import CheckpointError, ModelError
from tests.worlds import World

GetWorld = Callable[[int], World]
WIDTH, INNER = 6, 10


class Mpu:
    """Ranks 0 and 1 compute one model together, and so do 2 and 3; equal parts are 0 and 2, 1 and 3."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        for pair in ([0, 1], [2, 3]):
            group = dist.new_group(pair)
            if rank in pair:
                self.model = group
        for pair in ([0, 2], [1, 3]):
            group = dist.new_group(pair)
            if rank in pair:
                self.data = group

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_data_parallel_group(self) -> Any:
        return self.data

    def close(self) -> None:
        dist.destroy_process_group(self.model)
        dist.destroy_process_group(self.data)


class SumOver(torch.autograd.Function):
    """The sum over the model-parallel ranks in forward, as it is in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class SameOver(torch.autograd.Function):
    """As it is in forward, the sum over the model-parallel ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Split(nn.Module):
    """Megatron's pair of layers: columns of the first, rows of the second; `part` None is the whole layer."""

    def __init__(self, number: int, part: int | None, group: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        first = torch.randn(INNER, WIDTH, generator=generator) / 3
        second = torch.randn(WIDTH, INNER, generator=generator) / 3
        if part is not None:
            first, second = first.chunk(2)[part], second.chunk(2, dim=1)[part]
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))
        for parameter in (self.first, self.second):
            parameter.model_parallel = True  # type: ignore[attr-defined]
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.group is not None:
            y = SameOver.apply(y, self.group)
        y = torch.tanh(y @ self.first.t()) @ self.second.t()
        if self.group is not None:
            y = SumOver.apply(y, self.group)
        return x + y + self.bias


class SplitModel(nn.Module):
    def __init__(self, part: int | None, group: Any, call: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Split(number, part, group) for number in range(3))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.call(layer, x) if self.call is not None else layer(x)
        return x


def data(step: int, replica: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))


def reference(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process, the whole model, both replicas' batches, clipped as the engine does."""
    model = SplitModel(None, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    norms = []
    for step in range(steps):
        loss = torch.stack([model(data(step, replica)).square().mean() for replica in range(2)]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def engine_for(stage: int, mpu: Mpu, call: Any = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}}, **more,
    }  # fmt: skip
    model = SplitModel(dist.get_rank(mpu.model), mpu.model, call)
    return onecopy.initialize(model=model, mpu=mpu, config=config)[0]


def train(engine: Any, steps: range) -> list[float]:
    norms = []
    for step in steps:
        engine.backward(engine(data(step, engine.get_data_parallel_rank())).square().mean())
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {n: onecopy.utils.safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}


def two_by_two(stages: tuple[int, ...]) -> list[Any]:
    mpu = Mpu()
    found = []
    for stage in stages:
        engine = engine_for(stage, mpu)
        assert engine.mp_world_size == 2 and engine.get_model_parallel_rank() == dist.get_rank(mpu.model)
        found.append((train(engine, range(3)), weights(engine)))
        engine.destroy()
    mpu.close()
    return found


def test_two_by_two_ranks_train_as_one(world4: World) -> None:
    """Norms are those of the whole model, parameters that both hold counted once, and so all clip alike."""
    stages = (0, 1, 3)
    norms, whole = reference(3)
    for rank, found in enumerate(world4.run(two_by_two, stages)):
        for found_norms, found_weights in found:
            assert found_norms == pytest.approx(norms, rel=1e-5)
            for name, weight in found_weights.items():
                full = whole[name]
                if name.endswith(("first", "second")):
                    full = full.chunk(2, dim=0 if name.endswith("first") else 1)[rank % 2]
                torch.testing.assert_close(weight, full, rtol=1e-4, atol=1e-5)


def poisoned() -> list[tuple[bool, bool]]:
    mpu = Mpu()
    engine = engine_for(2, mpu)
    before = weights(engine)
    x = data(0, engine.get_data_parallel_rank())
    loss = engine(x).square().mean()
    if dist.get_rank() == 3:
        engine.module.layers[0].first.register_hook(lambda gradient: gradient * float("inf"))
    engine.backward(loss)
    engine.step()
    same = all(torch.equal(before[name], weight) for name, weight in weights(engine).items())
    found = (engine.was_step_applied(), same)
    engine.destroy()
    mpu.close()
    return [found]


def test_a_step_is_skipped_by_all_parts_or_by_none(world4: World) -> None:
    assert world4.run(poisoned) == [[(False, True)]] * 4


def saved_and_loaded(folder: str, other: int) -> Any:
    mpu = Mpu()
    engine = engine_for(3, mpu)
    train(engine, range(2))
    engine.save_checkpoint(folder, client_state={"rank": dist.get_rank(mpu.model)})
    wanted = train(engine, range(2, 4)), weights(engine)
    if dist.get_rank(mpu.model) == 0:  # a crash between the two parts' saves
        engine.save_checkpoint(folder, tag="half")
    engine.destroy()
    dist.barrier()
    engine = engine_for(other, mpu)
    path, client = engine.load_checkpoint(folder)
    found = train(engine, range(2, 4)), weights(engine)
    try:
        engine.load_checkpoint(f"{folder}/nowhere", tag="latest")
    except CheckpointError as error:
        assert "nowhere" in str(error)
    engine.destroy()
    mpu.close()
    equal = found[0] == wanted[0] and all(torch.equal(wanted[1][name], weight) for name, weight in found[1].items())
    return path, client["rank"], equal


def test_each_part_has_a_folder_and_all_load_one_tag(world4: World, tmp_path: Any) -> None:
    for rank, (path, client, equal) in enumerate(world4.run(saved_and_loaded, str(tmp_path), 2)):
        assert path == str(tmp_path / f"mp_rank_0{rank % 2}" / "global_step2")
        assert client == rank % 2 and equal


def partitioned(block: dict[str, Any], way: str) -> tuple[list[float], int, int]:
    mpu = Mpu()
    engine = engine_for(3, mpu, checkpointing.checkpoint if way == "function" else None, activation_checkpointing=block)
    assert checkpointing.is_configured() == bool(block)
    if way == "blocks":
        engine.checkpoint_activations("full")
    held = settings.current().storage.held
    norms = train(engine, range(2))
    answer = norms, held.peak, held.now
    engine.destroy()
    assert not checkpointing.is_configured()
    mpu.close()
    return answer


def test_inputs_are_shared_out_over_the_model_parallel_ranks(world4: World) -> None:
    """The JSON block works by itself; each of M ranks holds 1/M of the inputs, and the numbers stay the same."""
    plain = world4.run(partitioned, {}, "plain")
    whole = 3 * 5 * WIDTH * 4  # bytes of three blocks' inputs
    contiguous = {"contiguous_memory_optimization": True, "number_checkpoints": 3}
    for way, more in (("function", {}), ("blocks", contiguous)):
        ranks = world4.run(partitioned, {"partition_activations": True, **more}, way)
        for rank, (norms, peak, now) in enumerate(ranks):
            assert norms == plain[rank][0]
            assert (peak, now) == (whole / 2, 0)


def configured_first() -> tuple[float, bool]:
    mpu = Mpu()
    checkpointing.configure(None, partition_activations=True)  # as Megatron's scripts do, before initialize
    engine = engine_for(1, mpu, checkpointing.checkpoint)
    held = settings.current().storage.held
    train(engine, range(1))
    engine.destroy()
    mpu.close()
    kept = checkpointing.is_configured() and settings.current().ranks is None
    settings._current = settings.Settings()
    return held.peak, kept


def test_configure_before_initialize_is_kept(world4: World) -> None:
    assert world4.run(configured_first) == [(3 * 5 * WIDTH * 4 / 2, True)] * 4


def different() -> str:
    mpu = Mpu()
    checkpointing.configure(mpu, partition_activations=True)
    try:
        layer = nn.Linear(4, 4)
        checkpointing.checkpoint(layer, torch.full((2, 4), float(dist.get_rank())))
    except ModelError as error:
        return str(error)
    finally:
        settings._current = settings.Settings()
        mpu.close()
    return ""


def test_inputs_that_differ_are_not_partitioned(world4: World) -> None:
    assert all("differs between the model-parallel ranks" in said for said in world4.run(different))


def alone() -> tuple[str, list[str]]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
              "activation_checkpointing": {"partition_activations": True}}  # fmt: skip
    engine = onecopy.initialize(model=SplitModel(None, None), config=config)[0]
    engine.checkpoint_activations("full")
    engine.backward(engine(data(0, 0)).square().mean())
    verdicts = [one.verdict for one in engine.configuration.findings if one.key_path.endswith("partition_activations")]
    report = " ".join(engine.configuration.report().split())
    engine.destroy()
    return report, verdicts


def test_without_such_a_group_the_report_says_so(world2: World) -> None:
    for report, verdicts in world2.run(alone):
        assert "nothing to partition" in report and verdicts == ["ignored"]
