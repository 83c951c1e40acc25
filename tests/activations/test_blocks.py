"""Blocks that are computed again in backward train to the same bits, at every stage, with less kept in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onecopy
from onecopy.errors import ConfigError, ModelError
from tests.activations.small_lm import WIDTH, LanguageModel, document, loss_of, result, steps
from tests.worlds import World

GetWorld = Callable[[int], World]


def run(stage: int, precision: str, how: Any, **options: Any) -> Any:
    model = LanguageModel(**options)
    engine = onecopy.initialize(model=model, config=document(stage, precision))[0]
    if how == "inside":  # as Hugging Face does: the checkpoint is around the block and its hooks
        for block in model.layers:
            block._call_impl = around(block._call_impl)  # type: ignore[method-assign]
    elif how is not None:
        engine.checkpoint_activations(how)
    found = result(engine, steps(engine))
    engine.destroy()
    assert all("forward" not in vars(block) for block in model.layers)
    return found


def around(call: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(call, *args, use_reentrant=False, **kwargs)


def every_way(stages: tuple[int, ...], precisions: tuple[str, ...], ways: tuple[Any, ...], **options: Any) -> list[Any]:
    """(what, whether it is the plain run's bits) for each."""
    found = []
    for precision in precisions:
        for stage in stages:
            plain = run(stage, precision, None, **options)
            found += [((precision, stage, how), run(stage, precision, how, **options) == plain) for how in ways]
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_the_same_bits_at_every_stage(world: GetWorld, size: int) -> None:
    """Dropout draws again what it drew; a block's weights are gathered again once, for recomputation and backward."""
    ways = ("full", "selective", 2, "inside")
    stages = (0, 1, 2, 3) if size == 2 else (0, 3)
    for rank in world(size).run(every_way, stages, ("fp32", "bf16"), ways):
        assert [what for what, same in rank if not same] == []


def test_frozen_base_with_adapters_trains_the_same(world2: World) -> None:
    """The first block's inputs need no gradient, and frozen weights are released and gathered like others."""
    for rank in world2.run(every_way, (0, 3), ("fp32",), ("full", "inside"), frozen=True):
        assert [what for what, same in rank if not same] == []


def gathers(how: Any) -> int:
    engine = onecopy.initialize(model=LanguageModel(blocks=6), config=document(3))[0]
    engine.checkpoint_activations(how)
    steps(engine, 3)
    found = engine.communication()["collectives_by_kind"]
    engine.destroy()
    return sum(found.values())


def test_recomputation_adds_no_gather(world2: World) -> None:
    assert world2.run(gathers, "full") == world2.run(gathers, "none")


def several(how: Any) -> Any:
    config = document(3, gradient_accumulation_steps=2)
    engine = onecopy.initialize(model=LanguageModel(), config=config)[0]
    engine.checkpoint_activations(how)
    losses = steps(engine, 2, micro_batches=2)
    torch.manual_seed(5)
    loss = loss_of(engine, 7, engine.global_rank)
    loss.backward(retain_graph=True)  # two backwards of one graph compute twice again
    loss.backward()
    engine.eval()
    with torch.no_grad():
        losses.append(loss_of(engine, 8, engine.global_rank).item())
    found = result(engine, losses)
    engine.destroy()
    return found


def test_windows_second_backwards_and_evaluation(world2: World) -> None:
    assert world2.run(several, "full") == world2.run(several, "none")


def saved(how: str) -> int:
    engine = onecopy.initialize(model=LanguageModel(dropout=0.0), config=document(3))[0]
    engine.checkpoint_activations(how)
    assert engine.memory()["activations_peak"] == 0
    loss_of(engine, 0, 0)
    nbytes: int = engine.memory()["activations_peak"]
    engine.destroy()
    return nbytes


def test_less_is_kept(world1: World) -> None:
    full, none = (world1.run(saved, how)[0] for how in ("full", "none"))
    assert 0 < full < none / 3


def from_json(value: Any) -> list[bool]:
    config = document(2, onecopy={"checkpoint_activations": value})
    engine = onecopy.initialize(model=LanguageModel(), config=config)[0]
    wrapped = ["forward" in vars(block) for block in engine.module.layers]
    engine.checkpoint_activations("none")
    assert not any("forward" in vars(block) for block in engine.module.layers)
    engine.destroy()
    return wrapped


def test_the_json_key_wraps_by_itself(world1: World) -> None:
    assert world1.run(from_json, "full")[0] == [True] * 4
    assert world1.run(from_json, 3)[0] == [True, False, False, True]
    with pytest.raises(ConfigError, match="checkpoint_activations"):
        world1.run(from_json, "some")


def refused() -> list[str]:
    said = []
    plain = onecopy.initialize(model=nn.Linear(WIDTH, WIDTH), config=document(1))[0]
    engine = onecopy.initialize(model=LanguageModel(), config=document(1))[0]
    engine.module.layers[1].gradient_checkpointing = True
    for ask in (
        lambda: plain.checkpoint_activations("full"),
        lambda: engine.checkpoint_activations("half"),
        lambda: engine.checkpoint_activations(0),
        lambda: engine.checkpoint_activations("full"),
    ):
        try:
            ask()
        except ModelError as error:
            said.append(str(error))
    plain.destroy()
    engine.destroy()
    return said


def test_what_cannot_be_is_said(world1: World) -> None:
    no_block, word, zero, itself = world1.run(refused)[0]
    assert "unit_classes" in no_block
    assert '"selective"' in word and '"selective"' in zero
    assert "layers.1" in itself and "gradient_checkpointing_disable" in itself


def own(stage: int, reentrant: bool | None, twice: bool, frozen: bool) -> Any:
    """Checkpoints that the model itself puts around its blocks and their hooks; `twice` uses the model for two inputs."""
    model = LanguageModel(frozen=frozen)
    engine = onecopy.initialize(model=model, config=document(stage))[0]
    if reentrant:
        model.words.register_forward_hook(lambda module, args, output: output.requires_grad_())
    for block in model.layers if reentrant is not None else []:
        block._call_impl = repeated(block._call_impl, bool(reentrant))  # type: ignore[method-assign]
    torch.manual_seed(1)
    losses = []
    for number in range(2):
        loss = loss_of(engine, number, engine.global_rank)
        if twice:
            loss = loss * loss_of(engine, number + 50, engine.global_rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = result(engine, losses)
    engine.destroy()
    return found[:2]


def repeated(call: Any, reentrant: bool) -> Any:
    return lambda *args, **kwargs: checkpoint(lambda *a: call(*a, **kwargs), *args, use_reentrant=reentrant)


def own_ways() -> list[tuple[Any, Any, Any]]:
    cases = [
        (stage, twice, frozen) for stage in (3,) for twice, frozen in ((False, False), (True, False), (False, True))
    ]
    return [
        ((*case, reentrant), own(case[0], reentrant, *case[1:]), own(case[0], None, *case[1:]))
        for case in cases
        for reentrant in (False, True)
    ]


def test_both_kinds_of_torchs_own_checkpoint(world2: World) -> None:
    """Also around a model that is used twice in a step, and with a frozen base; sums of two uses come in another order."""
    for rank in world2.run(own_ways):
        for case, (losses, norm), (wanted_losses, wanted_norm) in rank:
            assert losses == pytest.approx(wanted_losses, rel=1e-6), case
            assert norm == pytest.approx(wanted_norm, rel=1e-5), case
