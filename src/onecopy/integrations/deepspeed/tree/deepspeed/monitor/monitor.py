"""All monitors of a configuration behind one `write_events`."""

from typing import Any

from onecopy.observe.log import current_rank
from onecopy.observe.monitor import Monitor, monitors_from


class MonitorMaster(Monitor):
    """Writes events (name, value, step) to what the settings switch on, on rank 0 only.

    Args:
        monitor_config: what `get_monitor_config` gives, or `DeepSpeedConfig(...).monitor_config`.
    """

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitors_from(monitor_config, current_rank())._writers)
        self.monitor_config = monitor_config


__all__ = ["Monitor", "MonitorMaster"]
