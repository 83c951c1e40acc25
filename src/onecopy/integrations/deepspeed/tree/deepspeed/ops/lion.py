"""Lion is refused."""

from onecopy.integrations.deepspeed.refusal import refused_class

_WHY = "give any elementwise Lion class of your own to initialize(optimizer=...)"
DeepSpeedCPULion = refused_class("ops.lion.DeepSpeedCPULion", _WHY)
FusedLion = refused_class("ops.lion.FusedLion", _WHY)
