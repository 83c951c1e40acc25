"""A model whose layers are split over model-parallel ranks: each of these saves its part into a folder of its own.

`save_dir/mp_rank_00/TAG`, `save_dir/mp_rank_01/TAG`, ...: each part is a checkpoint like any other, which loads at every
stage and number of data-parallel ranks. A training state is all parts of one tag, so ranks agree on a tag before they load.
"""

from __future__ import annotations

import os
from pathlib import Path

from onecopy.checkpoint import folder
from onecopy.comm.model_parallel import ModelParallel
from onecopy.errors import CheckpointError


def part_folder(ranks: ModelParallel | None, directory: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Where this rank's part lies; the folder itself where the model is not split."""
    return directory if ranks is None else os.path.join(os.fspath(directory), f"mp_rank_{ranks.rank:02d}")


def common_tag(ranks: ModelParallel | None, part: str | os.PathLike[str], tag: object) -> object:
    """The tag to load: `tag`, or the newest one that is complete in every part. Collective over the model-parallel ranks.

    Raises:
        CheckpointError: parts have complete checkpoints, but none of the same tag.
    """
    if ranks is None or tag not in (None, folder.LATEST):
        return tag
    place = Path(os.path.abspath(os.path.expanduser(os.fspath(part))))
    found = [path.name for path, _ in folder.candidates(place)] if place.is_dir() else []
    everyone = ranks.exchange(found)
    common = [name for name in everyone[0] if all(name in names for names in everyone)]
    if common:
        return common[0]
    if any(everyone):
        raise CheckpointError(
            f"no checkpoint in {place.parent} is complete in every part (mp_rank_00 to mp_rank_{ranks.world_size - 1:02d}); "
            "the model-parallel ranks saved different tags, or some of their folders are missing"
        )
    return tag
