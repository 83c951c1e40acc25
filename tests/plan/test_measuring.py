"""A measured machine is one that plans accept: sizes, rates and curves go through the file unharmed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onecopy.cli.main import main
from onecopy.errors import PlanError
from onecopy.plan.curves import seconds_between
from onecopy.plan.hardware import known_like, machine
from onecopy.plan.machine_file import fit_matmuls, machine_table
from onecopy.plan.measuring import Effort, Measured, measure
from onecopy.plan.timing import rates_for
from tests.worlds import world


def measured_here() -> Measured:
    return measure(torch.device("cpu"), Effort.of(torch.device("cpu"), quick=True))


def test_two_ranks_measure_a_machine_that_plans_accept(tmp_path: Path) -> None:
    first, second = world(2).run(measured_here)
    assert first.gathers == second.gathers and first.matmuls == second.matmuls  # the slowest rank's time, on all
    file = tmp_path / "my.toml"
    file.write_text(machine_table(first, "my box"))
    where = machine("2xmy-box", file=file)
    assert where.gpu.memory == first.memory and where.gpu.flops >= first.best("bf16") > 0
    for _, size, rate in first.gathers:
        assert where.transfer_seconds(size) == pytest.approx(size / 2 / rate, rel=1e-3) or size < first.gathers[-1][1]
    assert 0 < rates_for(where.gpu).matmul <= 1
    with pytest.raises(PlanError, match="node_network"):
        machine("16xmy-box", file=file)


def test_the_command_prints_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure-hardware", "--quick"]) == 0
    printed = capsys.readouterr()
    assert "[CPU.rates]" in printed.out and "TFLOP/s" in printed.err
    assert main(["measure-hardware", "--nproc", "-1"]) == 1


def test_rates_are_fitted_to_a_curve() -> None:
    rate, half = fit_matmuls([(width, 7e14 * width / (width + 300)) for width in (256, 1024, 8192)])
    assert rate == pytest.approx(7e14) and half == pytest.approx(300)
    rate, half = fit_matmuls([(32, 1e9), (64, 4e9)])  # no limit in sight
    assert rate == pytest.approx(4.4e9) and half > 0


def test_between_points() -> None:
    points = ((2, 1000, 10.0), (2, 4000, 20.0), (4, 1000, 5.0))
    assert seconds_between(points, 2, 1000) == pytest.approx(50)
    assert 50 < seconds_between(points, 2, 2000) < 100
    assert seconds_between(points, 2, 8000) == pytest.approx(200)
    assert seconds_between(points, 2, 1) == pytest.approx(50)
    assert 50 < seconds_between(points, 3, 1000) < 150
    assert seconds_between(points, 8, 1000) == pytest.approx(1000 * 7 / 8 / 5)
    falling = ((2, 10, 0.01), (2, 100, 10.0))  # the first entry of a table was warm-up
    assert seconds_between(falling, 2, 10) == seconds_between(falling, 2, 100)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA-H200", "H200-SXM-141GB"), ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("NVIDIA-H100-PCIe", "H100-PCIe-80GB"),
        ("NVIDIA-A100-SXM4-80GB", "A100-SXM-80GB"), ("CPU", None),
    ],
)  # fmt: skip
def test_devices_by_their_own_names(device: str, name: str | None) -> None:
    found = known_like(device)
    assert (found.name if found else None) == name
