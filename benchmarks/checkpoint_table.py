"""The table of the checkpoint benchmark: each time beside another engine's, their ratio, and the ratio wanted."""

from __future__ import annotations

from pathlib import Path


def report(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """The lines of the table: what, ours, other, ratio, wanted."""
    ours = found["ours"]
    best = {name: {key: min(values) for key, values in result.items() if values} for name, result in found.items()}
    mine = best["ours"]
    rows = [("save, against torch.save with fsync", mine["save"], mine["torch.save"], "at most 1.11")]
    rows += [("save, against torch.save without fsync", mine["save"], mine["torch.save, no fsync"], "")]
    rows += [("asynchronous save stalls, against copying", mine["async"], mine["copy"], "at most 1.2")]
    if "dcp" in best:
        rows += [("save, against DCP with FSDP2", mine["save"], best["dcp"]["save"], "at most 1")]
        rows += [("load, against DCP with FSDP2", mine["load"], best["dcp"]["load"], "")]
    if "deepspeed" in best:
        rows += [("save, against DeepSpeed (no fsync)", mine["save"], best["deepspeed"]["save"], "")]
        rows += [("load, against DeepSpeed", mine["load"], best["deepspeed"]["load"], "")]
    lines = ["| what | onecopy, s | other, s | ratio | wanted |", "|---|---|---|---|---|"]
    lines += [f"| {what} | {a:.2f} | {b:.2f} | {a / b:.2f} | {wanted} |" for what, a, b, wanted in rows]
    if "export deepspeed" in best:
        a, b = best["export ours"], best["export deepspeed"]
        for what, key, unit, wanted in (
            ("fp32 export with fsync, against zero_to_fp32", "seconds", 1.0, 0.5),
            ("its extra memory, MB", "peak", 1e6, 0.25),
        ):
            mine_now, theirs = a[key] / unit, b[key] / unit
            lines.append(f"| {what} | {mine_now:.2f} | {theirs:.2f} | {mine_now / theirs:.2f} | at most {wanted} |")
    if "elsewhere" in best:
        a, b = best["elsewhere"]["load peak"], best["elsewhere"]["training peak"]
        lines.append(
            f"| peak memory of a resume on 3 ranks against a step's, MB | {a / 1e6:.0f} | {b / 1e6:.0f} | {a / b:.2f} | at most 1.2 |"
        )
    return [
        f"{ours['bytes'][0] * 2 / 1e9:.2f} GB of state on two ranks, saved at {ours['bytes'][0] * 2 / 1e9 / mine['save']:.2f} GB/s; "
        f"CPU time a rank: save {mine['save, CPU']:.2f} s, torch.save {mine['torch.save, CPU']:.2f} s",
        "",
        *lines,
    ]


def disk_of(folder: Path) -> str:
    """The kind of file system and device that a folder lies on."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    _, device, kind = max((len(at), device, kind) for device, at, kind in mounts if folder.resolve().is_relative_to(at))
    return f"{kind} on {device}"
