"""Pipeline parallelism is refused; the names are here so that imports and `isinstance` work."""

from onecopy.integrations.deepspeed.refusal import refused_class

_WHY = "ZeRO-3 shards the model's layers without stages; give the whole model to initialize"
PipelineModule = refused_class("pipe.PipelineModule", _WHY)
LayerSpec = refused_class("pipe.LayerSpec", _WHY)
TiedLayerSpec = refused_class("pipe.TiedLayerSpec", _WHY)
