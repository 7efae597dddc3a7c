"""Settings that no file of an OpenVLA-OFT checkpoint states, from the options and the preset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vla_ros.errors import ConfigError
from vla_ros.policies.oft.options import OFTOptions
from vla_ros.policies.openvla.actions import QUANTILES

BOUNDS = {"q99": QUANTILES, "min_max": ("min", "max")}


@dataclass(frozen=True)
class Platform:
    """Constants that the published code derives from a robot's name."""

    chunk: int  # K
    action: int  # D
    normalization: str = "q99"  # as ``policy.normalization``
    camera_side: int = 0  # as ``policy.camera_side``


PLATFORMS = {"libero": Platform(8, 7), "aloha": Platform(25, 14, "min_max", 256), "bridge": Platform(5, 7)}
"""By the name of the preset."""


@dataclass(frozen=True)
class Variant:
    """Options with those of the preset filled in."""

    keys: tuple[str, ...]  # of the images that the checkpoint takes, in the order of its training
    chunk: int  # K
    bounds: tuple[str, str]  # names of the statistics that normalise
    camera_side: int  # as ``policy.camera_side``; 0 for none
    preset: str  # name of the preset; "" if it names none of :data:`PLATFORMS`

    @classmethod
    def of(cls, options: OFTOptions, preset: str, keys: Sequence[str]) -> Variant:
        """Resolve ``options``; ``keys`` are those of all cameras.

        Raises ConfigError if a setting is missing or contradictory, or if cameras are missing.
        """
        platform = PLATFORMS.get(preset)
        chunk = options.chunk or (platform.chunk if platform else 0)
        if not chunk:
            raise ConfigError(
                "policy.chunk: no file of the checkpoint says how many actions a chunk has; set preset (libero: 8, "
                "aloha: 25, bridge: 5), or policy.name:=oft and policy.chunk"
            )
        if platform and chunk != platform.chunk:
            raise ConfigError(
                f"policy.chunk: found {chunk}, but preset {preset} means {platform.chunk}; leave one out"
            )
        if len(keys) < options.images:
            raise ConfigError(
                f"policy.images: the checkpoint takes {options.images} images, found camera.keys {list(keys)}; "
                "add the missing cameras, in the order of its training"
            )
        known = platform or Platform(chunk, 0)
        named = options.normalization
        return cls(
            tuple(keys[: options.images or None]),
            chunk,
            BOUNDS[known.normalization if named == "auto" else named],
            known.camera_side if options.camera_side < 0 else options.camera_side,
            preset if platform else "",
        )

    def check(self, key: str, dimension: int) -> None:
        """Refuse statistics (``key``, with ``dimension`` numbers per action) of another robot than the preset's."""
        if self.preset and dimension != PLATFORMS[self.preset].action:
            raise ConfigError(
                f"preset: {self.preset} has actions of {PLATFORMS[self.preset].action} numbers, but the "
                f"checkpoint's statistics for '{key}' have {dimension}; it was trained for another robot"
            )
