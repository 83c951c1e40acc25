"""LAMB is refused."""

from onecopy.integrations.deepspeed.refusal import refused_class

_WHY = "it needs the norm of each whole parameter; use AdamW with gradient_clipping and a warmup schedule"
FusedLamb = refused_class("ops.lamb.FusedLamb", _WHY)
