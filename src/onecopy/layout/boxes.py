"""Cut a flat range of a row-major tensor into rectangles, so that formats which know only rectangles can hold it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor; its elements lie side by side in the flat tensor, from `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # elements from the tensor's first element

    @property
    def numel(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The rectangles that make up elements `[start, stop)` of a row-major tensor of `shape`, in order.

    At most `2 * len(shape) - 1` of them: the tail of the first row, the full rows, the head of the last row, each
    row's part cut the same way one dimension further in.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    row = 1
    for size in shape[1:]:
        row *= size
    first, last = start // row, stop // row
    if start == first * row and stop == last * row:
        return [Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]), start)]
    pieces: list[Box] = []
    if start != first * row:
        pieces += _inside_row(shape, first, start, min(stop, (first + 1) * row))
        first += 1
    if first < last:
        pieces.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]), first * row))
    if first <= last and last * row < stop and last * row >= start:
        pieces += _inside_row(shape, last, last * row, stop)
    return pieces


def _inside_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    """The rectangles of `[start, stop)`, all of it inside row `index`."""
    row = 1
    for size in shape[1:]:
        row *= size
    base = index * row
    inner = boxes(shape[1:], start - base, stop - base)
    return [Box((index, *box.offsets), (1, *box.sizes), base + box.start) for box in inner]
