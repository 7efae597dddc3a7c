"""Computes the statistics of a data set exactly as LeRobot does.

The statistics of an episode are minimum, maximum, mean, standard deviation, count, and quantiles from a histogram
of 5,000 bins. A data set's means and quantiles are the episodes' means and quantiles, weighted by count. Follows
``datasets/compute_stats.py`` of LeRobot 0.6.1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Statistics = dict[str, NDArray[Any]]

_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_BINS = 5000
_SAMPLES = (100, 10_000)  # minimum and maximum number of images sampled per episode
_THUMBNAIL, _LARGE = 150, 300  # pixels; images with a side of LARGE or more are subsampled to about THUMBNAIL


def of_vectors(values: NDArray[Any]) -> Statistics:
    """Return the statistics of one episode's numbers [T, N], each [N].

    They are computed in the precision of ``values``, as LeRobot does, although float32 loses a small deviation
    around a large mean.
    """
    rows = values.astype(np.result_type(values.dtype, np.float32), copy=False)
    mean = rows.mean(axis=0)
    summary = {"min": rows.min(axis=0), "max": rows.max(axis=0), "count": np.array([len(rows)]), "mean": mean}
    if len(rows) < 2:
        return {**summary, "std": rows.std(axis=0), **dict.fromkeys(_QUANTILES, mean)}
    columns = [_quantiles(column, None) for column in rows.T]
    quantiles = {name: np.array([column[name] for column in columns]) for name in _QUANTILES}
    deviation = np.sqrt(np.maximum(0, (rows**2).mean(axis=0) - mean**2))
    return {**summary, "std": deviation, **quantiles}


def _quantiles(values: NDArray[Any], counts: NDArray[Any] | None) -> dict[str, float]:
    """Return the quantiles of ``values`` [M], which occur ``counts`` [M] times."""
    edges = np.linspace(values.min() - 1e-10, values.max() + 1e-10, _BINS + 1)
    histogram, _ = np.histogram(values, bins=edges, weights=counts)
    below = np.cumsum(histogram)
    quantiles = {}
    for name, share in _QUANTILES.items():
        wanted = share * below[-1]
        index = int(np.searchsorted(below, wanted))
        inside = (wanted - below[index - 1]) / histogram[index] if index and histogram[index] else 0.0
        quantiles[name] = float(edges[index] + inside * (edges[index + 1] - edges[index]))
    return quantiles


def sampled(length: int) -> frozenset[int]:
    """Return the indices of an episode's images that are sampled."""
    fewest, most = min(_SAMPLES[0], length), _SAMPLES[1]
    count = max(fewest, min(int(length**0.75), most))
    return frozenset(np.round(np.linspace(0, length - 1, count)).astype(int).tolist())


class ImageStatistics:
    """Statistics of one episode's images for each colour channel, in [0, 1], or of depth in millimetres.

    Only the levels are counted; no image is kept.
    """

    def __init__(self, *, depth: bool = False) -> None:
        self._images = 0
        self._counts, self._unit = (np.zeros((1, 1 << 16)), 1) if depth else (np.zeros((3, 256)), 255)

    def add(self, image: NDArray[Any]) -> None:
        """Count one image, uint8 [H, W, 3], or a depth image, uint16 [H, W]."""
        height, width = image.shape[:2]
        if max(width, height) >= _LARGE:
            step = max(width, height) // _THUMBNAIL
            image = image[::step, ::step]
        self._images += 1
        for colour, counts in enumerate(self._counts):
            counts += np.bincount(image.reshape(-1, len(self._counts))[:, colour], minlength=len(counts))

    def result(self) -> Statistics:
        """Return the statistics of the added images, each [3, 1, 1] or [1, 1, 1], and ``count`` [1]."""
        columns = []
        for histogram in self._counts:
            levels, counts = np.flatnonzero(histogram).astype(float), histogram[histogram > 0]
            mean = np.average(levels, weights=counts)
            deviation = np.sqrt(np.average((levels - mean) ** 2, weights=counts))
            extent = {"min": levels[0], "max": levels[-1], "mean": mean, "std": deviation}
            columns.append({**extent, **_quantiles(levels, counts)})
        found = {name: np.array([column[name] for column in columns]) / self._unit for name in columns[0]}
        stats = {name: values.reshape(-1, 1, 1) for name, values in found.items()}
        return {**stats, "count": np.array([self._images])}


def over_episodes(episodes: Sequence[Statistics]) -> Statistics:
    """Combine one feature's statistics of all episodes; exact but for quantiles, which are weighted means."""
    stacked = {name: np.stack([one[name] for one in episodes]) for name in episodes[0]}
    count = stacked["count"].sum(axis=0)
    weights = stacked["count"].reshape(-1, *[1] * (stacked["mean"].ndim - 1)) / count

    def weighted(values: NDArray[Any]) -> NDArray[Any]:
        total: NDArray[Any] = (values * weights).sum(axis=0)
        return total

    mean = weighted(stacked["mean"])
    variance = weighted(stacked["std"] ** 2 + (stacked["mean"] - mean) ** 2)
    extent = {"min": stacked["min"].min(axis=0), "max": stacked["max"].max(axis=0)}
    quantiles = {name: weighted(stacked[name]) for name in _QUANTILES}
    return {**extent, "mean": mean, "std": np.sqrt(variance), "count": count, **quantiles}
