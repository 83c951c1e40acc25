"""The folder of a run's checkpoints: tags, `latest`, what is complete, and how a new one takes its place at once.

FOLDER/latest                       the tag of the newest checkpoint
FOLDER/TAG/manifest.json, ...       a complete checkpoint
FOLDER/.saving-TAG-HOST-PID-XXXX/   one being written; left behind by a killed job until the next save clears it
FOLDER/.replaced-TAG-XXXX/          the previous content of a tag that was saved again, until it is deleted
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from onecopy.checkpoint import manifest as manifests
from onecopy.checkpoint.manifest import Manifest
from onecopy.errors import CheckpointError
from onecopy.observe.log import warn

LATEST = "latest"
_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"


def absolute(path: str | os.PathLike[str]) -> Path:
    """A path as a user writes it, made absolute; `~` is the home folder, and links stay links."""
    return Path(os.path.abspath(os.path.expanduser(os.fspath(path))))


def locate(given: str | os.PathLike[str], tag: object = None) -> tuple[Path, str | None]:
    """The folder of checkpoints and the tag that a user means: by the folder, by one checkpoint's own folder, or by a file in it.

    Raises CheckpointError for a file that lies in no checkpoint.
    """
    path = absolute(given)
    if os.path.isfile(path):
        if path.name != LATEST and not os.path.isfile(path.parent / manifests.NAME):
            raise CheckpointError(
                f"{path} is a file and in no checkpoint; give a folder that save_checkpoint wrote into, or load weight files with "
                "onecopy.load_pretrained(engine, folder)"
            )
        path = path.parent
    if tag is None and os.path.isfile(path / manifests.NAME):
        return path.parent, path.name
    return path, None if tag is None else str(tag)


def checked_tag(tag: object) -> str:
    """The tag as text. Raises CheckpointError when it cannot name a folder."""
    text = str(tag)
    if (
        not text
        or text != text.strip()
        or "/" in text
        or os.sep in text
        or "\0" in text
        or text.startswith(".")
        or text == LATEST
    ):
        raise CheckpointError(
            f"the checkpoint tag {text!r} cannot name a folder: use letters, digits, spaces, '-' and '_', "
            f"no '/', no '.' in front, and not '{LATEST}'"
        )
    if len(text.encode()) > 180:
        raise CheckpointError(
            f"the checkpoint tag {text[:40]!r}... is {len(text.encode())} bytes long; 180 is the most"
        )
    return text


def temporary_name(tag: str) -> str:
    """A name for what a save under way writes, which tells whose it is."""
    return f"{_SAVING}{tag}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def tags(folder: Path) -> dict[str, Path]:
    """Every tag folder with a manifest, complete as far as its name tells; what a save under way has put aside counts."""
    found: dict[str, Path] = {}
    aside: dict[str, Path] = {}
    for entry in _folders(folder):
        if not manifests.is_there(entry):
            continue
        if entry.name.startswith(_REPLACED):
            aside[entry.name[len(_REPLACED) :].rsplit("-", 1)[0]] = entry
        elif not entry.name.startswith("."):
            found[entry.name] = entry
    return aside | found


def tags_without_manifest(folder: Path) -> list[str]:
    """Folders that look like tags but hold no complete checkpoint."""
    return sorted(e.name for e in _folders(folder) if not e.name.startswith(".") and not manifests.is_there(e))


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if os.path.isdir(path)]


def _entries(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            yield from sorted(Path(entry.path) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(f"the folder {folder} cannot be read: {error.strerror}") from error


def options(folder: Path, tag: str | None) -> list[tuple[Path, Manifest]]:
    """The checkpoints that may be meant, the best first; there may be none. A tag other than "latest" is the only option.

    Raises CheckpointError when there is no such tag, or it is not complete.
    """
    if tag is None or tag == LATEST:
        return candidates(folder)
    path = tags(folder).get(tag, folder / tag)
    if not os.path.isdir(path):
        raise CheckpointError(f"there is no checkpoint '{tag}' in {folder}; {describe_tags(folder)}")
    if not manifests.is_there(path):
        raise CheckpointError(f"{path} holds no complete checkpoint (it has no manifest); {describe_tags(folder)}")
    try:
        return [(path, Manifest.read(path))]
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {describe_tags(folder)}") from error


def candidates(folder: Path) -> list[tuple[Path, Manifest]]:
    """Checkpoints that a load without a tag may take, the best first: what `latest` names, then from new to old.

    A checkpoint that was completed after `latest` was written (a crash came between) goes before it.
    """
    named, written_at = named_by_latest(folder)
    found = []
    for tag, path in tags(folder).items():
        try:
            manifest = Manifest.read(path)
        except CheckpointError as error:
            warn(f"{error}; it is passed over")
            continue
        if manifest.moves_latest or tag == named:
            found.append((tag == named and manifest.saved_at <= written_at, manifest.saved_at, path, manifest))
    newest_unnamed = [entry for entry in found if not entry[0] and entry[1] > written_at]
    rest = [entry for entry in found if entry not in newest_unnamed]
    newest_unnamed.sort(key=lambda entry: -entry[1])
    rest.sort(key=lambda entry: (not entry[0], -entry[1]))
    return [(path, manifest) for _, _, path, manifest in [*newest_unnamed, *rest]]


def named_by_latest(folder: Path) -> tuple[str | None, int]:
    """The tag `latest` names and when it was written (nanoseconds)."""
    path = folder / LATEST
    try:
        return path.read_text(encoding="utf-8").strip(), path.stat().st_mtime_ns
    except (OSError, UnicodeDecodeError):
        return None, 0


def describe_tags(folder: Path) -> str:
    """A part of a sentence that says which tags there are."""
    if not os.path.isdir(folder):
        return f"{folder} is no folder" if os.path.exists(folder) else f"the folder {folder} does not exist"
    complete, incomplete = sorted(tags(folder)), tags_without_manifest(folder)
    text = f"complete tags in {folder}: {', '.join(complete[:20]) or 'none'}"
    text += f"; without manifest: {', '.join(incomplete[:20])}" if incomplete else ""
    return text + _hint(folder, incomplete, bool(complete))


def _hint(folder: Path, inside: list[str], has_ours: bool) -> str:
    """What a folder seems to hold instead of our checkpoints, and how that gets here."""
    children = [folder / name for name in inside]
    places = [folder, *children]
    if any(_holds(place, "*mp_rank_00_model_states.pt") for place in places):
        return f" (written by DeepSpeed: `onecopy import-deepspeed {folder} OUT` makes it one that loads here)"
    if has_ours:
        return ""
    for place in children:
        if tags(place):
            return f"; there are checkpoints in {place}: give that folder"
    for place in places:
        if _holds(place, "*.safetensors") or _holds(place, "pytorch_model*.bin"):
            return f" ({place} holds weight files: onecopy.load_pretrained(engine, '{place}') loads them)"
        if _holds(place, ".metadata") and not _holds(place, "state.pt"):
            call = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {place} FILE"
            return f" (`{call}` makes one file of {place}, for load_state_dict before onecopy.initialize)"
    return ""


def _holds(place: Path, pattern: str) -> bool:
    return next(place.glob(pattern), None) is not None


# -------------------------------------------------------------------------------------------------------------- saving
def make_folder(path: Path) -> None:
    """Make a folder and its parents. Raises CheckpointError with the cause."""
    try:
        Path(os.path.realpath(path)).mkdir(parents=True, exist_ok=True)  # what a link names may have to be made again
    except OSError as error:
        raise CheckpointError(f"the folder {path} cannot be made: {error.strerror or error}") from error


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a finished checkpoint to its tag; an older one of the same tag gives way in the same moment.

    Another job may put its own in place, or retire one, at any moment in between: so what is there is not looked at
    first, it is met.
    """
    sync_folder(temporary)
    aside: list[Path] = []
    while True:
        try:
            temporary.rename(final)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if final.is_dir() and _exchange(temporary, final):
            aside.append(temporary)
            break
        old = final.with_name(f"{_REPLACED}{final.name}-{secrets.token_hex(4)}")
        try:
            final.rename(old)
            aside.append(old)
        except FileNotFoundError:
            pass
    sync_folder(final.parent)
    for old in aside:
        delete(old)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, where the system can (Linux's renameat2)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here = -100  # AT_FDCWD
    return bool(call(here, os.fsencode(first), here, os.fsencode(second), 2) == 0)  # RENAME_EXCHANGE


def write_latest(folder: Path, tag: str) -> None:
    """Let `latest` name the tag, at once."""
    temporary = folder / temporary_name(LATEST)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / LATEST)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(folder / LATEST)) from error
    sync_folder(folder)


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems cannot, and need not
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a folder, hidden first so that nobody takes a half-deleted one for complete."""
    hidden = path
    if not path.name.startswith((_SAVING, _DELETING)):
        hidden = path.with_name(f"{_DELETING}{path.name.lstrip('.')}-{secrets.token_hex(4)}")
        try:
            path.rename(hidden)
        except FileNotFoundError:  # another job has deleted it meanwhile
            return
    shutil.rmtree(hidden, ignore_errors=True)


def clear_leftovers(folder: Path) -> None:
    """Delete what killed jobs of this host left behind."""
    for entry in _entries(folder):
        name = entry.name
        if name.startswith(_DELETING):
            shutil.rmtree(entry, ignore_errors=True)
        elif name.startswith(_SAVING):
            parts = name.rsplit("-", 3)
            if len(parts) == 4 and parts[1] == _host() and parts[2].isdigit() and not _running(int(parts[2])):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
        elif name.startswith(_REPLACED):
            replacement = folder / name[len(_REPLACED) :].rsplit("-", 1)[0]
            if os.path.isfile(replacement / manifests.NAME):
                shutil.rmtree(entry, ignore_errors=True)


def keep_newest(folder: Path, count: int, just_saved: str) -> list[str]:
    """Delete complete checkpoints beyond the newest `count`; returns the deleted tags.

    The one just saved and the one `latest` names stay. Folders without a manifest are not touched: they are not ours.
    """
    named, _ = named_by_latest(folder)
    ages = []
    for tag, path in tags(folder).items():
        try:
            ages.append((Manifest.read(path).saved_at, tag, path))
        except CheckpointError:
            continue
    ages.sort(reverse=True)
    gone = [(tag, path) for _, tag, path in ages[count:] if tag not in (named, just_saved)]
    for _, path in gone:
        delete(path)
    return [tag for tag, _ in gone]


def _host() -> str:
    return socket.gethostname().replace("-", "_").replace("/", "_")[:40] or "host"


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
