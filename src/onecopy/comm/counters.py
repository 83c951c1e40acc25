"""How many collectives a step issued and how many bytes this rank sent in them."""

from collections import defaultdict


class Counters:
    """Counts by kind ("gather", "reduce", "agree", "broadcast", "swap"); `snapshot` closes a step."""

    def __init__(self) -> None:
        self.bytes_sent: dict[str, int] = defaultdict(int)
        self.collectives: dict[str, int] = defaultdict(int)
        self.last_step: dict[str, dict[str, int]] = {"bytes_sent": {}, "collectives": {}}

    def add(self, kind: str, bytes_sent: int) -> None:
        self.bytes_sent[kind] += bytes_sent
        self.collectives[kind] += 1

    def snapshot(self) -> None:
        """Keep what was counted since the last call as the numbers of the last step, and start again from zero."""
        self.last_step = {"bytes_sent": dict(self.bytes_sent), "collectives": dict(self.collectives)}
        self.bytes_sent.clear()
        self.collectives.clear()
