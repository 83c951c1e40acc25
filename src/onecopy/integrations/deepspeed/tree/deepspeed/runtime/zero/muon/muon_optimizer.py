"""DeepSpeed's Muon class on onecopy's Muon."""

from collections.abc import Iterable
from typing import Any

from onecopy.optim import Muon


class MuonWithAuxAdam(Muon):
    """Muon for groups with `use_muon`, AdamW for the others; onecopy's own AdamW, whatever class is named."""

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        adam_optimizer: Any = None,
        adam_optimizer_kwargs: dict[str, Any] | None = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
    ) -> None:
        super().__init__(
            [group if group["use_muon"] else {"adam_w_mode": adam_w_mode, **group} for group in param_groups]
        )


__all__ = ["MuonWithAuxAdam"]
