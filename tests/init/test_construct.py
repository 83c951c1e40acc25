"""`zero.Init`: a model built sharded is the model built plainly, whatever its code does with weights on the way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onecopy
from onecopy import zero
from onecopy.errors import ConfigError, ModelError, ReleasedParameterError
from tests.reference import configuration
from tests.worlds import World, world
from tests.zoo import KINDS, Shape, Zoo


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights and buffers, whole."""
    with zero.GatheredParameters(list(model.parameters())):
        found = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Equal bits, buffers included, and everything but empty parameters was sharded on the way."""
    assert all(hasattr(p, "ds_shape") for p in model.parameters() if p.numel())
    mine, theirs = gathered(model), gathered(plain)
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(mine[name], value) and mine[name].dtype == value.dtype, name


class Particular(nn.Module):
    """Everything that constructors do to weights: their own and their children's, through aliases, ties and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6, padding_idx=2)
        nn.init.normal_(self.emb.weight, std=9)  # the child's weights are sharded by now
        self.emb.weight.data[2].zero_()
        self.attention = nn.MultiheadAttention(6, 2)
        self.packed = nn.Parameter(torch.randn(4, 3, 5))
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.lstm = nn.LSTM(6, 4)
        held = self.attention.out_proj.weight.data  # written to after others were touched
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight * 2)
        held.mul_(3)
        nn.utils.parametrizations.weight_norm(self.first)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 6, 2).float() / 6), persistent=False)
        for parameter in self.second.parameters():
            if parameter.dim() > 1:
                nn.init.orthogonal_(parameter)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.5)
            with torch.no_grad():
                module.weight[module.padding_idx] = 0
        elif isinstance(module, nn.MultiheadAttention):
            nn.init.xavier_uniform_(module.in_proj_weight)


def build_particular() -> None:
    torch.manual_seed(3)
    plain = Particular()
    torch.manual_seed(3 + 100 * dist.get_rank())  # rank 0's draw is everyone's
    with zero.Init():
        model = Particular()
    assert_same(model, plain)
    assert model.head.weight is model.emb.weight
    for each in (plain, model):  # after construction as well
        torch.manual_seed(5)
        each.apply(lambda m: nn.init.kaiming_normal_(m.weight) if isinstance(m, nn.Embedding) else None)
        for parameter in each.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    dist.barrier()
    assert_same(model, plain)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_constructors_and_initialisers_see_whole_weights(size: int) -> None:
    world(size).run(build_particular)


def build_zoo(shapes: list[Shape]) -> None:
    for shape in shapes:
        plain = Zoo(shape)
        with zero.Init():
            model = Zoo(shape)
        assert_same(model, plain)


@settings(max_examples=3)
@given(
    st.lists(
        st.builds(
            Shape,
            width=st.integers(1, 9),
            blocks=st.lists(st.sampled_from(KINDS), max_size=4).map(tuple),
            container=st.sampled_from(["list", "sequence", "flat"]),
            tied=st.booleans(),
            root=st.booleans(),
            seed=st.integers(0, 99),
        ),
        min_size=4,
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_any_model_of_any_sizes(shapes: list[Shape], size: int) -> None:
    world(size).run(build_zoo, shapes)


def train(shape: Shape, stage: int, sharded: bool, precision: dict[str, Any]) -> list[torch.Tensor]:
    with zero.Init(enabled=sharded, config_dict_or_path=configuration(stage)):
        model = Zoo(shape)
    assert sharded == any(hasattr(p, "ds_tensor") for p in model.parameters())
    engine, *_ = onecopy.initialize(model=model, config={**configuration(stage), **precision})
    assert not any(hasattr(p, "ds_tensor") for p in model.parameters())
    for step in range(2):
        x = torch.randn(3, shape.width, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.backward(engine(x).square().mean())
        engine.step()
    weights = [onecopy.utils.safe_get_full_fp32_param(p) for p in model.parameters()]
    engine.destroy()
    return weights  # type: ignore[return-value]


def train_both(stage: int) -> None:
    for precision in ({}, {"bf16": {"enabled": True}}):
        shape = Shape(width=7, blocks=("wide", "frozen", "adapter", "double", "empty"), tied=True)
        plain, sharded = (train(shape, stage, each, precision) for each in (False, True))
        for ours, theirs in zip(sharded, plain, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_initialize_takes_it_at_every_stage_and_masters_are_exact(world2: World, stage: int) -> None:
    world2.run(train_both, stage)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])


class Outer(nn.Module):
    """A model that builds another one in a context of its own, and a small helper that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        with zero.Init():
            self.inner = Inner()
        self.own = nn.Linear(5, 4)
        with zero.not_sharded():
            self.helper = nn.Linear(2, 2)


def nest() -> None:
    torch.manual_seed(1)
    plain = nn.ModuleList([Outer(), Inner()])
    torch.manual_seed(1)
    with zero.Init(enabled=False):
        assert nn.Linear(2, 2).weight.shape == (2, 2)
    torch.manual_seed(1)
    with zero.Init():

        class Declared(nn.Linear):
            def __init__(self) -> None:
                super().__init__(3, 3)
                self.more = nn.Parameter(torch.zeros(2))

        with zero.Init():
            outer = Outer()
        other = Inner()
        declared = Declared()
    assert declared.weight.ds_shape == (3, 3) and declared.more.ds_shape == (2,)
    assert outer.helper.weight.shape == (2, 2) and not hasattr(outer.helper.weight, "ds_id")
    assert outer.inner.layers[0].weight.shape == (0,) and outer.own.weight.shape == (0,)
    ours, theirs = gathered(nn.ModuleList([outer, other])), gathered(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert nn.Linear(3, 3).weight.shape == (3, 3)
    assert not hasattr(nn.Linear.__init__, "__wrapped__") and "__init_subclass__" not in vars(nn.Module)
    ids = [p.ds_id for p in [*other.parameters(), *outer.inner.parameters()]]
    assert len(set(ids)) == len(ids)
    zero.Init(module=plain[1])
    assert plain[1].layers[0].weight.shape == (0,)
    with zero.Init(dtype=torch.bfloat16):
        low = nn.BatchNorm1d(3)
    assert low.weight.dtype == torch.bfloat16 and low.running_mean.dtype == torch.float32


def test_nested_composite_existing_and_opted_out_models(world2: World) -> None:
    world2.run(nest)


def live_without_an_engine() -> None:
    torch.manual_seed(0)
    plain = Zoo(Shape(blocks=("linear", "norm")))
    with zero.Init():
        model = Zoo(Shape(blocks=("linear", "norm")))
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))  # a reference model that no engine has
    copied = copy.deepcopy(model)
    with zero.GatheredParameters(copied.stem.weight, modifier_rank=1):
        if dist.get_rank() == 1:
            nn.init.ones_(copied.stem.weight)
        elif dist.get_rank() == 0:
            copied.stem.weight.data.zero_()  # not the modifier: discarded
    with zero.GatheredParameters(copied.stem.weight):
        assert copied.stem.weight.eq(1).all()
        copied.stem.weight.data.zero_()  # for reading: discarded
    assert copied.stem.weight.detach().mean() == 1
    assert_same(model, plain)  # the copy is independent
    with pytest.raises(ModelError, match="never given to onecopy"):
        model(x).sum().backward()
    with (
        zero.GatheredParameters(model.stem.weight, modifier_rank=0),
        pytest.raises(ReleasedParameterError, match="does not name it"),
    ):
        model.head.weight.mean()
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    model.load_state_dict(changed)
    saved = model.state_dict()
    assert all(torch.equal(saved[name] * 1, value) for name, value in changed.items())
    del saved
    model.to(torch.bfloat16)
    plain.load_state_dict(changed)
    assert_same(model, plain.to(torch.bfloat16))


def test_reading_editing_loading_copying_and_casting_before_initialize(world2: World) -> None:
    world2.run(live_without_an_engine)


def fail_first() -> None:
    with zero.Init():
        model = Zoo(Shape(blocks=("linear",)))
    with pytest.raises(ConfigError):
        onecopy.initialize(model=model, config={**configuration(3), "optimizer": {"type": "NoSuch"}})
    assert_same(model, Zoo(Shape(blocks=("linear",))))
    engine, *_ = onecopy.initialize(model=model, config=configuration(3))
    engine.destroy()
    with pytest.raises(ConfigError, match="nvme"):
        zero.Init(remote_device="nvme")


def test_a_refused_initialize_leaves_the_model_as_it_was(world2: World) -> None:
    world2.run(fail_first)


def alone_in_a_world_of_two() -> str:
    """A process group of this rank alone, although the launcher has started two."""
    import os

    from onecopy.init import construct

    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2") as caught:
        construct.Init()
    return str(caught.value)


def test_a_group_of_one_rank_where_there_are_more_is_an_error(world1: World) -> None:
    world1.run(alone_in_a_world_of_two)


def peak_of_construction(sharded: bool) -> int:
    """Bytes by which this rank's peak memory grew while a model of 64 MB was built."""

    def peak(reset: bool = False) -> int:
        if reset:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

    with zero.Init():
        nn.Linear(8, 8)  # what is imported and connected once does not count
    before = peak(reset=True)
    with zero.Init(enabled=sharded):
        model = nn.ModuleList([nn.Linear(512, 1024, bias=False) for _ in range(32)])
    grown = peak() - before
    del model
    return grown


def test_a_rank_never_holds_more_than_its_shard_and_a_module() -> None:
    whole, ranks = 32 * 512 * 1024 * 4, 4
    sharded = max(world(ranks).run(peak_of_construction, True))
    assert sharded < 0.6 * whole, sharded / whole
