"""How far bodies move between samples of a motion, and what that says about their distances.

Why few samples and few queries suffice:

- **Spheres.** A piece lies within its sphere, so two pieces are at least as far apart as their spheres. A large
  piece that does not move is a box or a half-space instead (``checker._Sweep.lower``).
- **From one sample to another** (:func:`moves`). If no point of one piece moves further than s relative to the
  other one, a distance d becomes at least d - s. s is the shift of the sphere's centre, and the chord of the turn
  at the sphere's radius r: two rotations that differ by an angle a have matrices whose difference has the Frobenius
  norm 2 sqrt(2) sin(a / 2), and the chord is 2 r sin(a / 2).
- **Between neighbouring samples** (:func:`least_between`) with distances d and e: after a part p of the way s, the
  distance is at least d - p, and seen from the other end at least e - (s - p); the larger of both is at least
  (d + e - s) / 2.
- **Chords.** The way is longer than s, which joins the samples straight. A lever that turns by the angle a goes a
  factor (a / 2) / sin(a / 2) further. Samples lie so near that a is at most ``_STEP / _LEVER``, hence ``CURVED``.
  Joints that turn against each other bend a way by less than (a * lever)^2 / (2 * lever), about 1 mm, which the
  half of the hold distance covers that is kept between samples.
- **The end of a search** (``checker._Sweep._search``). A sample that was not asked has at least its bound. Once the
  least bound would not hold or slow the motion more than the least distance that was found, no answer changes the
  judgement.

``tools/collision_judge.py`` compares with MuJoCo's distances.
"""

import math

import numpy as np

from vla_ros.types import FloatArray

_STEP = 0.05  # m; samples are so dense that nothing moves further between two of them
_LEVER = 0.08  # m; shorter levers count as this, so that none turns far between two samples
MOST_SAMPLES = 128
"""Samples of a motion; a longer one has longer steps."""
CURVED = 1.02
"""Longest way between two samples as a multiple of its chord: 1.017 for 0.63 rad, ``_STEP / _LEVER``."""
_PARTS = np.tile(CURVED**2 * np.array([[1.0, 0], [1, 0], [1, 0], [0, 1]]), (3, 1))  # turn and shift of a place
_BOTH = np.ones(2)


def least_between(bounds: FloatArray, moved: FloatArray) -> FloatArray:
    """Return the smallest distances [R] along a motion, from those at its samples [R, K]."""
    if bounds.shape[1] == 1:
        return bounds[:, 0]
    found: FloatArray = 0.5 * (bounds[:, 1:] + bounds[:, :-1] - moved).min(axis=1)
    return found


def moves(change: FloatArray) -> FloatArray:
    """Return how far points move at most, m, by a ``change`` of their places [..., 12]."""
    found: FloatArray = np.sqrt(change * change @ _PARTS) @ _BOTH  # faster than sums
    return found


def samples_of(path: FloatArray, reach: FloatArray) -> tuple[FloatArray, float]:
    """Return samples [K, J] of the motion through ``path`` [W, J], and the largest step of a body, m."""
    steps = path[1:] - path[:-1]
    lengths: list[float] = (np.abs(steps) @ np.maximum(reach, _LEVER)).tolist()
    step = max(_STEP, sum(lengths) / MOST_SAMPLES)
    counts = [math.ceil(length / step) for length in lengths]
    part = [number for number, count in enumerate(counts) for _ in range(count)]
    share = np.array([each / count for count in counts for each in range(1, count + 1)])
    return np.concatenate([path[:1], path[part] + share[:, None] * steps[part]]), step
