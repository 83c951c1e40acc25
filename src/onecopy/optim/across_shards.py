"""What an optimizer needs to look past its shard: the runs it steps, and the way to the other ranks."""

import torch

from onecopy.comm import Communicator
from onecopy.layout import ALIGNMENT
from onecopy.optim.masters import Masters, Run


class AcrossShards(torch.optim.Optimizer):
    """An optimizer whose update of an element reads more than that element.

    Alone it steps whole parameters as any optimizer of torch does. The engine binds it to the runs; from then on a
    `step()` is collective, and every rank makes it.

    Attributes:
        masters: the engine's runs, None outside an engine.
    """

    masters: Masters | None = None
    communicator: Communicator | None = None

    def bind(self, masters: Masters, communicator: Communicator) -> None:
        """Step these runs from now on. Not collective."""
        self.masters, self.communicator = masters, communicator

    def bound(self) -> tuple[Masters, Communicator]:
        assert self.masters is not None and self.communicator is not None
        return self.masters, self.communicator


class ParameterSums:
    """Sums over whole parameters of what the ranks hold in pieces, in one small collective for all parameters.

    A parameter's elements lie in blocks of 64 that no shard cuts. Blocks are summed in the tensor's own precision, and the
    blocks' sums in fp64: so a parameter's sum is the same, once rounded, whatever the stage, buckets and number of ranks.
    """

    def __init__(self, masters: Masters, communicator: Communicator) -> None:
        self.communicator = communicator
        self._blocks: dict[int, torch.Tensor] = {}
        self.count = 0
        for flat in masters.flats:
            sizes = [(r.aligned_stop - r.start) // ALIGNMENT for r in flat.layout.ranges]
            sizes[-1] += flat.numel // ALIGNMENT - sum(sizes)  # the end padding, which is zero
            # Sizes as plain integers: in a rehearsal tensors have no values.
            of_blocks = torch.cat([torch.full((size,), self.count + place) for place, size in enumerate(sizes)])
            if not flat.optimizer_whole:
                of_blocks = of_blocks[flat.own.start // ALIGNMENT : flat.own.stop // ALIGNMENT]
            self._blocks[flat.key] = of_blocks.to(communicator.device)
            self.count += len(flat.names)

    def numbers(self, run: Run) -> torch.Tensor:
        """Which parameter each block of the run belongs to; [stop - start over 64]."""
        local = run.local()
        return self._blocks[run.flat.key][local.start // ALIGNMENT : local.stop // ALIGNMENT]

    def of_squares(self, runs: list[Run], tensors: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """For each list of tensors (one a run, laid like the run) every parameter's sum of squares over all ranks.

        Returns:
            one fp64 vector [parameters] a list, the same bits on every rank. Collective.
        """
        device = self.communicator.device
        sums = [torch.zeros(self.count, dtype=torch.float64, device=device) for _ in tensors]
        for place, run in enumerate(runs):
            part = _counted_here(run)
            if part.start < part.stop:
                numbers = self.numbers(run)[part.start // ALIGNMENT : part.stop // ALIGNMENT]
                for total, values in zip(sums, tensors, strict=True):
                    blocks = torch.linalg.vector_norm(values[place][part].view(-1, ALIGNMENT), dim=1)
                    total.index_add_(0, numbers, blocks.to(torch.float64).square_())
        agreed = self.communicator.sum_vector(torch.cat(sums), "norms of parameters")
        return list(agreed.chunk(len(tensors)))


def _counted_here(run: Run) -> slice:
    """The part of a run that this rank counts: its shard of it, also where every rank holds all."""
    start, stop = max(run.start, run.flat.own.start), min(run.stop, run.flat.own.stop)
    return slice(start - run.start, max(start, stop) - run.start)
