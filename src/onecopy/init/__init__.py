"""Models before and outside training: built sharded, filled from files, whole for a while where code needs that."""

from onecopy.init.construct import Init
from onecopy.init.gathered import GatheredParameters
from onecopy.init.pretrained import LoadedWeights, load_pretrained

__all__ = ["GatheredParameters", "Init", "LoadedWeights", "load_pretrained"]
