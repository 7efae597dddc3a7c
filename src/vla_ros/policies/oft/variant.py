"""Settings that no file of an OpenVLA-OFT checkpoint states, from the options and the preset."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vla_ros.errors import ConfigError
from vla_ros.policies.oft.options import OFTOptions
from vla_ros.policies.openvla.actions import QUANTILES

BOUNDS = {"q99": QUANTILES, "min_max": ("min", "max")}


@dataclass(frozen=True)
class Variant:
    """Constants that the published code derives from a robot's name."""

    chunk: int  # K, actions per chunk
    action: int  # D, numbers per action; 0 for any
    normalization: str = "q99"  # as ``policy.normalization``
    camera_side: int = 0  # as ``policy.camera_side``; 0 for none

    @property
    def bounds(self) -> tuple[str, str]:
        """Names of the statistics that bound the normalised range."""
        return BOUNDS[self.normalization]


PRESETS = {"libero": Variant(8, 7), "aloha": Variant(25, 14, "min_max", 256), "bridge": Variant(5, 7)}


def choose_variant(options: OFTOptions, preset: str) -> Variant:
    """Return the preset's variant with ``options`` applied.

    Raises ConfigError if the options contradict the preset or the chunk size is missing.
    """
    variant = PRESETS.get(preset, Variant(options.chunk, 0))
    if not variant.chunk:
        raise ConfigError(
            "policy.chunk: no file of the checkpoint states the number of actions per chunk; set preset (libero: "
            "8, aloha: 25, bridge: 5), or policy.name:=oft and policy.chunk"
        )
    if options.chunk not in (0, variant.chunk):
        raise ConfigError(
            f"policy.chunk: found {options.chunk}, but preset {preset} means {variant.chunk}; set only one of them"
        )
    if options.normalization != "auto":
        variant = replace(variant, normalization=options.normalization)
    return variant if options.camera_side < 0 else replace(variant, camera_side=options.camera_side)
