"""What training should give: plain torch on all ranks' batches in one process, next to the engine on real ranks.

`expected(case, world_size)` runs the reference, `trained(case)` the engine on this rank; both give a `Run` to compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import onecopy
from tests.zoo import Shape, Zoo, batch, loss_of

LOW = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Case:
    """One training run.

    Attributes:
        windows: micro-batches of each optimizer step; the engine is told the boundary when they are not all equal.
        groups: "one", "decay" (matrices decay and learn faster, the rest do not) or "each" (a group a parameter).
        client: the optimizer is built by the caller instead of the configuration.
        zero: further keys of `zero_optimization`; `config`: further keys of the configuration.
    """

    shape: Shape = field(default_factory=Shape)
    stage: int = 3
    optimizer: str = "AdamW"
    params: dict[str, Any] = field(default_factory=lambda: {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3})
    groups: str = "one"
    client: bool = False
    precision: str = "fp32"
    clip: float = 0.0
    windows: tuple[int, ...] = (1, 1, 1)
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def accumulation(self) -> int:
        return max(self.windows)

    def document(self) -> dict[str, Any]:
        """The configuration as a user would write it."""
        document: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
            **self.config,
        }
        if not self.client:
            document["optimizer"] = {"type": self.optimizer, "params": self.params}
        if self.precision == "bf16":
            document["bf16"] = {"enabled": True}
        elif self.precision == "fp16":
            document["fp16"] = {"enabled": True, "loss_scale": 128.0}
        return document

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)


@dataclass
class Run:
    """What a run left: floats by step, full weights by name, and what the counters said."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    final_loss: float = 0.0
    fingerprint: str = ""
    skipped: int = 0
    steps: int = 0
    rates: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    residue: list[str] = field(default_factory=list)


def groups_of(case: Case, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """The optimizer groups of a case over these parameters."""
    if case.groups == "one":
        return [{"params": [parameter for _, parameter in named]}]
    if case.groups == "each":
        return [{"params": [parameter]} for _, parameter in named]
    lr = case.params["lr"]
    matrices = {"params": [p for n, p in named if is_matrix(n)], "lr": 2 * lr, "weight_decay": 0.3}
    vectors = {"params": [p for n, p in named if not is_matrix(n)], "weight_decay": 0.0}
    return [group for group in (matrices, vectors) if group["params"]]


def is_matrix(name: str) -> bool:
    return name.endswith("weight")


def make_optimizer(case: Case, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, case.optimizer)(groups, **case.params, **options)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------ the reference
class PlainTraining:
    """fp32 masters by name, a copy of the model in the compute dtype, torch's own single-tensor optimizer."""

    def __init__(self, case: Case, world_size: int) -> None:
        self.case, self.world_size = case, world_size
        self.model = Zoo(case.shape)
        given = dict(self.model.named_parameters())
        high = (torch.float32, torch.float64)
        exact = {n: p.dtype if p.dtype in high else torch.float32 for n, p in given.items()}
        self.masters = {n: p.detach().to(exact[n]).clone() for n, p in given.items()}
        low = LOW[case.precision]
        if low is not None:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(low)
        self.trained = [(n, nn.Parameter(self.masters[n])) for n, p in given.items() if p.requires_grad]
        self.optimizer = make_optimizer(case, groups_of(case, self.trained), foreach=False)

    def load_weights(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])

    def window(self, number: int, count: int) -> tuple[list[float], float]:
        """One optimizer step; the losses by micro-batch (mean over ranks) and the norm before clipping."""
        self.load_weights()
        sums: dict[str, torch.Tensor] = {}
        losses = []
        for micro in range(count):
            total = 0.0
            for rank in range(self.world_size):
                x, target = batch(self.case.shape, number, micro, rank)
                loss = loss_of(self.model(x, micro, rank), target)
                loss.backward()
                total += float(loss.detach()) / self.world_size
                for name, parameter in self.model.named_parameters():
                    if parameter.grad is not None:
                        exact = parameter.grad.to(self.masters[name].dtype)
                        sums[name] = sums[name] + exact if name in sums else exact
                        parameter.grad = None
            losses.append(total)
        for name, master in self.trained:
            master.grad = sums[name] / (count * self.world_size) if name in sums else None
        given = [master.grad for _, master in self.trained if master.grad is not None]
        norm = float(torch.stack([g.double().norm() for g in given]).norm()) if given else 0.0
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_([master for _, master in self.trained], self.case.clip, foreach=False)
        self.optimizer.step()
        return losses, norm

    def final_loss(self) -> float:
        self.load_weights()
        x, target = batch(self.case.shape, 99, 0, 0)
        with torch.no_grad():
            return float(loss_of(self.model(x, 0, 0), target))


def expected(case: Case, world_size: int) -> Run:
    """Train the case in one process of plain torch."""
    training = PlainTraining(case, world_size)
    losses, norms = [], []
    for number, count in enumerate(case.windows):
        window_losses, norm = training.window(number, count)
        losses += window_losses
        norms.append(norm)
    weights = {name: master.detach().clone() for name, master in training.masters.items()}
    return Run(losses, norms, weights, training.final_loss(), steps=len(case.windows))


# --------------------------------------------------------------------------------------------------------- the engine
def started(case: Case, model: nn.Module | None = None, **arguments: Any) -> tuple[Any, Any]:
    """An engine for the case on this rank, and its optimizer."""
    model = model if model is not None else Zoo(case.shape)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if case.client:
        arguments.setdefault("optimizer", make_optimizer(case, groups_of(case, trained)))
    elif case.groups != "one":
        arguments.setdefault("model_parameters", groups_of(case, trained))
    engine, optimizer, _, _ = onecopy.initialize(model=model, config=case.document(), **arguments)
    return engine, optimizer


def full_masters(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter's exact weights by name: masters where trained, else the weights themselves. Collective."""
    found: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        unit.finish_refresh()
        for flat in unit.buffers:
            local = flat.master if flat.master is not None else flat.shard if flat.shard is not None else flat.whole
            whole = local.detach()
            if local.numel() != flat.numel:
                whole = torch.cat(engine.communicator.exchange(whole.cpu(), "masters"))
            for name, view in zip(flat.names, flat.views(whole.cpu()), strict=True):
                found[name] = view.clone()
    for name, parameter in engine.module.named_parameters():
        if name not in found:
            found[name] = parameter.detach().cpu().clone()
    return found


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of all bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def residue_of(engine: Any) -> list[str]:
    """What should not be left after a step: gathered parameters, pins, gradients, unfinished calls."""
    left = [f"{unit.name} is gathered" for unit in engine.units if unit.slot is not None]
    left += [f"{slot.name} is pinned" for slot in engine.runtime.slots.slots if slot.pins]
    left += [f"{name} has a gradient" for name, p in engine.module.named_parameters() if p.grad is not None]
    left += [f"{unit.name} awaits a backward" for unit in engine.units if unit.outstanding]
    left += [f"{g.flat.label} keeps its gradients' memory" for g in engine.gradients.all if g.pending_views]
    return left


def windows_of(case: Case, engine: Any) -> Iterator[tuple[int, int]]:
    """(window, micro-batch) of a whole run; says the boundary where the windows are uneven."""
    uneven = len(set(case.windows)) > 1
    for number, count in enumerate(case.windows):
        for micro in range(count):
            if uneven:
                engine.set_gradient_accumulation_boundary(micro == count - 1)
            yield number, micro


def mean_over_ranks(engine: Any, value: torch.Tensor) -> float:
    total = engine.communicator.sum_vector(value.detach().double().reshape(1), "loss")
    return float(total) / engine.communicator.world_size


def trained(case: Case, engine: Any = None) -> Run:
    """Train the case with the engine on this rank. Collective."""
    if engine is None:
        engine, _ = started(case)
    rank = engine.communicator.rank
    run = Run([], [], {})
    for number, micro in windows_of(case, engine):
        x, target = (tensor.to(engine.device) for tensor in batch(case.shape, number, micro, rank))
        loss = loss_of(engine(x, micro, rank), target)
        engine.backward(loss)
        before = engine.global_steps
        engine.step()
        if engine.global_steps > before:
            run.norms.append(engine.get_global_grad_norm())
            run.residue += residue_of(engine)
            run.bytes_sent.append(engine.communication()["bytes_sent"])
            run.collectives.append(engine.communication()["collectives"])
            run.rates.append(engine.get_lr()[0])
        run.losses.append(mean_over_ranks(engine, loss))
    x, target = (tensor.to(engine.device) for tensor in batch(case.shape, 99, 0, 0))
    with torch.no_grad():
        run.final_loss = float(loss_of(engine(x, 0, 0), target))
    run.weights = full_masters(engine)
    live = {f"live {n}": p.detach() for n, p in engine.module.named_parameters() if type(p) is nn.Parameter}
    run.fingerprint = fingerprint({**live, **run.weights, **dict(engine.module.named_buffers())})
    run.fingerprint += repr((engine.get_lr(), engine.global_steps, engine.micro_steps, engine.skipped_steps, run.norms))
    run.skipped, run.steps = engine.skipped_steps, engine.global_steps
    engine.destroy()
    return run


def train_all(cases: list[Case]) -> list[Run]:
    """Train several cases one after the other on this rank, so that a test pays for one message only. Collective."""
    return [trained(case) for case in cases]


# -------------------------------------------------------------------------------------------------------- comparisons
TOLERANCE = {"fp32": (2e-5, 2e-6), "bf16": (2e-2, 5e-3), "fp16": (5e-3, 1e-3)}  # relative, absolute


def assert_like(got: Run, want: Run, case: Case) -> None:
    """The engine's run is the reference's, to reduction order (fp32) or to the dtype's tolerance."""
    low_wire = "bfloat16" in case.shape.blocks and case.precision == "fp32" and case.accumulation > 1
    relative, absolute = TOLERANCE["bf16" if low_wire else case.precision]  # sums of bf16 gradients travel in bf16

    def close(one: Any, other: Any, what: str) -> None:
        text = f"of {case}"
        torch.testing.assert_close(one, other, rtol=relative, atol=absolute, msg=lambda m: f"{what}: {m}\n{text}")

    close(got.losses, want.losses, "losses")
    close(got.norms, want.norms, "norms")
    assert got.weights.keys() == want.weights.keys(), case
    for name, weight in want.weights.items():
        assert got.weights[name].shape == weight.shape, f"shape of {name}: {case}"
        close(got.weights[name].to(weight.dtype), weight, f"weights of {name}")
    close(got.final_loss, want.final_loss, "final loss")
    assert got.steps == want.steps and got.skipped == 0, case


def assert_same_bits(first: Run, second: Run, about: object = "") -> None:
    """Two runs of the engine left the same bits."""
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), f"weights of {name} differ {about}"
    assert first.losses == second.losses and first.norms == second.norms, about


def assert_ranks_agree(runs: list[Run], about: object = "") -> None:
    """All ranks hold the same weights, buffers, rates and counters, and none of them kept anything it should not."""
    assert len({run.fingerprint for run in runs}) == 1, f"ranks differ {about}"
    for rank, run in enumerate(runs):
        assert not run.residue, f"left after a step on rank {rank}: {run.residue} {about}"


# --------------------------------------------------------------------------------------------- free-form training loops
Losses = Callable[[Any, int, int], Iterator[torch.Tensor]]
# With torch's epsilon, Adam magnifies the rounding of a gradient that is nearly zero by lr / eps.
ADAMW = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "eps": 0.1}}


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    """The shortest useful configuration of a stage, unclipped, with `more` keys."""
    base = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "optimizer": ADAMW}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {**base, "zero_optimization": zero, **more}


def plain_weights(
    build: Callable[[], nn.Module], losses: Losses, world_size: int, steps: int = 3, micros: int = 1, clip: float = 0.0
) -> dict[str, torch.Tensor]:
    """What one process of plain torch gives: the mean over `micros` micro-batches and ranks of all losses' gradients."""
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW["params"], foreach=False)
    for step in range(steps):
        for micro in range(micros):
            for rank in range(world_size):
                for loss in losses(model, step * micros + micro, rank):
                    (loss / (world_size * micros)).backward(retain_graph=True)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_weights(
    engine: Any, wanted: dict[str, torch.Tensor], relative: float = 2e-5, absolute: float = 2e-6
) -> None:
    """The engine's full masters are these. Collective."""
    got = full_masters(engine)
    assert got.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(
            got[name].to(weight.dtype),
            weight,
            rtol=relative,
            atol=absolute,
            msg=lambda m, n=name: f"weights of {n}: {m}",
        )


def check_loop(
    build: Callable[[], nn.Module],
    losses: Losses,
    stage: int,
    steps: int = 3,
    micros: int = 1,
    backward: str = "engine",
    tolerance: tuple[float, float] = (2e-5, 2e-6),
    keep_graph: bool = False,
    **more: Any,
) -> None:
    """Train `losses(model, micro_batch, rank)` with the engine on this rank and compare the weights with plain torch's.

    `backward` is "engine" (`engine.backward(loss)`) or "plain" (`loss.backward()`). Collective.
    """
    engine, _, _, _ = onecopy.initialize(
        model=build(), config=configuration(stage, gradient_accumulation_steps=micros, **more)
    )
    rank, size = engine.communicator.rank, engine.communicator.world_size
    for step in range(steps):
        for micro in range(micros):
            for loss in losses(engine, step * micros + micro, rank):
                if backward == "engine":
                    engine.backward(loss, retain_graph=keep_graph)
                else:
                    loss.backward(retain_graph=keep_graph)
            engine.step()
        left = residue_of(engine)
        assert not left, left
    assert engine.global_steps == steps and engine.skipped_steps == 0
    wanted = plain_weights(build, losses, size, steps, micros, more.get("gradient_clipping", 0.0))
    assert_weights(engine, wanted, *tolerance)
    engine.destroy()
