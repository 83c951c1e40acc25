"""Units: one block each, large modules alone, ties and leftovers at the root, and what the user names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onecopy.sharding import UnitRules, choose_small, discover_units


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention, self.mlp = (
            nn.Linear(width, width),
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Language(nn.Module):
    """Embedding, blocks, norm, head; a tied head shares the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4, elementwise_affine=True)
        self.head = nn.Linear(4, 50, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def names(model: nn.Module, **rules: Any) -> dict[str, list[str]]:
    return {plan.name: [name for name, _ in plan.parameters] for plan in discover_units(model, UnitRules(**rules))}


def test_blocks_and_large_modules_are_units() -> None:
    found = names(Language(tied=False))
    assert list(found)[:4] == ["embedding", "blocks.0", "blocks.1", "blocks.2"] and list(found)[-1] == "(root)"
    assert "head" in found and "scale" in found["(root)"]
    everything = [name for members in found.values() for name in members]
    assert sorted(everything) == sorted(name for name, _ in Language(tied=False).named_parameters())


def test_a_tied_weight_lives_at_the_root_once() -> None:
    found = names(Language(tied=True))
    assert found["(root)"].count("embedding.weight") == 1 and "head" not in found and "embedding" not in found


def test_named_classes_suffixes_and_marks_make_units() -> None:
    model = nn.ModuleDict({"a": Block(), "b": Block()})
    assert set(names(model, classes=("Block",))) == {"a", "b"}
    assert set(names(model, names=("a",))) >= {"a"} and "b" not in names(model, names=("a",))
    assert set(names(model, name_suffixes=("b",))) >= {"b"}
    model["a"]._z3_leaf = True  # type: ignore[assignment]
    assert "a" in names(model)


def test_granularity_keeps_fine_modules_together() -> None:
    model = nn.ModuleDict({"fine": Block(), "coarse": Block(40)})
    found = names(model, granularity=30)
    assert "fine" in found and "coarse" not in found


def test_nested_lists_give_outer_blocks() -> None:
    """Experts inside a block belong to the block, so that all ranks gather them together."""

    class Moe(Block):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    model = nn.Module()
    model.layers = nn.ModuleList(Moe() for _ in range(2))
    found = names(model)
    assert list(found) == ["layers.0", "layers.1"]
    assert sum("experts" in name for name in found["layers.0"]) == 8


def test_a_shared_block_is_one_unit() -> None:
    block = Block()
    model = nn.Module()
    model.layers = nn.ModuleList([block, Block(), block])
    assert list(names(model)) == ["layers.0", "layers.1"]


def test_small_parameters_are_the_smallest_first_up_to_the_budget() -> None:
    plans = discover_units(Language(tied=False), UnitRules())
    sizes = {id(p): p.numel() for plan in plans for _, p in plan.parameters}
    chosen = choose_small(plans, threshold=5, most=9, eligible=lambda p: True)
    assert sum(sizes[each] for each in chosen) <= 9 and all(sizes[each] < 5 for each in chosen)
    assert 1 in {sizes[each] for each in chosen}
    assert not choose_small(plans, threshold=0, most=10**9, eligible=lambda p: True)
    assert not choose_small(plans, threshold=5, most=10**9, eligible=lambda p: False)
