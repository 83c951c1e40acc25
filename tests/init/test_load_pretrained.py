"""`load_pretrained`: whatever the model's kind, its weights are the file's, and a rank reads only what it keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import onecopy
from onecopy import zero
from onecopy.errors import ModelError
from tests.reference import configuration
from tests.worlds import World, world
from tests.zoo import Shape, Zoo, batch


def save(
    model: nn.Module, folder: Path, files: int = 1, dtype: torch.dtype | None = None, pickled: bool = False
) -> dict[str, torch.Tensor]:
    """Write the model as `save_pretrained` would: tied weights once, in one file or several with an index.

    With `pickled` as it was done before safetensors; matrices then lie column by column, as `torch.save` lets them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    kept = {
        name: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not (id(tensor) in seen or seen.add(id(tensor)))  # type: ignore[func-returns-value]
    }
    kept = {name: tensor.detach() for name, tensor in kept.items()}
    stem, suffix, write = ("pytorch_model", "bin", torch.save) if pickled else ("model", "safetensors", save_file)
    if pickled:
        kept = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in kept.items()}
    if files == 1:
        write(kept, folder / f"{stem}.{suffix}")
        return kept
    places = {name: f"{stem}-{1 + place % files}-of-{files}.{suffix}" for place, name in enumerate(kept)}
    for file in set(places.values()):
        write({name: kept[name] for name in kept if places[name] == file}, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return kept


class Tabled(Zoo):
    """A model with a table outside the state dictionary, which it can compute again, and a persistent buffer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = Table(shape.width)
        self.norm = nn.BatchNorm1d(shape.width)

    def forward(self, x: torch.Tensor, micro: int = 0, rank: int = 0) -> torch.Tensor:
        return self.norm(super().forward(x, micro, rank) * self.table.inverse)


class Table(nn.Module):
    inverse: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("inverse", torch.empty(width), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.inverse.copy_(1.0 / 10000 ** (torch.arange(self.width).float() / self.width))


def reference(shape: Shape) -> Tabled:
    torch.manual_seed(4)
    model = Tabled(shape)
    model.norm.running_mean.normal_()  # type: ignore[union-attr]
    return model


def load_everywhere(folder: str, shape: Shape, kinds: tuple[str, ...], stages: tuple[int, ...]) -> None:
    """Fill models of every kind, before and after `initialize`, and compare an evaluation and a step."""
    plain = reference(shape).eval()
    x, _ = batch(shape, 0, 0, dist.get_rank())
    with torch.no_grad():
        wanted = plain(x)
    for kind in kinds:
        for stage in stages:
            torch.manual_seed(77)
            if kind.startswith("meta"):
                with torch.device("meta"):
                    model = Tabled(shape)
            else:
                with zero.Init(enabled=kind == "init"):
                    model = Tabled(shape)
            if kind != "meta engine":
                found = onecopy.load_pretrained(model, folder)
                assert found.missing == found.unexpected == ()
                with torch.no_grad():
                    assert torch.equal(model.eval()(x), wanted), kind
            engine, *_ = onecopy.initialize(model=model, config=configuration(stage))
            if kind == "meta engine":
                with pytest.raises(ModelError, match="no values yet"):
                    engine(x)
                onecopy.load_pretrained(engine, folder)
            with torch.no_grad():
                assert torch.equal(engine.eval()(x), wanted), (kind, stage)
            for name, parameter in model.named_parameters():
                if parameter.numel() or hasattr(parameter, "ds_numel"):
                    full = onecopy.utils.safe_get_full_fp32_param(parameter)
                    assert full is not None and torch.equal(full, plain.get_parameter(name).float()), name
            engine.backward(engine(x).square().mean())
            engine.step()
            onecopy.load_pretrained(engine, folder)  # into an engine that has stepped
            with torch.no_grad():
                assert torch.equal(engine(x), wanted), (kind, stage)
            engine.destroy()


SHAPE = Shape(width=7, blocks=("wide", "adapter", "scalar", "frozen"), tied=True, root=True)


@pytest.mark.parametrize("size", [1, 2])
def test_every_kind_of_model_at_every_stage(tmp_path: Path, size: int) -> None:
    save(reference(SHAPE), tmp_path, files=3, pickled=size == 1)
    kinds, stages = ("plain", "init", "meta", "meta engine"), ((3,) if size == 1 else (0, 2, 3))
    world(size).run(load_everywhere, str(tmp_path), SHAPE, kinds, stages)


@settings(max_examples=2)
@example(1, [], True, False, 2)  # a tied weight is used twice in a row, by two biases
@given(
    st.integers(1, 9), st.lists(st.sampled_from(["linear", "wide", "norm", "scalar", "nested", "adapter"]), max_size=3),
    st.booleans(), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_odd_sizes(
    tmp_path_factory: pytest.TempPathFactory, width: int, blocks: list[str], tied: bool, root: bool, size: int
) -> None:
    shape = Shape(width=width, blocks=tuple(blocks), tied=tied, root=root)
    folder = tmp_path_factory.mktemp("odd")
    save(reference(shape), folder)
    world(size).run(load_everywhere, str(folder), shape, ("meta", "meta engine"), (3,))


def load_low(folder: str) -> None:
    plain = reference(SHAPE)
    with torch.device("meta"):
        model = Tabled(SHAPE)
    engine, *_ = onecopy.initialize(model=model, config={**configuration(3), "bf16": {"enabled": True}})
    onecopy.load_pretrained(engine, Path(folder) / "model.safetensors")
    for name, parameter in model.named_parameters():
        full = onecopy.utils.safe_get_full_fp32_param(parameter)
        wanted = plain.get_parameter(name).half()
        wanted = wanted if parameter.requires_grad else wanted.bfloat16()  # frozen weights have no masters
        assert full is not None and torch.equal(full, wanted.float()), name
    engine.destroy()


def test_values_are_converted_to_the_masters(world2: World, tmp_path: Path) -> None:
    save(reference(SHAPE), tmp_path, dtype=torch.float16)
    world2.run(load_low, str(tmp_path))


def load(path: str, strict: bool = True, unknown: bool = False) -> str:
    """What a refused load says; both ranks must say it."""
    with torch.device("meta"):
        model = Tabled(SHAPE)
        if unknown:
            model.register_buffer("mask", torch.ones(3), persistent=False)
    try:
        found = onecopy.load_pretrained(model, path, strict=strict)
    except ModelError as error:
        return str(error)
    return f"missing {found.missing} unexpected {found.unexpected}"


def test_what_does_not_fit_is_said_on_every_rank(world2: World, tmp_path: Path) -> None:
    def said(name: str, **more: bool) -> str:
        answers = world2.run(load, str(tmp_path / name), **more)
        assert answers[0] == answers[1] and "\n" not in answers[0]
        return str(answers[0])

    kept = save(reference(SHAPE), tmp_path / "whole")
    one = "blocks.0.back.weight"

    def other(name: str, tensors: dict[str, torch.Tensor]) -> str:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return name

    without = other("without", {name: tensor for name, tensor in kept.items() if name != one})
    assert f"lacks '{one}'" in said(without) and "strict=False" in said(without)
    assert said(without, strict=False) == f"missing ('{one}',) unexpected ()"
    assert "it has 'extra'" in said(other("more", {**kept, "extra": torch.zeros(2)}))
    assert f"'{one}' has shape [7, 71] in the model and [7, 70]" in said(
        other("shape", {**kept, one: torch.zeros(7, 70)})
    )
    assert "quantised" in said(other("integers", {**kept, one: torch.zeros(7, 71, dtype=torch.int8)}))
    assert "'mask'" in said("whole", unknown=True) and "reset_buffers" in said("whole", unknown=True)
    assert "downloads nothing" in said("nowhere")
    save(reference(SHAPE), tmp_path / "pickled", pickled=True)
    assert said("pickled") == "missing () unexpected ()"
    assert "neither safetensors files nor pytorch_model.bin" in said("")
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-9])
    assert "does not fit its place" in said("cut.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"no header at all, just words")
    assert "no whole safetensors file" in said("noise.safetensors")
    torch.save({**kept, "more": Shape()}, tmp_path / "objects.bin")
    assert "would run code from the file" in said("objects.bin")
    torch.save({"state_dict": kept}, tmp_path / "nested.bin")
    assert "holds 'state_dict', a dict" in said("nested.bin")
    torch.save(kept, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert "since torch 1.6" in said("old.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "nested.bin").read_bytes()[:-99])
    assert "no whole file of torch.save" in said("cut.bin")
    save(reference(SHAPE), tmp_path / "parts", files=2)
    (tmp_path / "parts" / "model-2-of-2.safetensors").unlink()
    assert "model-2-of-2.safetensors, which is not there" in said("parts")


def use_pages(folder: str) -> None:
    """Train a model whose weights are a file's pages, and write other weights where the file was."""
    file, plain = Path(folder) / "model.safetensors", reference(SHAPE)
    content = file.read_bytes()
    with torch.device("meta"):
        trained, kept = Tabled(SHAPE), Tabled(SHAPE)
    for model in (trained, kept):
        found = onecopy.load_pretrained(model, folder)
        parameters = dict(model.named_parameters())
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters.values())
        stored = {id(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}
        assert found.bytes_read == sum(stored.values())
        assert file.name in Path("/proc/self/maps").read_text()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    trained(batch(SHAPE, 0, 0, 0)[0]).square().mean().backward()
    optimizer.step()
    assert not torch.equal(trained.blocks[0].back.weight, plain.blocks[0].back.weight)
    assert file.read_bytes() == content
    engine, *_ = onecopy.initialize(model=trained, config=configuration(2))
    engine.save_16bit_model(folder, file.name)
    assert file.read_bytes() != content
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    with torch.device("meta"):
        again = Tabled(SHAPE)
    onecopy.load_pretrained(again, folder)
    save(plain, Path(folder))
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name)), name
    engine.destroy()


def test_one_rank_has_the_files_pages_and_no_file_changes(tmp_path: Path) -> None:
    save(reference(SHAPE), tmp_path)
    world(1).run(use_pages, str(tmp_path))


LAYERS, WIDTH = 24, 1024


def peak(reset: bool = False) -> int:
    """Bytes of this rank's memory at most since the last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def memory_of_loading(folder: str, through_engine: bool) -> tuple[int, int]:
    """Bytes by which the peak grew, and bytes read, while a model of `LAYERS` matrices was loaded from bfloat16."""

    def loaded(model: nn.Module, name: str) -> onecopy.LoadedWeights:
        engine = onecopy.initialize(model=model, config=configuration(3))[0] if through_engine else None
        found = onecopy.load_pretrained(engine or model, Path(folder) / name)
        if engine is not None:
            engine.destroy()
        return found

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        small = nn.Linear(8, 8)
    loaded(small, "small")
    before = peak(reset=True)
    found = loaded(model, "large")
    return peak() - before, found.bytes_read


@pytest.mark.parametrize("through_engine", [False, True])
def test_a_rank_holds_its_shard_and_one_tensor_and_reads_its_part(tmp_path: Path, through_engine: bool) -> None:
    save(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))),
        tmp_path / "large",
        dtype=torch.bfloat16,
    )
    save(nn.Linear(8, 8), tmp_path / "small")
    matrix = WIDTH * WIDTH * 4
    for grown, read in world(3).run(memory_of_loading, str(tmp_path), through_engine):
        assert grown < LAYERS * matrix / 3 + matrix + (4 << 20), grown / matrix
        assert read <= 2 * LAYERS * 64 * math.ceil(WIDTH * WIDTH / 3 / 64)  # shards begin at a multiple of 64 elements
