"""Looks at images of a data set for cameras that are black, frozen, swapped or missing."""

from collections.abc import Iterator, Mapping

import cv2
import numpy as np
from numpy.typing import NDArray

from vla_ros.houses import NOTE, WRONG, Finding
from vla_ros.types import UInt8Array
from vla_ros_lab.training import statistics
from vla_ros_lab.training.episodes import EpisodeSamples

_EPISODES, _LOOKS = 24, 9  # at most so many episodes, and images of each
_SIDE = 64  # pixels of what is compared
_BLACK, _SAME = 10, 3  # grey levels
_REPEATED = 0.2  # share of frames with the image of the frame before
_WRIST = ("wrist", "hand", "gripper")

Looks = Mapping[str, list[NDArray[np.float32]]]
"""Image key to the small images of each episode, float32 [L, S, S, 3]."""


def examine(samples: EpisodeSamples) -> Iterator[Finding]:
    """Yield what looks wrong with the cameras."""
    for image in samples.spec.images:
        if image.key not in samples.binding.cameras:
            yield Finding(image.key, "has no camera in the data; the policy masks it", NOTE)
    yield from _repeated(samples)
    looks, moved = _look(samples)
    for key, episodes in looks.items():
        dark = np.concatenate([one.max(axis=(1, 2, 3)) < _BLACK for one in episodes])
        if dark.any():
            optional = next(not image.required for image in samples.spec.images if image.key == key)
            fix = "leave the camera out: a missing one is masked, a black one is not" if optional else "check it"
            yield Finding(key, f"black in {dark.sum()} of the {len(dark)} images looked at", WRONG, fix)
        stuck = sum(map(_is_frozen, episodes, moved))
        if stuck and not dark.all():
            found = f"frozen: the same image while the arm moves, in {stuck} of the {len(moved)} episodes looked at"
            yield Finding(key, found, WRONG, "check the driver; leave these episodes out")
    yield from _swapped(looks)


def _is_frozen(images: NDArray[np.float32], moves: NDArray[np.bool_]) -> bool:
    """Return True if images [L, S, S, 3] stay the same in most of the times [L - 1] in which the arm moves."""
    same = np.abs(np.diff(images, axis=0)).max(axis=(1, 2, 3), initial=0) < _SAME
    return bool(2 * (same & moves).sum() > moves.sum() > 1)


def _repeated(samples: EpisodeSamples) -> Iterator[Finding]:
    for key, camera in samples.binding.cameras.items():
        pairs = [np.diff(one.rows[camera]) == 0 for one in samples.data]
        share = float(np.concatenate([np.zeros(1, bool), *pairs]).mean())
        if share > _REPEATED:
            found = f"{share:.0%} of the frames repeat the image before: it is slower than {samples.rate_hz:g} Hz"
            yield Finding(key, found, WRONG, "record at the policy's rate")


def _look(samples: EpisodeSamples) -> tuple[Looks, list[NDArray[np.bool_]]]:
    """Return images of episodes, and between which of them [L - 1] the arm moves."""
    chosen = [number for number, one in enumerate(samples.episodes) if len(one)]
    chosen = [chosen[at] for at in np.unique(np.linspace(0, len(chosen) - 1, _EPISODES).astype(int))]
    looks: dict[str, list[NDArray[np.float32]]] = {key: [] for key in samples.binding.cameras}
    moved = []
    for number in chosen:
        rows = samples.episodes[number]
        frames = np.unique(np.linspace(0, len(rows) - 1, _LOOKS).astype(int))
        seen = [samples[rows[frame]].observation.images for frame in frames]
        for key, found in looks.items():
            found.append(np.stack([_small(one[key]) for one in seen]))
        episode = samples.data[number]
        numbers = np.concatenate([statistics.state_of(episode, samples), episode.actions], axis=1)
        span = np.ptp(numbers, axis=0)
        moved.append((np.abs(np.diff(numbers[frames], axis=0)) > 0.02 * span + 1e-9).any(axis=1))
    return looks, moved


def _small(image: UInt8Array) -> NDArray[np.float32]:
    newest = image[-1] if image.ndim == 4 else image
    return np.asarray(cv2.resize(newest, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA), np.float32)


def _swapped(looks: Looks) -> Iterator[Finding]:
    """Compare each episode's mean image of two cameras with the other episodes' means."""
    keys = list(looks)
    means = {key: np.stack([one.mean(axis=0) for one in looks[key]]) for key in keys}
    for index, first in enumerate(keys):
        for second in keys[index + 1 :]:
            a, b = means[first], means[second]
            usual = np.median(a, axis=0), np.median(b, axis=0)
            kept = np.abs(a - usual[0]).mean(axis=(1, 2, 3)) + np.abs(b - usual[1]).mean(axis=(1, 2, 3))
            other = np.abs(a - usual[1]).mean(axis=(1, 2, 3)) + np.abs(b - usual[0]).mean(axis=(1, 2, 3))
            swapped = other < 0.7 * kept
            if len(a) > 2 and swapped.any():
                found = f"{first} and {second} look swapped in {swapped.sum()} of the {len(a)} episodes looked at"
                yield Finding("cameras", found, WRONG, "look at them; leave these episodes out, or swap the topics")
    wrist = [key for key in keys if any(word in key.lower() for word in _WRIST)]
    fixed = [key for key in keys if key not in wrist]
    for one in wrist:
        for other in fixed:
            changes = [
                float(np.median([np.abs(np.diff(each, axis=0)).mean() for each in looks[key]]))
                for key in (one, other)
            ]
            if 2 * changes[0] < changes[1]:
                found = f"{one} changes less than {other} while the arm moves: they may be swapped"
                yield Finding("cameras", found, WRONG, "look at both; swap the topics or features.images")
