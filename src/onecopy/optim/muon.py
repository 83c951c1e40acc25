"""Muon: momentum whose matrices are orthogonalised (Jordan et al., 2024), with AdamW for all that is no hidden matrix.

On shards the momentum stays in pieces. Each rank orthogonalises whole matrices, its share of them, so the work is done
once and not once a rank; the pieces travel in bf16, which is what the iteration computes in.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.optim.adam import adam

from onecopy.comm import Communicator
from onecopy.errors import ModelError
from onecopy.optim.across_shards import AcrossShards
from onecopy.optim.lion import check_rates, loss_of
from onecopy.optim.masters import Masters
from onecopy.optim.whole_matrices import Matrix, matrices_of, on_owners, rounds_of

_DTYPE = torch.bfloat16  # of the iteration, as in torch.optim.Muon
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPSILON = 1e-7
MATRIX_KEYS: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0}
OTHER_KEYS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "adam_w_mode": True}


class Muon(AcrossShards):
    """Groups with `use_muon` true are matrices; the others are stepped by AdamW, which is also what a missing key means.

    Matrices take `lr` (0.02), `momentum` (0.95), `nesterov` (True) and `weight_decay` (0); the others `lr` (3e-4), `betas`
    (0.9, 0.95), `eps` (1e-10), `weight_decay` (0) and `adam_w_mode`. A matrix's step is scaled by sqrt(max(1, rows / columns)).
    A parameter of three dimensions is a stack of matrices; of more, it is a matrix of its first dimension by the rest.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        groups = [dict(group) for group in param_groups]
        for group in groups:
            group["params"] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
            group.setdefault("use_muon", False)
            for key, value in (MATRIX_KEYS if group["use_muon"] else OTHER_KEYS).items():
                group.setdefault(key, value)
            check_rates(group["lr"], group.get("betas", (0.0, group.get("momentum", 0.0))), group["weight_decay"])
            flat = [list(p.shape) for p in group["params"] if p.dim() < 2] if group["use_muon"] else []
            if flat:
                raise ValueError(f"a group with use_muon holds a parameter of shape {flat[0]}; Muon steps matrices")
        super().__init__(groups, {})
        self._rounds: list[list[list[Matrix]]] = []
        self._left_out: frozenset[str] = frozenset()

    def bind(self, masters: Masters, communicator: Communicator) -> None:
        super().bind(masters, communicator)
        self._plan()

    def _plan(self) -> None:
        masters, communicator = self.bound()
        groups = {index for index, group in enumerate(self.param_groups) if group["use_muon"]}
        matrices = matrices_of(masters, groups)
        flat = [m.place for m in matrices if len(m.place.shape) < 2]
        if flat:
            raise ModelError(
                f"parameter '{flat[0].name}' of shape {list(flat[0].shape)} is in a group with use_muon; Muon steps matrices"
            )
        self._left_out = masters.left_out
        self._rounds = rounds_of([m for m in matrices if m.place.name not in self._left_out], communicator.world_size)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step once on the gradients there are. Collective inside an engine."""
        loss = loss_of(closure)
        for group in self.param_groups:
            if not group["use_muon"]:
                self._adam(group)
        if self.masters is None:
            self._step_parameters()
        else:
            self._step_runs()
        return loss

    def _adam(self, group: dict[str, Any]) -> None:
        given = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in given:
            if not self.state[parameter]:
                zeros = torch.zeros_like(parameter), torch.zeros_like(parameter)
                self.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
        states = [self.state[parameter] for parameter in given]
        first, second = group["betas"]
        adam(
            given,
            [parameter.grad for parameter in given],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            decoupled_weight_decay=group["adam_w_mode"],
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Move the momentum; what is to be orthogonalised, laid like the parameter."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _step_parameters(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is not None:
                    update = orthogonalised(self._momentum(parameter, group).to(_DTYPE), parameter.shape)
                    _apply(parameter, update, group, parameter.shape)

    def _step_runs(self) -> None:
        """Pieces of the momentum go to the matrices' owners, pieces of the update come back."""
        masters, communicator = self.bound()
        if self._left_out != masters.left_out:  # matrices that no rank has a gradient for stay out
            self._plan()
        updates: dict[int, torch.Tensor] = {}
        for run in masters.runs:
            group = self.param_groups[run.group]
            if group["use_muon"] and run.master.grad is not None:
                updates[id(run)] = self._momentum(run.master, group)

        def pieces(matrix: Matrix, low: int, high: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
            """The parts of runs that hold elements `[low, high)` of the matrix: weights, update, place in the piece."""
            start = matrix.place.start
            for run, first, last in masters.parts(matrix.flat, start + low, start + high):
                inside = slice(first - run.start, last - run.start)
                yield run.master[inside], updates[id(run)][inside], slice(first - start - low, last - start - low)

        def piece(matrix: Matrix) -> torch.Tensor:
            return torch.cat([update for _, update, _ in pieces(matrix, *matrix.part_of(communicator.rank))])

        def work(matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
            return orthogonalised(whole, matrix.place.shape)

        for dealt in self._rounds:
            for matrix, low, high, result in self._results(dealt, communicator, piece, work, pieces):
                for weights, _, inside in pieces(matrix, low, high):
                    _apply(weights, result[inside], self.param_groups[matrix.group], matrix.place.shape)

    @staticmethod
    def _results(
        dealt: Sequence[Sequence[Matrix]],
        communicator: Communicator,
        piece: Callable[[Matrix], torch.Tensor],
        work: Callable[[Matrix, torch.Tensor], torch.Tensor],
        pieces: Callable[[Matrix, int, int], Iterator[tuple[torch.Tensor, torch.Tensor, slice]]],
    ) -> Iterator[tuple[Matrix, int, int, torch.Tensor]]:
        """(matrix, bounds of what is held here, the result there). Where every rank holds all, each does all of the work."""
        for matrix in (m for own in dealt for m in own if m.flat.optimizer_whole or communicator.world_size == 1):
            whole = torch.cat([update for _, update, _ in pieces(matrix, 0, matrix.place.numel)]).to(_DTYPE)
            yield matrix, 0, matrix.place.numel, work(matrix, whole)
        spread = [[m for m in own if not m.flat.optimizer_whole] for own in dealt]
        if communicator.world_size > 1 and any(spread):
            for matrix, result in on_owners(spread, communicator, piece, work, _DTYPE):
                yield matrix, *matrix.part_of(communicator.rank), result


def _apply(weights: torch.Tensor, update: torch.Tensor, group: dict[str, Any], shape: Sequence[int]) -> None:
    """Decay the weights and subtract the update, both of the same elements of a matrix of this shape."""
    rows, columns = _sizes(shape)
    lr = float(group["lr"])
    weights.mul_(1 - lr * group["weight_decay"])
    weights.add_(update.view(weights.shape), alpha=-lr * math.sqrt(max(1, rows / columns)))


def _sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter seen as a matrix, or as a stack of them."""
    return (shape[1], shape[2]) if len(shape) == 3 else (shape[0], prod(shape[1:]))


def orthogonalised(update: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The nearest semi-orthogonal matrix to `update` [numel] of this shape, about, by five Newton-Schulz steps; flat.

    The singular values of the result lie between about 0.7 and 1.2, which trains as well as ones. Not collective.
    """
    rows, columns = _sizes(shape)
    stack = update.reshape(-1, rows, columns)
    return torch.stack([_newton_schulz(matrix) for matrix in stack]).view(-1)


def _newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    first, second, third = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(_DTYPE).T if tall else matrix.to(_DTYPE)
    x = x / x.norm().clamp(min=_EPSILON)
    for _ in range(_STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=second, alpha=third)
        x = torch.addmm(x, polynomial, x, beta=first)
    return x.T.contiguous() if tall else x
