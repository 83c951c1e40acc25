"""What one training run is made of, kept in its folder so that `--resume` needs nothing else."""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError, OneCopyError

RECIPE: dict[str, Any] = {
    "train_batch_size": 12,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 2000, "warmup_num_steps": 100, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
}
"""The configuration without `--config`; with the default shape and steps, nanoGPT's character model for one CPU."""


@dataclass
class Settings:
    """All choices of a run. Lengths are in tokens, `steps` and the `..._every` in optimizer steps."""

    run: str = "runs/train"
    config: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(RECIPE))
    data: str | None = None
    vocabulary: str = "character"
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    bias: bool = False
    tied: bool = True
    steps: int = 2000
    log_every: int = 10
    evaluate_every: int = 250
    evaluation_sequences: int | None = None
    save_every: int = 0
    seed: int = 1337
    prompt: str = "\n"
    sample: int = 400
    temperature: float = 0.8
    top_k: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "log_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise OneCopyError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run)

    def save(self) -> None:
        """Write `settings.json` into the run's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "settings.json").write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, run: str) -> Settings:
        """The settings of an earlier run. Raises OneCopyError when the folder holds none."""
        path = Path(run) / "settings.json"
        if not path.exists():
            above = next((each for each in path.absolute().parents if (each / path.name).exists()), None)
            fix = f"the run is in {above}: give that" if above else "give the folder that an earlier run ended with"
            raise OneCopyError(f"--resume {run}: there is no {path}; {fix}")
        try:
            return cls(**{**json.loads(path.read_text()), "run": run})
        except (ValueError, TypeError) as error:
            raise OneCopyError(f"--resume {run}: {path} cannot be read ({error}); start without --resume") from error


def override(document: dict[str, Any], assignment: str) -> None:
    """Set one key of a configuration in place, from `zero_optimization.stage=2`; the value is JSON, or else a string.

    Blocks on the way are made. Raises ConfigError when there is no "=", or a key on the way holds a plain value.
    """
    path, equals, text = assignment.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {assignment}: write it as KEY.PATH=VALUE, for example zero_optimization.stage=2")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    block = document
    for depth, name in enumerate(names[:-1], start=1):
        block = block.setdefault(name, {})
        if not isinstance(block, dict):
            raise ConfigError(f"--set {assignment}: {'.'.join(names[:depth])} is {block!r}, which has no keys inside")
    block[names[-1]] = value
