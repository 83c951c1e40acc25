"""`load`: from a document in any accepted form to a `Config`, or to one error that names every problem."""

from __future__ import annotations

import dataclasses
import os
import warnings
from dataclasses import dataclass
from typing import Any

from onecopy.config import batch, rules, unknown
from onecopy.config.diagnosis import ConfigWarning, Diagnosis, Finding, error_of
from onecopy.config.document import Config
from onecopy.config.keys import keys_of
from onecopy.config.kinds import Block
from onecopy.config.reading import read_values
from onecopy.config.sources import read_source
from onecopy.config.training_blocks import read_optimizer, read_scheduler
from onecopy.errors import ConfigError

Source = dict[str, Any] | str | os.PathLike[str] | Config


@dataclass(frozen=True, slots=True)
class Examination:
    """What `examine` found; `config` is None when there are problems."""

    config: Config | None
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def load(source: Source, world_size: int | None = None) -> Config:
    """Read, check and resolve a configuration.

    `source` is a dict (kept as `config.source`, never changed), the path of a JSON file, JSON text, URL-safe base64 of
    JSON, or a `Config`. `world_size` is the number of ranks; without it the process group's, else the environment
    variable WORLD_SIZE, else 1. Not a collective.

    Raises one `ConfigError` that names every problem with its key path, value and fix; warns with `ConfigWarning`
    about keys that have no effect.
    """
    if isinstance(source, Config):
        if world_size is None or world_size == source.world_size:
            return source
        source = source.source
    result = examine(source, world_size)
    if result.config is None:
        raise error_of(list(result.problems))
    for text in result.warnings:
        warnings.warn(text, ConfigWarning, stacklevel=2)
    return result.config


def examine(source: Source, world_size: int | None = None) -> Examination:
    """As `load`, but never raises for a bad configuration: problems and findings are returned side by side."""
    diagnosis = Diagnosis()
    config = None
    try:
        document = read_source(source.source if isinstance(source, Config) else source)
    except ConfigError as error:
        diagnosis.problems.append(str(error))
    else:
        config = _read(document, world_size, diagnosis)
        diagnosis.arrange(document)
    findings = diagnosis.findings()
    if diagnosis.problems:
        config = None
    elif config is not None:
        config = dataclasses.replace(config, findings=findings)
    return Examination(config, findings, tuple(diagnosis.problems), tuple(diagnosis.warnings))


def _read(document: dict[str, Any], world_size: int | None, diagnosis: Diagnosis) -> Config:
    """The configuration of a document; when problems are recorded, some of its values are only placeholders."""
    world = batch.find_world_size(world_size, diagnosis)
    values: dict[str, Any] = {}
    plain = {}  # keys read by the schema of Config; the others have readers of their own
    for name, value in document.items():
        if name == "optimizer":
            values["optimizer"] = read_optimizer(value, diagnosis)
        elif name == "scheduler":
            values["scheduler"] = read_scheduler(value, document.get("optimizer"), diagnosis)
        elif name in batch.EFFECTS and (value is None or value == "auto"):
            continue
        else:
            plain[name] = value
    rules.settle_auto_precision(plain, diagnosis)
    values |= _read_plain(plain, diagnosis)
    sizes = {name: values[name] for name in batch.EFFECTS if name in values}
    values |= batch.resolve(document, sizes, world, diagnosis)
    config = Config(source=document, world_size=world.size, world_size_source=world.source, **values)
    return rules.apply(config, diagnosis)


def _read_plain(plain: dict[Any, Any], diagnosis: Diagnosis) -> dict[str, Any]:
    """The values of all keys that the schema of `Config` describes, block by block."""
    values: dict[str, Any] = {}
    blocks = {
        spelling: key for _, key in keys_of(Config) if isinstance(key.kind, Block) for spelling in key.spellings()
    }
    written: dict[str, Any] = {}
    for name, value in plain.items():
        reader = unknown.for_block(blocks[name].name if name in blocks else "", diagnosis)
        if name in blocks:
            value = rules.old_forms(blocks[name].name, value, plain, diagnosis)
            if blocks[name].name in written:
                diagnosis.refuse(name, value, f'is the same key as "{written[blocks[name].name]}"; keep one of the two')
                continue
            written[blocks[name].name] = name
        values |= read_values(Config, {name: value}, "", diagnosis, reader)
    if "zero" in values:
        values["zero"] = rules.with_given(values["zero"], plain["zero_optimization"])
    return values
