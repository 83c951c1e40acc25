"""Names of the loader's routes."""

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"

__all__ = ["ROUTE_ENCODE", "ROUTE_EVAL", "ROUTE_PREDICT", "ROUTE_TRAIN"]
