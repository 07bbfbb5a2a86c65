"""Packing of a forest of token tries into rows of fixed size.

Paths are kept sorted. A trie in depth-first order is then the list of paths, each without the
prefix that it shares with the path before it:

    path            shared with the one above    new nodes
    5 6 7           0                            5 6 7
    5 6 7 9         3                            9
    5 8             1                            8

Any sorted subset of the paths is again a trie, so a row is a sorted set of path indices. A big
trie is split by putting its paths into several rows. Each row repeats the prefix its paths need.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from lightning_jax.errors import InvalidValue

Path = Int[np.ndarray, " _"]  # token ids; " _" because paths of one list differ in length


@dataclass
class PackedRow:
    """Paths that share a row: sorted indices, number of trie nodes and number of targets."""

    members: list[int] = field(default_factory=list)
    nodes: int = 0
    targets: int = 0


class PathForest:
    """Sorted token paths with their target counts and shared prefix lengths."""

    def __init__(self, paths: Sequence[Path], num_targets: Sequence[int]) -> None:
        self.lengths = np.asarray([len(path) for path in paths], np.int64)
        self.num_targets = np.asarray(num_targets, np.int64)
        # shared[i]: length of the common prefix of paths i - 1 and i.
        shared = [common_prefix(a, b) for a, b in itertools.pairwise(paths)]
        self.shared = np.asarray([0, *shared], np.int64)

    def shared_prefix(self, i: int, j: int) -> int:
        """Return the common prefix length of paths i < j, the minimum over neighbours between."""
        return int(self.shared[i + 1 : j + 1].min())

    def row(self, members: Iterable[int]) -> PackedRow:
        """Build the row of these paths. At least one is needed."""
        ordered = np.asarray(sorted(members), np.int64)
        # Neighbours i < j in the row share the minimum of shared[i + 1 : j + 1].
        gaps = self.shared[: ordered[-1] + 1]
        repeated = np.minimum.reduceat(gaps, ordered[:-1] + 1).sum() if len(ordered) > 1 else 0
        return PackedRow(
            ordered.tolist(),
            int(self.lengths[ordered].sum() - repeated),
            int(self.num_targets[ordered].sum()),
        )

    def span(self, low: int, high: int) -> PackedRow:
        """Build the row of paths low to high - 1."""
        repeated = self.shared[low + 1 : high].sum()
        return PackedRow(
            list(range(low, high)),
            int(self.lengths[low:high].sum() - repeated),
            int(self.num_targets[low:high].sum()),
        )

    def new_nodes(self, row: PackedRow, path: int) -> int:
        """Return the number of nodes that the path would add to the row.

        Its neighbours in the row share the longest prefixes with it.
        """
        index = bisect_left(row.members, path)
        overlaps = [self.shared_prefix(i, path) for i in row.members[max(index - 1, 0) : index]]
        overlaps += [self.shared_prefix(path, j) for j in row.members[index : index + 1]]
        return int(self.lengths[path]) - max(overlaps, default=0)


def common_prefix(a: Path, b: Path) -> int:
    """Return the number of equal leading tokens."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def pack_rows(forest: PathForest, *, max_nodes: int, max_targets: int) -> list[PackedRow]:
    """Pack each path into exactly one row, with few rows and few repeated prefixes.

    Each row respects both limits. Tries that fit stay whole. A larger trie is split at its branch
    points, deepest first. The parts of each branch point are then joined by first-fit decreasing,
    so that a long shared prefix is repeated only once per full row. The same step at the top packs
    whole tries. Finally, while the other rows have room, the emptiest row is dissolved into them.
    Raises ValueError for a path that does not fit into any row.
    """
    limits = (max_nodes, max_targets)
    if (forest.lengths > max_nodes).any() or (forest.num_targets > max_targets).any():
        raise InvalidValue(
            f"a path of {forest.lengths.max()} nodes or {forest.num_targets.max()} targets does "
            f"not fit a row of {max_nodes} nodes and {max_targets} targets; drop it before packing",
            reason="too_large",
        )
    return _dissolve(forest, _pack_subtrees(forest, limits), limits)


def _pack_subtrees(forest: PathForest, limits: tuple[int, int]) -> list[PackedRow]:
    """Pack every branch point after those below it, with a stack because a trie can be deep."""
    packed: dict[tuple[int, int], list[PackedRow]] = {}
    top = (0, len(forest.lengths))
    stack = [top] if len(forest.lengths) else []
    while stack:
        low, high = stack[-1]
        whole = forest.span(low, high)
        if _fits(whole, limits):
            packed[stack.pop()] = [whole]
            continue
        depth, children = _children(forest, low, high)
        waiting = [child for child in children if child not in packed]
        if waiting:
            stack += waiting
        else:
            rows = [row for child in children for row in packed.pop(child)]
            packed[stack.pop()] = _first_fit_decreasing(forest, rows, depth, limits)
    return packed.get(top, [])


def _children(forest: PathForest, low: int, high: int) -> tuple[int, list[tuple[int, int]]]:
    """Return (depth of the first branch point of paths low to high - 1, path ranges below it)."""
    between = forest.shared[low + 1 : high]
    depth = int(between.min())
    cuts = [low, *(low + 1 + np.flatnonzero(between == depth)).tolist(), high]
    return depth, list(itertools.pairwise(cuts))


def _first_fit_decreasing(
    forest: PathForest, parts: list[PackedRow], depth: int, limits: tuple[int, int]
) -> list[PackedRow]:
    """Join parts that share `depth` tokens into rows, the largest part first."""
    rows: list[PackedRow] = []
    for part in sorted(parts, key=lambda part: (-part.nodes, part.members)):
        for row in rows:
            joint = PackedRow([], row.nodes + part.nodes - depth, row.targets + part.targets)
            if _fits(joint, limits):
                row.members = row.members + part.members
                row.nodes, row.targets = joint.nodes, joint.targets
                break
        else:
            rows.append(PackedRow(part.members, part.nodes, part.targets))
    return [forest.row(row.members) for row in rows]


def _dissolve(
    forest: PathForest, rows: list[PackedRow], limits: tuple[int, int]
) -> list[PackedRow]:
    """Spread the emptiest row over the others, repeatedly while that works."""
    total = forest.span(0, len(forest.lengths))
    least = max(-(-total.nodes // limits[0]), -(-total.targets // limits[1]))
    rows = sorted(rows, key=lambda row: row.nodes)
    while len(rows) > least:
        emptiest, others = rows[0], [PackedRow(r.members[:], r.nodes, r.targets) for r in rows[1:]]
        if not all(_insert(forest, others, path, limits) for path in emptiest.members):
            break
        rows = sorted(others, key=lambda row: row.nodes)
    return rows


def _insert(forest: PathForest, rows: list[PackedRow], path: int, limits: tuple[int, int]) -> bool:
    """Insert the path into the row where it adds the fewest nodes. The fullest row breaks ties.

    Returns False if no row has room.
    """
    options = [(forest.new_nodes(row, path), -row.nodes, k) for k, row in enumerate(rows)]
    targets = int(forest.num_targets[path])
    for new, _, k in sorted(options):
        row = rows[k]
        if _fits(PackedRow([], row.nodes + new, row.targets + targets), limits):
            row.members.insert(bisect_left(row.members, path), path)
            row.nodes += new
            row.targets += targets
            return True
    return False


def _fits(row: PackedRow, limits: tuple[int, int]) -> bool:
    return row.nodes <= limits[0] and row.targets <= limits[1]
