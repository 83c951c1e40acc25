"""What a published row says of a run, ready to plan; or, as an `Unknown`, why no plan can be judged by it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from benchmarks.published import document, subject
from benchmarks.shapes import Row, Unknown, number
from onecopy.plan.estimate import Estimator, Setting
from onecopy.plan.hardware import known_like
from onecopy.plan.unseen import GIB

_SPLIT = re.compile(r"\b(tp|pp|cp|sp|mp|ep)\W?(\d+)", re.IGNORECASE)
_FOREIGN = re.compile(r"lora|8-?bit|adafactor|galore|paged|optimizer-in-backward|freez|frozen", re.IGNORECASE)
_UNITS = {"GiB": 2.0**30, "MiB": 2.0**20, "MB": 1e6, "GB": 1e9, "": 1e9}


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        pure: weights, masters and moments are all in 16 bits, which this engine has not.
        peak: bytes, None where it is not published; `level` is what it is of (see `onecopy.plan.unseen`).
        capacity: bytes of one GPU; None where they are not known. fits: whether it ran; None where the row does not say.
    """

    row: Row
    setting: Setting
    ranks: int
    sequence: int
    pure: bool
    peak: float | None
    level: str
    capacity: float | None
    fits: bool | None

    def estimator(self) -> Estimator:
        """Plans it, with what its program did otherwise."""
        own: dict[str, Any] = {"data_types": {"grad_accum_dtype": "bf16"}} if self.pure else {}
        return Estimator(subject(self.row), self.ranks, self.sequence, document(self.row) | own)

    def states_in_16_bits(self, estimator: Estimator) -> int:
        """Bytes that a plan has too much for a pure run: of masters and moments half, of masters all where 16-bit weights are whole."""
        state = estimator.state(self.setting)
        masters = state["masters"] // (2 if self.setting.stage == 3 else 1)
        return masters + state["moments"] // 2 if self.pure else 0


def run_of(row: Row) -> Run:
    """The run of a row. Raises Unknown: it was not data-parallel Adam in 16 bits, or the row does not say enough."""
    if row.get("suspect") == "yes":
        raise Unknown("marked as suspect in the table")
    if re.search(r"layers.*inferred", row.get("notes") or ""):
        raise Unknown("the model's shape is inferred, not stated")
    _check_parallelism(row)
    said = " ".join(row.get(name) or "" for name in ("model", "framework", "precision", "notes"))
    if (row.get("offload") or "none").lower() not in ("none", "no") or _FOREIGN.search(said):
        raise Unknown("offload, frozen weights or an optimizer that is not Adam in full")
    size, ranks, length = (int(number(row, name)) for name in ("micro_batch", "n_gpus", "seq"))
    for name, value in (("micro-batch", size), ("number of GPUs", ranks), ("number of tokens a sample", length)):
        if value < 1:
            raise Unknown(f"the {name} is not stated")
    precision, pure = _precision(row)
    steps = int(number(row, "grad_accum")) or max(1, int(number(row, "global_batch")) // (size * ranks))
    setting = Setting(_stage(row), size, min(2, steps), _recomputed(row), precision)
    peak = number(row, "mem_per_gpu") * _unit(row) or None
    fits = {"yes": True, "no": False}.get((row.get("fits") or "").lower())
    return Run(row, setting, ranks, length, pure, peak, _level(row), _capacity(row), fits)


def _check_parallelism(row: Row) -> None:
    text = row.get("parallelism") or ""
    if any(int(ranks) > 1 for _, ranks in _SPLIT.findall(text)) or re.search(r"\b[345]D\b", text):
        raise Unknown("tensor, pipeline or context parallelism, of which this engine has none")
    if re.search(r"hsdp|hybrid", f"{text} {row.get('zero_stage') or ''}", re.IGNORECASE):
        raise Unknown("hybrid sharding, which this engine has not")


def _stage(row: Row) -> int:
    found = re.match(r"[0-3]", (row.get("zero_stage") or "").strip())
    if found:
        return int(found[0])
    for word, stage in (("FSDP", 3), ("DDP", 0), ("single", 0)):
        if word in (row.get("parallelism") or ""):
            return stage
    raise Unknown("the ZeRO stage is not stated")


def _precision(row: Row) -> tuple[str, bool]:
    """(precision, whether all states are in it). IBM's fms-fsdp trains with FSDP's policy of bf16 for everything."""
    text = (row.get("precision") or "").lower()
    kinds = [kind for kind in ("bf16", "fp16", "fp8", "fp32") if kind in text]
    if len(kinds) != 1 or kinds == ["fp8"]:
        raise Unknown(f"the precision is '{row.get('precision')}': bf16, fp16 and fp32 are planned")
    pure = re.search(r"pure|-true|states", text) is not None or (row.get("source") or "").startswith("IBM")
    return kinds[0], pure and kinds != ["fp32"]


def _recomputed(row: Row) -> str | int:
    text = (row.get("act_ckpt") or "").lower().strip()
    if text == "selective-op" and "torchtitan" in row["framework"]:
        return "none"  # the subject recomputes by itself
    if text == "none" or text.startswith("full"):
        return text[:4]
    every = re.search(r"(?:every|1/|1 in)\s*(\d+)", text)
    if every:
        return int(every[1])
    raise Unknown(f"which activations are computed again is not known ('{row.get('act_ckpt')}')")


def _level(row: Row) -> str:
    """Of an unnamed "peak" the allocator's reserve is assumed."""
    text = (row.get("mem_metric") or "").lower()
    if re.search(r"smi|device|context", text):
        return "device"
    return "allocated" if re.search(r"alloc|lit log", text) else "reserved"  # LitGPT prints max_memory_allocated


def _unit(row: Row) -> float:
    """Bytes; nvidia-smi's "GB" are GiB."""
    return float(GIB) if "smi" in (row.get("mem_metric") or "") else _UNITS.get(row.get("mem_unit") or "", 1e9)


def _capacity(row: Row) -> float | None:
    """Bytes of the GPU, of which drivers keep a little; sizes of 100 GB and more are decimal."""
    stated = number(row, "gpu_mem_gb")
    if stated:
        return stated * (1e9 if stated > 100 else 0.99 * GIB)
    known = known_like((row.get("gpu") or "").replace("-SXM", ""))
    return known.memory if known else None
