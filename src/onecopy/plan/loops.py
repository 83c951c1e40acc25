"""A model that loops over tokens in Python takes hours to rehearse: notice it in the first module that does, and say what to do."""

from __future__ import annotations

from onecopy.errors import PlanError
from onecopy.observe.ledger import Ledger

MOST = 10_000  # tensors that one module makes in one forward, without calling another; 500 experts in a loop make some thousands


class Watchful(Ledger):
    """A ledger that ends a rehearsal of `name` with samples of `sequence` tokens, where it would not end in reasonable time."""

    def __init__(self, name: str, sequence: int) -> None:
        super().__init__()
        self.name, self.sequence = name, sequence
        self._module, self._made = "", 0

    def open(self, nbytes: int, category: str = "") -> int:
        if self.phase == "forward" and self.module == self._module:
            self._made += 1
            if self._made > MOST:
                raise PlanError(
                    f"{self.name} loops over tokens in Python: {self.module or 'its forward'} made {MOST:,} tensors in one forward of "
                    f"{self.sequence:,} tokens; plan it at a shorter length, such as --seq {min(128, max(1, self.sequence // 16))}, "
                    "beyond which its activations and time grow in proportion"
                )
        else:
            self._module, self._made = self.module, 0
        return super().open(nbytes, category)
