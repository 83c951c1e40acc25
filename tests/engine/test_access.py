"""State by parameter: read and written whole at every stage, and edits that the next steps keep."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.errors import ReleasedParameterError
from onecopy.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.reference import configuration
from tests.worlds import World

GetWorld = Callable[[int], World]
STAGES = (0, 1, 2, 3)


def engine_of(stage: int, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)], nn.Linear(5, 3))
    document = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        **more,
    }
    engine, *_ = onecopy.initialize(model=model, config=document)
    return engine


def batch(engine: Any, seed: int = 0) -> torch.Tensor:
    everyone = torch.randn(2 * engine.dp_world_size, 5, generator=torch.Generator().manual_seed(seed))
    return everyone[2 * engine.communicator.rank :][:2]


def loss_of(engine: Any, seed: int = 0) -> torch.Tensor:
    loss: torch.Tensor = engine(batch(engine, seed)).square().mean()
    return loss


def read_all(stage: int) -> dict[str, Any]:
    """Gradient, master and first moment of every parameter around one step."""
    engine = engine_of(stage)
    parameters = dict(engine.module.named_parameters())
    before = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in parameters.items()}
    outside = [safe_get_full_grad(p) for p in parameters.values()]
    engine.backward(loss_of(engine))
    gradients = {name: safe_get_full_grad(p) for name, p in parameters.items()}
    engine.step()
    moments = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in parameters.items()}
    masters = {name: safe_get_full_fp32_param(p) for name, p in parameters.items()}
    with pytest.raises(ValueError, match="exp_avg_sq"):
        safe_get_full_optimizer_state(parameters["3.weight"], "exp_average")
    engine.destroy()
    nothing = all(value is None for value in [*before.values(), *outside])
    return {"gradients": gradients, "moments": moments, "masters": masters, "nothing before": nothing}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reads_are_those_of_plain_torch(world: GetWorld, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)], nn.Linear(5, 3))
    everyone = torch.randn(2 * size, 5, generator=torch.Generator().manual_seed(0))
    model(everyone).square().mean().backward()
    for stage in STAGES:
        for rank in world(size).run(read_all, stage):
            assert rank["nothing before"]
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(rank["gradients"][name], parameter.grad)
                torch.testing.assert_close(rank["moments"][name], 0.1 * parameter.grad)
                assert rank["masters"][name].shape == parameter.shape


def frozen_and_marked() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    engine, *_ = onecopy.initialize(model=model, config=configuration(3))
    assert [tuple(p.ds_shape) for p in model.parameters()] == [(4, 3), (4,), (2, 4), (2,)]
    assert len({p.ds_id for p in model.parameters()}) == 4
    whole = engine.communicator.world_size == 1
    assert [p.ds_status.name for p in model.parameters()] == ["AVAILABLE" if whole else "NOT_AVAILABLE"] * 4
    engine.destroy()


@pytest.mark.parametrize("size", [1, 2])
def test_frozen_parameters_have_deepspeeds_attributes_too(world: GetWorld, size: int) -> None:
    world(size).run(frozen_and_marked)


def write_all(stage: int) -> list[float]:
    """Set a master, a moment and a gradient; each is what the step uses."""
    engine = engine_of(stage, optimizer={"type": "SGD", "params": {"lr": 1.0, "momentum": 0.5}})
    weight, bias = engine.module[3].weight, engine.module[3].bias
    safe_set_full_fp32_param(weight, torch.full((3, 5), 2.0))
    with torch.no_grad():
        seen = float(engine(torch.ones(1, 5)).sum())  # the live weight follows at once
    engine.backward(loss_of(engine))
    safe_set_full_grad(bias, torch.full((3,), 4.0))
    before = safe_get_full_fp32_param(bias)
    engine.step()
    moved = before - safe_get_full_fp32_param(bias)
    safe_set_full_optimizer_state(bias, torch.zeros(3), "momentum_buffer")
    state = safe_get_full_optimizer_state(bias, "momentum_buffer")
    whole_sum = float(safe_get_full_fp32_param(weight).sum())
    local = float(safe_get_local_fp32_param(weight).sum()) if stage == 3 else whole_sum
    engine.destroy()
    return [seen, *moved.tolist(), float(state.abs().sum()), whole_sum, local]


@pytest.mark.parametrize("stage", STAGES)
def test_writes_are_what_the_step_uses(world: GetWorld, stage: int) -> None:
    first, second = world(2).run(write_all, stage)
    assert first[:6] == second[:6]
    assert first[1:4] == pytest.approx([4.0, 4.0, 4.0]) and first[4] == 0.0
    if stage == 3:
        assert first[6] + second[6] == pytest.approx(first[5])


def edit(stage: int, low: bool) -> dict[str, Any]:
    """One rank edits a row inside GatheredParameters; a step with lr 0 follows."""
    engine = engine_of(stage, optimizer={"type": "SGD", "params": {"lr": 0.0}}, bf16={"enabled": low})
    parameters = list(engine.module.parameters())
    before = [safe_get_full_fp32_param(p) for p in parameters]
    with onecopy.zero.GatheredParameters(parameters, modifier_rank=0):
        shapes = [tuple(p.shape) for p in parameters]
        if engine.global_rank == 0:
            engine.module[3].weight.data[1] = 7.0
    dtype = torch.bfloat16 if low else torch.float32
    engine.backward(engine(batch(engine).to(dtype)).square().mean())
    engine.step()
    after = [safe_get_full_fp32_param(p) for p in parameters]
    with onecopy.zero.GatheredParameters(engine.module[3].weight):
        live = engine.module[3].weight.detach().float().clone()
    edited = next(place for place, p in enumerate(parameters) if p is engine.module[3].weight)
    others_kept = all(torch.equal(a, b) for place, (a, b) in enumerate(zip(before, after)) if place != edited)
    rows_kept = torch.equal(before[edited][0], after[edited][0])
    engine.destroy()
    return {"shapes": shapes, "row": after[edited][1], "live": live[1], "others kept": others_kept and rows_kept}


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_edits_of_one_rank_reach_every_master(world: GetWorld, stage: int, low: bool) -> None:
    """Edits last; what was not edited keeps the precision of its master."""
    for rank in world(2).run(edit, stage, low):
        assert (5, 5) in rank["shapes"] and rank["others kept"]
        assert rank["row"].tolist() == rank["live"].tolist() == [7.0] * 5


def edit_after_a_forward() -> None:
    """A forward without a backward leaves units in their slots; edits are made while another context holds a neighbour."""
    engine = engine_of(3, onecopy={"slots": 4})
    for layer in range(3):
        before = loss_of(engine).item()
        weight, bias = engine.module[layer][0].weight, engine.module[layer][0].bias
        with onecopy.zero.GatheredParameters(bias):
            with onecopy.zero.GatheredParameters(weight, modifier_rank=0):
                if engine.communicator.rank == 0:
                    weight.data.neg_()
            assert bias.shape == (5,) and torch.isfinite(bias).all()
        after = loss_of(engine).item()
        with torch.no_grad():
            loss_of(engine)  # nothing stays in a slot after it
            assert after == loss_of(engine).item() != before
    engine.destroy()


def test_edits_are_seen_by_the_next_forward(world: GetWorld) -> None:
    world(2).run(edit_after_a_forward)


def forwards_inside() -> None:
    """Forwards while a context holds weights: lent parameters stay whole, all of them need no other rank."""
    engine = engine_of(3)
    parameters = list(engine.module.parameters())
    engine.backward(loss_of(engine))
    engine.step()
    with torch.no_grad():
        wanted = engine(torch.ones(1, 5))
        with onecopy.zero.GatheredParameters(parameters[0]):
            kept = parameters[0].clone()
            assert torch.equal(engine(torch.ones(1, 5)), wanted) and torch.equal(parameters[0], kept)
        with onecopy.zero.GatheredParameters(parameters):
            for _ in range(1 + 2 * engine.global_rank):  # as ranks generate to lengths of their own
                assert torch.equal(engine(torch.ones(1, 5)), wanted)
            assert all(parameter.numel() for parameter in parameters)
    assert all(parameter.numel() == 0 for parameter in parameters)
    first, second = (loss_of(engine, number) for number in (1, 2))
    with onecopy.zero.GatheredParameters(parameters[:3]):
        engine.backward(first)
    engine.backward(second)
    engine.step()
    engine.destroy()


def test_forwards_inside_a_gathering_context(world: GetWorld) -> None:
    world(3).run(forwards_inside, timeout=60)


def read_released() -> list[str]:
    engine = engine_of(3)
    said = []
    for read in (lambda p: p * 2, lambda p: p.detach(), lambda p: p.data.fill_(0.0), torch.clone):
        try:
            read(engine.module[0][0].weight)
            said.append("nothing")
        except ReleasedParameterError as error:
            said.append(str(error))
    count = onecopy.utils.count_parameters(engine.module)
    engine.destroy()
    return [*said, str(count)]


def test_a_released_parameter_raises_and_names_the_remedy(world: GetWorld) -> None:
    """A stand-in for absent weights must not broadcast, nor swallow a write, without a word."""
    for said in world(2).run(read_released):
        for message in said[:4]:
            assert "'0.0.weight'" in message and "GatheredParameters" in message
        assert said[4] == str(3 * 30 + 18)


class FusedLoss(torch.autograd.Function):
    """A loss that multiplies by the weight of a layer nobody calls, and keeps nothing else of it for its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, again: bool) -> torch.Tensor:
        ctx.again = again
        if again:
            ctx.save_for_backward(hidden, weight)
        else:  # the gradients are made here, as Liger does
            grad = 2 * hidden @ weight.t() / hidden.shape[0]
            ctx.save_for_backward(grad @ weight, grad.t() @ hidden)
        return (hidden @ weight.t()).square().sum() / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if not ctx.again:
            of_hidden, of_weight = ctx.saved_tensors
            return grad * of_hidden, grad * of_weight, None
        hidden, weight = ctx.saved_tensors
        with onecopy.zero.GatheredParameters([weight]):  # as TRL does
            logits = 2 * grad * hidden @ weight.t() / hidden.shape[0]
            return logits @ weight, logits.t() @ hidden, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 7, bias=False)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        with onecopy.zero.GatheredParameters([self.head.weight]):
            if way == "operation":
                loss: torch.Tensor = (x @ self.head.weight.t()).square().sum() / x.shape[0]
                return loss
            return FusedLoss.apply(x, self.head.weight, way == "again")  # type: ignore[no-any-return]


def fused(frozen: bool) -> None:
    """Whatever the loss keeps of the head's weight, gradients are those of a plain model."""
    for way in ("operation", "ahead", "again"):
        plain, model = Fused(), Fused()
        plain.head.requires_grad_(not frozen)
        model.head.requires_grad_(not frozen)
        document = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "gradient_clipping": 0.0,
        }
        engine, *_ = onecopy.initialize(model=model, config=document)
        everyone = torch.randn(2 * engine.dp_world_size, 5, generator=torch.Generator().manual_seed(3))
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            engine.backward(engine(batch(engine, 3), way))
            engine.step()
            plain(everyone, way).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            whole = safe_get_full_fp32_param(parameter)
            assert whole is not None
            torch.testing.assert_close(whole, plain.get_parameter(name), msg=f"{way}: {name}")
        engine.destroy()


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_gathered_in_a_forward_serve_its_backward(world: GetWorld, frozen: bool) -> None:
    world(2).run(fused, frozen)


def name_entries() -> list[str]:
    """PEFT reads a state dictionary's names and leaves its tensors alone; tensors that are not here must not be saved."""
    engine = engine_of(3)
    entries = engine.module.state_dict()
    assert list(entries) == [name for name, _ in engine.module.named_parameters()] and "0.0.weight" in repr(entries)
    said = []
    with tempfile.TemporaryFile() as file:
        for read in (
            lambda: torch.save(entries, file),
            lambda: copy.deepcopy(entries),
            lambda: entries["0.0.weight"].cpu(),
            lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 5))).load_state_dict(entries, strict=False),
            engine.module_state_dict,
        ):
            try:
                read()
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error))
    with onecopy.zero.GatheredParameters(list(engine.module.parameters())):
        assert torch.equal(entries["0.0.weight"].clone(), engine.module[0][0].weight)
    engine.destroy()
    return said


def test_a_state_dictionary_of_released_weights_has_names_and_raises_when_read(world: GetWorld) -> None:
    for said in world(2).run(name_entries):
        assert all("'0.0.weight'" in message and "GatheredParameters" in message for message in said), said
