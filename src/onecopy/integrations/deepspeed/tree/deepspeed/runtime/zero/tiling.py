"""A linear layer in tiles: each is a layer of its own, so that stage 3 gathers one tile at a time."""

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..utils import partition_uniform


class TiledLinear(nn.Module):
    """`in_splits` x `out_splits` smaller linear layers that compute what one of `in_features` x `out_features` does.

    Args:
        input_is_already_split: the input is a list of parts of the last dimension, one for each of `in_splits`.
        combine_out_splits: give one tensor; otherwise a list, one for each of `out_splits`.
        linear_cls: the class of the tiles, called as `linear_cls(in_features, out_features, bias=..., **kwargs)`.
        init_linear: a whole layer to copy weights from.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, size in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= size:
                raise RuntimeError(f"{name}_splits is {splits}; it must be between 1 and {name}_features, {size}")
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                # The bias is added once, by the last tile of each row.
                linear_cls(columns, rows, bias=bias and place == in_splits - 1, **kwargs)
                for place, columns in enumerate(_sizes(self.in_parts))
            )
            for rows in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        parts = self._parts(input_)
        rows = []
        tiled: Any = self.linears
        for tiles in tiled:
            row: Any = None
            for tile, part in zip(tiles, parts, strict=True):
                row = self._reduce_local_output(tile(part), row)
            rows.append(row)
        return self._combine_output_splits(rows) if self.combine_out_splits else rows

    def _parts(self, input_: Any) -> Any:
        if self.in_splits == 1 or self.input_is_already_split:
            return input_ if self.input_is_already_split else [input_]
        return torch.split(input_, _sizes(self.in_parts), dim=-1)

    def _reduce_local_output(self, local_out: Any, current_out: Any) -> Any:
        """The sum of a row's tiles so far."""
        return local_out if current_out is None else current_out + local_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the weights of a whole layer, which must have the same features and bias."""
        from . import GatheredParameters

        assert hasattr(other, "weight") and other.weight.numel() == self.in_features * self.out_features
        assert (other.bias is not None) == self.use_bias
        rows: Any = self.linears
        for tiles, (start, stop) in zip(rows, pairwise(self.out_parts), strict=True):
            for tile, (left, right) in zip(tiles, pairwise(self.in_parts), strict=True):
                with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                    tile.weight.copy_(other.weight[start:stop, left:right])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[start:stop])


class TiledLinearReturnBias(TiledLinear):
    """For tiles that give (output, bias), the bias not added, as Megatron's do; so does this layer."""

    def _reduce_local_output(self, local_out: Any, current_out: Any) -> Any:
        output, bias = local_out
        if current_out is None:
            return output, bias
        summed, before = current_out
        return summed + output, bias if before is None else before

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs]
        together = None if any(bias is None for bias in biases) else torch.cat(biases, dim=-1)
        return torch.cat([output for output, _ in outputs], dim=-1), together


def _sizes(borders: list[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(borders)]


__all__ = ["TiledLinear", "TiledLinearReturnBias"]
