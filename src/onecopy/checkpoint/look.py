"""Look at checkpoints from outside: tables of what is there, and whether every byte is as it was written."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onecopy.checkpoint import folder
from onecopy.checkpoint.manifest import Manifest
from onecopy.errors import CheckpointError


def _found(directory: str | os.PathLike[str], tag: str | None) -> tuple[list[tuple[str, Path]], list[str]]:
    """(tag, folder) of the checkpoints meant, by name, and the folders beside them that hold none.

    Raises CheckpointError when there is none.
    """
    home, wanted = folder.locate(directory, tag)
    tags = folder.tags(home)
    if wanted is None and tags:
        return list(tags.items()), folder.tags_without_manifest(home)
    if wanted in tags:
        return [(str(wanted), tags[str(wanted)])], []
    options = folder.options(home, wanted)
    if not options:
        raise CheckpointError(f"there is no complete checkpoint in {home}; {folder.describe_tags(home)}")
    return [(options[0][0].name, options[0][0])], []


def show(directory: str | os.PathLike[str], tag: str | None = None) -> int:
    """Print the checkpoints of a folder as a table, or one checkpoint's tensors; 1 when something is incomplete."""
    found, others = _found(directory, tag)
    console = Console(width=None if sys.stdout.isatty() else 160)
    manifests: list[tuple[str, Path, Manifest | None, str]] = []
    for name, path in found:
        try:
            manifests.append((name, path, Manifest.read(path), ""))
        except CheckpointError as error:
            manifests.append((name, path, None, str(error)))
    home = found[0][1].parent
    console.print(_checkpoints(manifests, home))
    for name in others:
        console.print(f"'{name}' holds no complete checkpoint (no manifest)", style="red", highlight=False)
    if len(found) == 1 and manifests[0][2] is not None:
        console.print(_tensors(manifests[0][2]))
    return 1 if any(manifest is None or _missing(path, manifest) for _, path, manifest, _ in manifests) else 0


def _checkpoints(manifests: list[tuple[str, Path, Manifest | None, str]], home: Path) -> Table:
    named, _ = folder.named_by_latest(home)
    table = Table(title=str(home), title_justify="left")
    for heading in ("tag", "step", "samples", "stage", "ranks", "precision", "weights", "size", "saved", "files"):
        table.add_column(heading, justify="right" if heading in ("step", "samples", "weights", "size") else "left")
    for name, path, manifest, problem in sorted(manifests, key=lambda item: item[2].saved_at if item[2] else 0):
        shown = f"{name} (latest)" if name == named else name
        if manifest is None:
            table.add_row(shown, *[""] * 8, problem.split(": ", 1)[-1])
            continue
        missing = _missing(path, manifest)
        weights = sum(_numel(entry.shape) for entry in manifest.model.values() if entry.kind != "buffer")
        table.add_row(
            shown, f"{manifest.global_steps:,}", f"{manifest.global_samples:,}", str(manifest.stage),
            str(manifest.world_size), manifest.precision, f"{weights:,}", size_text(manifest.nbytes),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at / 1e9)),
            f"incomplete: {', '.join(missing[:3])}" if missing else f"{len(manifest.files)}, complete",
        )  # fmt: skip
    return table


def _tensors(manifest: Manifest) -> Table:
    table = Table(title=f"checkpoint '{manifest.tag}'", title_justify="left")
    for heading in ("name", "kind", "shape", "computed in", "stored", "optimizer state", "other names"):
        table.add_column(heading, overflow="fold")
    states = manifest.state_keys()
    for name, entry in manifest.model.items():
        stored = manifest.tensors.get(f"model.{name}")
        kept = str(stored.dtype).removeprefix("torch.") if stored else "empty"
        shape = " x ".join(map(str, entry.shape)) or "one number"
        table.add_row(
            name,
            entry.kind,
            shape,
            entry.dtype,
            kept,
            ", ".join(sorted(states.get(name, ()))),
            ", ".join(entry.aliases),
        )
    return table


def verify(directory: str | os.PathLike[str], tag: str | None = None) -> int:
    """Compare every byte with the checksums and print what is wrong; 1 when something is."""
    bad = 0
    found, others = _found(directory, tag)
    for name, path in found:
        try:
            manifest = Manifest.read(path)
            problems = manifest.problems(path)
        except CheckpointError as error:
            manifest, problems = None, [str(error)]
        bad += bool(problems)
        if manifest is not None and not problems:
            print(f"{name}: {len(manifest.files)} files, {size_text(manifest.nbytes)}, every checksum is right")
        for problem in problems:
            print(f"{name}: {problem}")
    for name in others:
        print(f"{name}: no complete checkpoint (no manifest)")
        bad += 1
    return 1 if bad else 0


def _missing(path: Path, manifest: Manifest) -> list[str]:
    """Files that are not there or not of their size."""
    found = []
    for name, entry in manifest.files.items():
        try:
            if (path / name).stat().st_size != entry.nbytes:
                found.append(name)
        except OSError:
            found.append(name)
    return found


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def size_text(nbytes: float) -> str:
    """Bytes as people read them: "1.5 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:,.0f} {unit}" if unit == "bytes" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"
