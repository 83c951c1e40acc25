"""Dtypes: what is cast and what is not, what travels, what is accumulated in, and that all stages agree.

What the configuration says of single modules and of buffers is in `test_precision_of_modules.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.utils import safe_get_full_grad
from tests.reference import (
    Case,
    assert_like,
    assert_weights,
    check_loop,
    configuration,
    expected,
    full_masters,
    train_all,
)
from tests.worlds import World
from tests.zoo import Shape

WIDTH = 8


class Mixed(nn.Module):
    """bf16 blocks with an fp32 norm and router, an fp32 buffer and an integer one; each casts to its weights' dtype."""

    def __init__(self, low: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(low) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(WIDTH, dtype=torch.float32) / 3)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x.to(block.weight.dtype)).float())
        x = self.norm(x.to(self.norm.weight.dtype)).float() * torch.cos(self.table)
        return torch.sigmoid(self.router(x.to(self.router.weight.dtype)).float()) * x


def data(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def one_loss(model: Any, number: int, rank: int) -> Any:
    yield model(data(number, rank)).square().mean()


def mixed() -> nn.Module:
    return Mixed()


# ------------------------------------------------------------------------------------------------------------ all stages
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_the_same_at_every_stage(world2: World, precision: str) -> None:
    """bf16 has no loss scale at any stage: norms, losses and weights agree, step by step."""
    cases = [Case(Shape(blocks=("linear", "wide")), stage=stage, precision=precision, clip=0.5) for stage in range(4)]
    runs = world2.run(train_all, cases)[0]
    for case, run in zip(cases, runs, strict=True):
        assert_like(run, expected(case, 2), case)
        assert run.norms == runs[0].norms and run.losses == runs[0].losses, case.stage


def bf16_scale(stage: int) -> tuple[float, bool]:
    engine, _, _, _ = onecopy.initialize(model=Mixed(), config=configuration(stage, bf16={"enabled": True}))
    answer = engine.loss_scale(), engine.dynamic_loss_scale()
    engine.destroy()
    return answer


def test_bf16_has_no_loss_scale(world2: World) -> None:
    for stage in (0, 1):
        assert world2.run(bf16_scale, stage) == [(1.0, False)] * 2


# --------------------------------------------------------------------------------------------------------- what is cast
def dtypes(config: dict[str, Any], stage: int) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Dtypes of parameters as used in forward, of buffers, and of masters."""
    model = Mixed()
    used: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_pre_hook(
                lambda module, args, name=name: used.update({name: str(module.weight.dtype)[6:]})
            )
    engine, _, _, _ = onecopy.initialize(model=model, config=configuration(stage, **config))
    engine.backward(next(one_loss(engine, 0, engine.global_rank)))
    engine.step()
    buffers = {name: str(buffer.dtype)[6:] for name, buffer in model.named_buffers()}
    masters = {name: str(weight.dtype)[6:] for name, weight in full_masters(engine).items()}
    assert torch.equal(model.table, Mixed().table) and int(model.count) == 3
    engine.destroy()
    return used, buffers, masters


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_fp32_islands_stay_fp32_when_asked(world2: World, stage: int) -> None:
    """Norms and routers named in `keep_in_fp32_modules` are used in fp32, buffers are left alone, masters are fp32."""
    config = {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["norm", "router"]}}
    used, buffers, masters = world2.run(dtypes, config, stage)[0]
    assert used.pop("norm") == used.pop("router") == "float32"
    assert set(used.values()) == {"bfloat16"}
    assert buffers == {"table": "float32", "count": "int64"}
    assert set(masters.values()) == {"float32"}


def batch_norms(stage: int, precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.LayerNorm(48), nn.Linear(48, 2))
    config = {
        **configuration(stage),
        precision: {"enabled": True, **({"loss_scale": 8} if precision == "fp16" else {})},
    }
    engine, *_ = onecopy.initialize(model=model, config=config)
    low = torch.float16 if precision == "fp16" else torch.bfloat16
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 3, 8).to(low)).float().square().mean())
        engine.step()
    with torch.no_grad():
        assert engine.eval()(torch.randn(4, 3, 8).to(low)).dtype is low
    with onecopy.zero.GatheredParameters(list(model.parameters())):
        assert [p.dtype for p in model[1].parameters()] == [torch.float32] * 2 and model[3].weight.dtype is low
    assert model[1].running_mean.dtype == torch.float32 and model[1].running_mean.any()  # type: ignore[union-attr]
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_batch_norms_stay_in_the_dtype_of_their_statistics(world2: World, stage: int) -> None:
    for precision in ("bf16", "fp16"):
        world2.run(batch_norms, stage, precision)


@pytest.mark.parametrize("stage", [0, 3])
def test_without_a_precision_block_dtypes_stay_as_given(world2: World, stage: int) -> None:
    """fp32 islands in a bf16 model: nothing is cast behind the user's back."""
    used, buffers, masters = world2.run(dtypes, {}, stage)[0]
    assert used.pop("norm") == used.pop("router") == "float32" and set(used.values()) == {"bfloat16"}
    assert buffers["table"] == "float32" and set(masters.values()) == {"float32"}


def check_mixed(stages: tuple[int, ...], autocast: bool) -> None:
    more: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if autocast else {}
    for stage in stages:
        check_loop(mixed, one_loss, stage, tolerance=(2e-2, 5e-3), **more)


@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_dtypes_in_one_model_train(world2: World, autocast: bool) -> None:
    """fp32 next to bf16 parameters, with autocast on and off: grouped by dtype, never an assertion."""
    world2.run(check_mixed, (0, 2, 3), autocast)


class Adapted(nn.Module):
    """A frozen bf16 base with fp32 adapters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = x + torch.tanh(base(x.bfloat16()).float() + up(down(x)))
        return x


def adapted() -> nn.Module:
    return Adapted()


def check_adapted(stages: tuple[int, ...]) -> None:
    for stage in stages:
        check_loop(adapted, one_loss, stage)
        engine, _, _, _ = onecopy.initialize(model=adapted(), config=configuration(stage))
        engine.backward(next(one_loss(engine, 0, engine.global_rank)))
        kinds = {gradient.wire_dtype for gradient in engine.gradients.all}
        assert kinds == {torch.float32}, "fp32 gradients travel in fp32"
        engine.destroy()


def test_fp32_adapters_on_a_frozen_bf16_base(world2: World) -> None:
    """LoRA's dtypes: equal to plain torch in fp32, at every stage."""
    world2.run(check_adapted, (0, 1, 2, 3))


class Quantised(nn.Parameter):
    """A parameter subclass with bytes and an attribute of its own."""

    scale: float

    def __new__(cls, data: torch.Tensor, scale: float = 1.0) -> Quantised:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scale = scale
        return made


class QuantisedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = Quantised(torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8), scale=0.01)
        self.bytes = nn.Parameter(torch.randint(0, 255, (WIDTH,), dtype=torch.uint8), requires_grad=False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ ((self.weight.float() - 128) * self.weight.scale) + (self.bytes.float() - 128) * 0.01
        for adapter in self.adapters:
            x = x + torch.tanh(adapter(x))
        return x


def quantised() -> nn.Module:
    return QuantisedNet()


def check_quantised(stages: tuple[int, ...], config: dict[str, Any]) -> None:
    for stage in stages:
        model = quantised()
        engine, _, _, _ = onecopy.initialize(model=model, config=configuration(stage, **config))
        want = quantised()
        if config:
            want.adapters.to(torch.bfloat16)
        x = data(0, 0)
        with torch.no_grad():
            if not config:
                assert torch.equal(engine(x), want(x)), stage
        assert model.weight.dtype == torch.uint8 and model.weight.scale == 0.01 and type(model.weight) is Quantised
        masters = full_masters(engine)
        assert torch.equal(masters["weight"], want.weight) and torch.equal(masters["bytes"], want.bytes)
        engine.destroy()
        if not config:
            check_loop(quantised, one_loss, stage)


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}])
def test_integer_weights_and_subclasses_are_neither_cast_nor_lost(world2: World, config: dict[str, Any]) -> None:
    """uint8 base weights with a scale attribute, frozen: the same bits, the same class, the same forward."""
    world2.run(check_quantised, (0, 2, 3), config)


def check_double() -> None:
    """fp64 models keep their precision through reduction and step."""

    def build() -> nn.Module:
        return Mixed(torch.float64).double()

    def losses(model: Any, number: int, rank: int) -> Any:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)
        for block in model.blocks:
            x = x + torch.tanh(block(x))
        yield x.square().mean() + model.norm.weight.sum() + model.router.weight.square().sum()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, number: int, rank: int) -> torch.Tensor:
            return next(losses(self.inner, number, rank))

    def one(model: Any, number: int, rank: int) -> Any:
        yield model(number, rank)

    for stage in (0, 1, 2, 3):
        check_loop(Wrapped, one, stage, tolerance=(1e-12, 1e-13))
        check_loop(Wrapped, one, stage, tolerance=(1e-12, 1e-13), micros=3)


def test_double_precision_is_kept(world2: World) -> None:
    """float64 gradients are summed over ranks and micro-batches in float64."""
    world2.run(check_double)


# -------------------------------------------------------------------------------------------------------- what travels
def gradients(stage: int, config: dict[str, Any], scale: float, model_dtype: str) -> dict[str, torch.Tensor]:
    model = Mixed(torch.float32)
    engine, _, _, _ = onecopy.initialize(model=model, config=configuration(stage, **config))
    engine.backward(next(one_loss(engine, 0, engine.global_rank)) * scale)
    found = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
    engine.destroy()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_gradients_travel_in_the_communication_dtype(world: Any, size: int, wire: str) -> None:
    """Every wire dtype, with and without predivision: the mean over ranks to that dtype's tolerance, large and small."""
    tolerance = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}[wire]
    model = Mixed(torch.float32).double()
    model.table = model.table.double()
    for rank in range(size):
        (next(one_loss(model, 0, rank)).double() / size).backward()
    for stage, more in ((1, {"gradient_predivide_factor": 2.0}), (2, {"prescale_gradients": True}), (3, {})):
        for scale in (1e-3, 1e3):
            config = {"communication_data_type": wire, **more}
            found = world(size).run(gradients, stage, config, scale, "fp32")[0]
            for name, parameter in model.named_parameters():
                wanted = parameter.grad.float()
                error = (found[name] / scale - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)
                assert error < tolerance, (stage, scale, name, float(error))


def wire_bytes(stage: int, wire: str) -> int:
    engine, _, _, _ = onecopy.initialize(
        model=Mixed(torch.float32), config=configuration(stage, communication_data_type=wire)
    )
    for number in range(2):
        engine.backward(next(one_loss(engine, number, engine.global_rank)))
        engine.step()
    sent = engine.communication()["bytes_by_kind"]["reduce"]
    engine.destroy()
    return sent  # type: ignore[no-any-return]


def test_a_narrower_wire_sends_fewer_bytes(world2: World) -> None:
    for stage in (0, 3):
        assert world2.run(wire_bytes, stage, "fp32")[0] == 2 * world2.run(wire_bytes, stage, "bf16")[0]


def accumulated(stage: int, dtype: str) -> str:
    engine, _, _, _ = onecopy.initialize(
        model=Mixed(),
        config=configuration(
            stage, bf16={"enabled": True}, gradient_accumulation_steps=2, data_types={"grad_accum_dtype": dtype}
        ),
    )
    for number in range(2):
        engine.backward(next(one_loss(engine, number, engine.global_rank)))
        if number == 0:
            engine.step()
    engine.gradients.settle()
    kinds = {str(gradient.shard.dtype)[6:] for gradient in engine.gradients.all}
    engine.step()
    assert engine.global_steps == 1 and engine.skipped_steps == 0
    engine.destroy()
    (kind,) = kinds
    return kind


@pytest.mark.parametrize(("name", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_gradients_are_accumulated_in_the_configured_dtype(world2: World, name: str, dtype: str) -> None:
    for stage in (0, 1, 3):
        assert world2.run(accumulated, stage, name) == [dtype] * 2


def masters_are_exact(stage: int) -> None:
    """Masters come from the weights as given, not from their 16-bit rounding."""
    model = Mixed(torch.float32)
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, _, _, _ = onecopy.initialize(
        model=model,
        config=configuration(stage, bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 0.0}}),
    )
    assert_weights(engine, given, 0.0, 0.0)
    engine.backward(next(one_loss(engine, 0, engine.global_rank)))
    engine.step()
    assert_weights(engine, given, 0.0, 0.0)
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_a_learning_rate_of_zero_changes_no_bit(world2: World, stage: int) -> None:
    world2.run(masters_are_exact, stage)
