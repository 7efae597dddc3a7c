"""Resampling without TensorFlow: its Lanczos-3 as matrix products, and the taps of its ``crop_and_resize``.

A resize along one axis multiplies by a banded matrix. The matrix is split into blocks of output samples, each with
only the input samples that it needs, to avoid multiplying by zeros.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import ConfigError
from vla_ros.types import BilinearCrop, CropTaps, FixedPointResize, FloatResize, Resampling, UInt8Array

_Matrix = NDArray[np.float32]
_Block = tuple[slice, slice, _Matrix]

# Coefficients of x^3, x^5, x^7 and of x^2, x^4, x^6, x^8 on [-pi / 4, pi / 4].
_SINE = tuple(map(float.fromhex, ("-0x1.555545995a603p-3", "0x1.1107605230bc4p-7", "-0x1.994eb3774cf24p-13")))
_COSINE = tuple(
    map(
        float.fromhex,
        ("-0x1.ffffffd0c621cp-2", "0x1.55553e1068f19p-5", "-0x1.6c087e89a359dp-10", "0x1.99343027bf8c3p-16"),
    )
)
_ROWS_PER_BLOCK = 32
_COLUMNS_PER_BLOCK = 16
_CHANNELS = 3


def lanczos3_matrix(source: int, target: int) -> _Matrix:
    """Return the exact weights [target, source] of ``tf.image.resize`` (Lanczos-3, antialiased) along one axis.

    Sample ``i`` of the result is at ``(i + 0.5) * source / target``, with pixel centres at half-integers. The
    kernel is stretched by the scale when the image shrinks, truncated at the border, and normalised to sum to one.
    """
    one, half, radius = np.float32(1), np.float32(0.5), np.float32(3)
    # TensorFlow rounds the scale to float32 and inverts it; for every third size this is not source / target.
    inverse = np.float32(1.0 / np.float64(np.float32(target) / np.float32(source)))
    stretch = max(inverse, one)
    matrix = np.zeros((target, source), np.float32)
    for index in range(target):
        position = (np.float32(index) + half) * inverse
        first = max(0, math.ceil(position - radius * stretch - half))
        last = min(source - 1, math.floor(position + radius * stretch - half))
        distance = np.abs((np.arange(first, last + 1, dtype=np.float32) + half - position) * (one / stretch))
        weights = _lanczos3(distance)
        total = np.cumsum(weights)[-1]  # cumsum() adds in order, sum() pairwise
        matrix[index, first : last + 1] = weights * (one / total)
    return matrix


def _lanczos3(distance: _Matrix) -> _Matrix:
    """Return the kernel, computed in TensorFlow's order of float32 operations."""
    pi, radius = np.float32(math.pi), np.float32(3)
    inner = np.maximum(distance, np.float32(1e-3))
    weights = radius * _sine(pi * inner) * _sine(pi * inner / radius) / (pi * pi * inner * inner)
    weights[distance <= np.float32(1e-3)] = 1
    weights[distance > radius] = 0
    return weights


def _sine(angle: _Matrix) -> _Matrix:
    """Return C's ``sinf``, which TensorFlow calls, for non-negative angles: glibc's polynomials in float64.

    Neither this result nor numpy's is always the nearest float32, and the two differ.
    """
    x = angle.astype(np.float64)
    quarter = np.floor(x * (2 / np.pi) + 0.5)
    x -= quarter * (np.pi / 2)
    square = x * x
    fourth = square * square
    sine = (x + x * square * _SINE[0]) + x * fourth * (_SINE[1] + square * _SINE[2])
    cosine = (1 + square * _COSINE[0] + fourth * _COSINE[1]) + fourth * square * (_COSINE[2] + square * _COSINE[3])
    turns = quarter.astype(np.int64)
    value = np.where(turns & 1, cosine, sine)
    return np.where(turns & 2, -value, value).astype(np.float32)


def center_crop_box(area: float) -> tuple[np.float32, np.float32]:
    """Return start and end of the centre crop that keeps the share ``area`` of the image, for both axes.

    Sides are scaled by ``sqrt(area)`` in float32, as in the OpenVLA evaluation code. As in
    ``tf.image.crop_and_resize``, 0 is the centre of the first pixel and 1 the centre of the last pixel.
    """
    if not 0.0 < area <= 1.0:
        raise ConfigError(f"camera.crop_area: found {area}, expected more than 0 and at most 1")
    side = np.sqrt(np.float32(area))  # of the rounded area, as in TensorFlow
    low = (np.float32(1) - side) / np.float32(2)
    return low, low + side


@lru_cache(maxsize=32)
def crop_taps(source: int, target: int, area: float) -> CropTaps:
    """Return the taps of ``tf.image.crop_and_resize`` (bilinear, aligned corners, no antialiasing)."""
    low, high = center_crop_box(area)
    last = np.float32(source - 1)
    if target > 1:
        position = low * last + np.arange(target, dtype=np.float32) * ((high - low) * last / np.float32(target - 1))
    else:
        position = np.array([np.float32(0.5) * (low + high) * last], np.float32)
    return linear_taps(position, source)


def linear_taps(position: NDArray[np.float32], source: int) -> CropTaps:
    """Return the two neighbours of each ``position`` >= 0 among ``source`` samples, and the second one's weight."""
    below = np.minimum(position.astype(np.intp), source - 1)
    return CropTaps(below, np.minimum(below + 1, source - 1), position - below.astype(np.float32))


PRECISION_BITS = 22
"""Fractional bits of Pillow's fixed-point weights."""


@lru_cache(maxsize=32)
def pillow_resize(
    source: tuple[int, int], target: tuple[int, int], name: str = "bicubic"
) -> tuple[FixedPointResize, ...]:
    """Return the steps of Pillow's antialiased resize between two sizes (height, width): columns, then rows."""
    return tuple(
        FixedPointResize(axis, *pillow_taps(source[axis], target[axis], name))
        for axis in (1, 0)
        if source[axis] != target[axis]
    )


@lru_cache(maxsize=16)
def bilinear_crop(source: tuple[int, int], target: tuple[int, int], area: float) -> Resampling:
    """Return the step that applies :func:`crop_taps` between two sizes (height, width)."""
    rows, columns = (crop_taps(source[axis], target[axis], area) for axis in (0, 1))
    return (BilinearCrop(rows, columns),)


def pillow_taps(
    source: int, target: int, name: str, short: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the taps of Pillow's ``bilinear`` or ``bicubic`` resize along one axis, with Pillow's rounding.

    Returns int64 [K, target] positions and int32 [K, target] weights in units of 2^-22. With ``short``, weights are
    rounded to as many bits as fit into 16 with the largest weight, as in torch's resize of uint8.
    """
    scale = source / target
    stretch = max(scale, 1.0)
    kernel, reach = {"bilinear": (_hat, 1.0), "bicubic": (_cubic, 2.0)}[name]
    support = reach * stretch
    centers = (np.arange(target) + 0.5) * scale
    first = np.maximum(0, (centers - support + 0.5).astype(np.int64))
    last = np.minimum(source, (centers + support + 0.5).astype(np.int64))
    positions = first + np.arange(int((last - first).max()))[:, None]  # [K, target]
    weights = kernel(np.abs((positions - centers + 0.5) * (1.0 / stretch)))
    weights[positions >= last] = 0.0
    weights /= weights.sum(axis=0)  # sums the taps in Pillow's order
    bits = PRECISION_BITS
    while short and int(0.5 + weights.max() * (1 << bits)) >= 1 << 15:
        bits -= 1
    fixed = np.trunc(weights * (1 << bits) + np.copysign(0.5, weights)).astype(np.int32) << (PRECISION_BITS - bits)
    return np.minimum(positions, source - 1), fixed


def _hat(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(1.0 - distance, 0.0)


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    a, d = -0.5, distance  # the cubic's parameter in Pillow
    near = ((a + 2.0) * d - (a + 3.0)) * d * d + 1
    far = (((d - 5) * d + 8) * d - 4) * a
    return np.where(d < 1.0, near, np.where(d < 2.0, far, 0.0))


def _blocks(matrix: _Matrix, size: int) -> list[_Block]:
    """Split a banded matrix into blocks of ``size`` rows, each as wide as the non-zero columns of its rows."""
    blocks = []
    for start in range(0, matrix.shape[0], size):
        rows = matrix[start : start + size]
        used = np.flatnonzero(rows.any(axis=0))
        inputs = slice(int(used[0]), int(used[-1]) + 1)
        blocks.append((slice(start, start + rows.shape[0]), inputs, np.ascontiguousarray(rows[:, inputs])))
    return blocks


class Lanczos3:
    """TensorFlow's antialiased Lanczos-3 between two sizes (height, width), with the same uint8 results.

    TensorFlow sums tap by tap, rows first. _Matrix products sum in another order and are several times faster.
    Rounded results can differ only where a sum is close to the midpoint between two levels; these samples are
    recomputed in TensorFlow's order.
    """

    def __init__(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        matrices = [lanczos3_matrix(source[axis], target[axis]) for axis in (0, 1)]
        self._shape = (*target, _CHANNELS)
        self._row_blocks = _blocks(matrices[0], _ROWS_PER_BLOCK)
        # The Kronecker product with the identity keeps the channels interleaved.
        wide = np.kron(matrices[1], np.eye(_CHANNELS, dtype=np.float32))
        self._column_blocks = _blocks(wide, _COLUMNS_PER_BLOCK * _CHANNELS)
        self._rows, self._columns = map(taps_of, matrices)
        taps = sum(weights.shape[1] for _, weights in (self._rows, self._columns))
        gain = np.prod([np.abs(matrix).sum(axis=1).max() for matrix in matrices])
        # Bound on the difference between two orders of float32 sums: one rounding per tap and order.
        self._doubt = np.float32(2 * (taps + 2) * 2.0**-24 * 255 * gain)

    def __call__(self, image: UInt8Array) -> UInt8Array:
        """Resize uint8 [height, width, 3] from ``source`` to ``target``."""
        result = self._products(image)
        middle = np.floor(result)
        middle += np.float32(0.5)
        middle -= result
        doubtful = np.flatnonzero(np.abs(middle, out=middle) <= self._doubt)
        if len(doubtful) > result.size // 50:  # as in synthetic images; computing all samples is then faster
            result = self._all(image)
        elif len(doubtful):
            result.reshape(-1)[doubtful] = self._some(image, doubtful)
        np.rint(result, out=result)
        return np.clip(result, 0, 255, out=result).astype(np.uint8)

    def _products(self, image: UInt8Array) -> _Matrix:
        """Compute every sample, float32 [height, width, 3], by matrix products."""
        source = image.astype(np.float32).reshape(len(image), -1)
        tall = np.empty((self._shape[0], source.shape[1]), np.float32)
        for outputs, inputs, matrix in self._row_blocks:
            np.matmul(matrix, source[inputs], out=tall[outputs])
        result = np.empty((self._shape[0], self._shape[1] * _CHANNELS), np.float32)
        for outputs, inputs, matrix in self._column_blocks:
            result[:, outputs] = tall[:, inputs] @ matrix.T
        return result.reshape(self._shape)

    def _some(self, image: UInt8Array, samples: NDArray[np.intp]) -> _Matrix:
        """Compute selected samples of the flattened result, float32 [n], in TensorFlow's order."""
        pixels, channels = np.divmod(samples, _CHANNELS)
        rows, columns = np.divmod(pixels, len(self._columns[0]))
        down, down_weights = (part[rows] for part in self._rows)  # [n, taps]
        across, across_weights = (part[columns] for part in self._columns)
        beside = across * _CHANNELS + channels[:, None]  # offsets within a row
        flat, step = image.reshape(-1), image.shape[1] * _CHANNELS
        tall, result = np.zeros(across.shape, np.float32), np.zeros(len(samples), np.float32)
        for tap in range(down.shape[1]):
            tall += flat.take(down[:, tap, None] * step + beside) * down_weights[:, tap, None]
        for tap in range(across.shape[1]):
            result += tall[:, tap] * across_weights[:, tap]
        return result

    def _all(self, image: UInt8Array) -> _Matrix:
        """Compute every sample, float32 [height, width, 3], in TensorFlow's order."""
        result: NDArray[np.uint8] | _Matrix = image
        for axis, (at, weights) in enumerate((self._rows, self._columns)):
            lines = np.moveaxis(result, axis, 0)
            sums = np.zeros((len(at), *lines.shape[1:]), np.float32)
            for tap in range(at.shape[1]):
                sums += lines[at[:, tap]] * weights[:, tap, None, None]
            result = np.moveaxis(sums, 0, axis)
        return np.asarray(result, np.float32)


def taps_of(matrix: _Matrix) -> tuple[NDArray[np.intp], _Matrix]:
    """Return the positions and weights [target, taps] of a banded matrix; weights outside the band are 0."""
    used = matrix != 0
    first = used.argmax(axis=1)
    last = matrix.shape[1] - 1 - used[:, ::-1].argmax(axis=1)
    positions = first[:, None] + np.arange(int((last - first).max()) + 1)
    inside = np.minimum(positions, matrix.shape[1] - 1)
    weights = np.take_along_axis(matrix, inside, axis=1)
    weights[positions > last[:, None]] = 0
    return inside, weights


@lru_cache(maxsize=16)
def lanczos3(source: tuple[int, int], target: tuple[int, int]) -> Lanczos3:
    """Return the resize between two sizes (height, width); cached, because cameras keep their size."""
    return Lanczos3(source, target)


@lru_cache(maxsize=16)
def lanczos3_steps(source: tuple[int, int], target: tuple[int, int]) -> Resampling:
    """Return the steps of :func:`lanczos3` for another device; none if the sizes are equal, as in TensorFlow."""
    if source == target:
        return ()
    rows, columns = (taps_of(lanczos3_matrix(source[axis], target[axis])) for axis in (0, 1))
    return (FloatResize(rows, columns),)
