"""Machines: what a GPU computes, holds and sends, from measurements carried in `data/` (each with its source).

`data/hardware.csv` and `data/collective_busbw.csv` gather published figures: stas00/ml-engineering, the vTrain artifact's
nccl-tests tables, llm-foundry's benchmark page, NVIDIA's data sheets. A row's own source and confidence stand in it.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from onecopy.errors import PlanError
from onecopy.plan.curves import Point, seconds_between


@dataclass(frozen=True)
class Gpu:
    """One GPU. Rates are per second; bytes are bytes (not GiB); links are per direction and GPU.

    Attributes:
        matmul_fraction: share of the peak that the best matrix multiplication reaches.
        link: inside a node; node_network: all network cards of one node together.
        latency: seconds a hop (fits of nccl-tests: 5.6 us on A100 NVLink, 6.7 us over EFA).
    context, communication: bytes outside the allocator, where they were measured.
    gather, reduce: measured bus bandwidth, in place of the link's; rates: of the time model, in place of the calibrated.
    measured: what else a measurement found, for people.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    matmul_fraction: float
    link: float
    node_network: float
    link_fraction: float = 0.8
    latency: float = 6e-6
    context: float | None = None
    communication: float | None = None
    gather: tuple[Point, ...] = ()
    reduce: tuple[Point, ...] = ()
    rates: Mapping[str, float] | None = None
    measured: Mapping[str, Any] | None = field(default=None, compare=False)
    source: str = ""


@dataclass(frozen=True)
class Machine:
    """So many GPUs, in nodes of so many."""

    gpu: Gpu
    count: int
    per_node: int = 8

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu.name}"

    def transfer_seconds(self, nbytes: float, lane: str = "gather") -> float:
        """Seconds of one all-gather (lane "reduce": reduce-scatter) of a whole buffer of `nbytes` over all GPUs.

        A ring moves (N-1)/N of the buffer through every link, at the bandwidth measured for the size and world. Across
        nodes the node's network cards are shared by its GPUs, of which only the ring's two ends cross, so the slower of
        the link and the network decides.
        """
        n = self.count
        if n == 1:
            return 0.0
        ring = self.gpu.link * self.gpu.link_fraction
        if n <= self.per_node:
            own = self.gpu.reduce if lane == "reduce" else self.gpu.gather
            points = own or _published_inside(self.gpu)
            if points:
                return seconds_between(points, n, nbytes)
            return (n - 1) * self.gpu.latency + nbytes * (n - 1) / n / ring
        rate = min(ring, 0.9 * self.gpu.node_network)
        return _beyond_the_wire(n, nbytes) + nbytes * (n - 1) / n / rate

    def share_of_link(self, nbytes: float, seconds: float) -> float:
        """What part of a link's rate inside a node a collective of `nbytes` takes that lasts `seconds`, at most 1."""
        ring = self.gpu.link * self.gpu.link_fraction
        return min(1.0, nbytes * (self.count - 1) / self.count / seconds / ring) if seconds and ring else 0.0


def _published_inside(gpu: Gpu) -> tuple[Point, ...]:
    """Bus bandwidth inside a node of this kind of GPU, from nccl-tests' all-reduce; () where nobody published it.

    An all-gather of the same ring has the same bus bandwidth, except where switches add (NVLS): gathers and
    reduce-scatters then stay at the ring's rate, which is the cap.
    """
    kind = gpu.name.split("-")[0]
    curves = published_curves()
    points = curves.get((_SAME_LINK.get(kind, kind), "inside"))
    if points is None or len(points) < MANY or "PCIe" in gpu.name:  # one large message does not make a curve
        return ()
    cap = gpu.link * gpu.link_fraction if kind in ("H100", "H200", "B200") else math.inf
    return tuple((ranks, nbytes, min(rate, cap)) for ranks, nbytes, rate in points)


def _beyond_the_wire(ranks: int, nbytes: float) -> float:
    """Seconds that a collective across nodes takes beyond bytes over bandwidth: measured on 32 GPUs in four nodes.

    More nodes add hops; NCCL's trees and chunked rings hide most of them, so that it grows with the ranks' logarithm.
    """
    points = published_curves()["B200", "across"]
    best = max(rate for _, _, rate in points)
    (measured,) = {world for world, _, _ in points}
    part = nbytes * (measured - 1) / measured
    excess = seconds_between(points, measured, nbytes) - part / best
    return max(0.0, excess) * math.log2(ranks) / math.log2(measured)


_SAME_LINK = {"H100": "H200"}
MANY = 8  # points


@cache
def published_curves() -> dict[tuple[str, str], tuple[Point, ...]]:
    """The table's points by (kind of GPU, "inside" one node or "across" nodes); of two sources for a size the first counts."""
    text = resources.files("onecopy.plan").joinpath("data/collective_busbw.csv").read_text(encoding="utf-8")
    found: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for row in csv.DictReader(text.splitlines()):
        if row["bytes"] and row["collective"] == "all_reduce":
            place = "inside" if row["scope"].startswith("1 node") else "across"
            curve = found.setdefault((row["gpu"].split("-")[0], place), {})
            curve.setdefault((int(row["n_gpus"]), int(row["bytes"])), float(row["busbw_GBps"]) * 1e9)
    return {key: tuple((n, size, rate) for (n, size), rate in curve.items()) for key, curve in found.items()}


_ALIASES = {
    "a100": "A100-SXM-80GB", "a100-80gb": "A100-SXM-80GB", "a100-40gb": "A100-SXM-40GB", "a100-pcie": "A100-PCIe-80GB",
    "h100": "H100-SXM-80GB", "h100-80gb": "H100-SXM-80GB", "h100-pcie": "H100-PCIe-80GB", "h200": "H200-SXM-141GB",
    "b200": "B200-SXM-180GB", "v100": "V100-SXM-32GB", "v100-32gb": "V100-SXM-32GB", "l40s": "L40S-48GB", "a10g": "A10G-24GB",
    "rtx3090": "RTX3090-24GB", "rtx4090": "RTX4090-24GB", "rtx5090": "RTX5090-32GB", "mi300x": "MI300X-192GB",
}  # fmt: skip


@cache
def known_gpus() -> dict[str, Gpu]:
    """Every GPU of the table by its lower-case name."""
    text = resources.files("onecopy.plan").joinpath("data/hardware.csv").read_text(encoding="utf-8")
    found = {}
    for row in csv.DictReader(text.splitlines()):
        network = row["nic_node_gbps_per_dir"].split("-")[-1]
        peak = float(row["peak_bf16_tflops_dense"] or row["peak_fp16_tflops_dense"])
        found[row["gpu"].lower()] = Gpu(
            name=row["gpu"],
            memory=float(row["hbm_gb"]) * 1e9
            if row["hbm_gb"] not in ("80", "40", "32", "24", "48")
            else float(row["hbm_gb"]) * 2**30 * 0.99,
            bandwidth=float(row["hbm_gbps"]) * 1e9,
            flops=peak * 1e12,
            matmul_fraction=float(row["matmul_frac"] or 0.75),
            link=float(row["intra_gbps_per_dir_per_gpu"]) * 1e9,
            node_network=float(network) * 1e9,
            link_fraction=min(0.8, float(row["link_frac"] or 0.6)),
            source=row["sources"],
        )
    return found


def machine(text: str, per_node: int = 8, file: str | Path | None = None) -> Machine:
    """The machine that "8xA100-80GB" means.

    Args:
        file: a TOML file of the user's own GPUs: `[NAME]` tables with `Gpu`'s fields (memory and rates in plain units).

    Raises:
        PlanError: no count, or an unknown GPU; says the nearest names.
    """
    match = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\S+)\s*", text)
    count, name = (int(match[1]), match[2]) if match else (1, text.strip())
    if count < 1:
        raise PlanError(f"--gpus {text}: the count must be at least 1")
    gpus = dict(known_gpus())
    if file is not None:
        gpus |= _own_gpus(Path(file))
    wanted = name.lower()
    found = gpus.get(wanted) or gpus.get(_ALIASES.get(wanted, "").lower())
    if found is None:
        names = [*_ALIASES, *gpus]
        turned = re.fullmatch(r"(\S+?)[xX*](\d+)", name)
        if turned or wanted.isdigit():
            right = f"{turned[2]}x{turned[1]}" if turned else f"{wanted}xH100"
            raise PlanError(f"--gpus {text}: write the count first, then the kind, as in {right}")
        near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3)
        raise PlanError(
            f"GPU '{name}' is not known; nearest: {', '.join(near) or ', '.join(gpus)}; add your own with --hardware FILE.toml"
        )
    if count > 1 and not (found.link or found.gather):
        raise PlanError(
            f"GPU '{found.name}' has no link, so {count} of them cannot be planned; give link (bytes/s) in {found.source}"
        )
    if count > per_node and not found.node_network:
        raise PlanError(
            f"GPU '{found.name}' has no node_network, so {count} of them in nodes of {per_node} cannot be planned; "
            f"give node_network (bytes/s of all network cards of one node) in {found.source}"
        )
    return Machine(found, count, per_node)


def known_like(device: str) -> Gpu | None:
    """The GPU of the table that a device's own name ("NVIDIA-H100-80GB-HBM3") stands for, if it is one."""
    words = re.split(r"[-\s]", device.lower())
    gpus = known_gpus()
    exact = f"{words[1]}-pcie" if len(words) > 1 and "pcie" in words else ""
    for word in (exact, *words):
        if word in _ALIASES:
            return gpus[_ALIASES[word].lower()]
    return None


def _own_gpus(path: Path) -> dict[str, Gpu]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path} cannot be read as TOML: {error}") from None
    names = {field.name for field in fields(Gpu)}
    own = {}
    for name, table in tables.items():
        for key in table:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=2)
                raise PlanError(
                    f"{path}: [{name}] has the unknown key '{key}'; nearest: {', '.join(near) or ', '.join(sorted(names))}"
                )
        try:
            lanes = {
                lane: tuple(tuple(point) for point in table[lane]) for lane in ("gather", "reduce") if lane in table
            }
            own[name.lower()] = replace(known_gpus()["a100-sxm-80gb"], name=name, source=str(path), **(table | lanes))
        except TypeError as error:
            raise PlanError(f"{path}: [{name}] {error}") from None
    return own
