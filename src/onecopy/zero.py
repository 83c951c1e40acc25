"""`onecopy.zero`: parameters that are sharded, seen from the user's code."""

from onecopy.init.construct import Init, not_sharded
from onecopy.init.gathered import GatheredParameters, register_external_parameter, unregister_external_parameter
from onecopy.sharding import ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "not_sharded",
    "register_external_parameter",
    "unregister_external_parameter",
]
