"""Random trees for the rows of attention."""

import numpy as np


def random_ends(length: int, seed: int, depth: float) -> np.ndarray:
    """Return the ends of a row of random trees.

    A node extends the path of the node before, forks off further up, or starts a new tree. A
    larger `depth` gives longer paths.
    """
    random = np.random.default_rng(seed)
    ends, path = np.full(length, length), []
    for node in range(length):
        while path and random.random() > depth:
            ends[path.pop()] = node
        path.append(node)
    return ends


def depths_of(ends: np.ndarray) -> np.ndarray:
    """Return the number of ancestors of each node of a row with these ends."""
    return np.array([(ends[:node] > node).sum() for node in range(len(ends))], np.int32)
