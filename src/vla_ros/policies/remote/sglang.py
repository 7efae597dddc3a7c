"""SGLang ``/openpi/policy``: openpi's framing with the *model's* keys (``images.base_0_rgb``, ``state``).

After SGLang 0.5.23. It neither normalises the state nor un-normalises the actions, and answers an observation
without the cameras that it knows as if it were complete, so keys are checked against its metadata here.
"""

from __future__ import annotations

from vla_ros.policies.remote.dialect import Metadata, Query, is_image, openpi_features
from vla_ros.policies.remote.messages import WireError, pack


def query(query: Query, metadata: Metadata) -> bytes:
    """Return an observation with images [H, W, 3].

    Raises:
        WireError: The server's metadata name other images.
    """
    inputs = metadata.get("input")
    wanted = inputs.get("image_keys") if isinstance(inputs, dict) else None
    if isinstance(wanted, list):
        prefixes = ("images.", "observation.images.")
        names = [key for key, value in query.features.items() if is_image(value)]
        bare = {key.removeprefix(prefix) for prefix in prefixes for key in names if key.startswith(prefix)}
        unknown = sorted(bare.symmetric_difference(wanted) if len(bare) == len(names) else names)
        if unknown:
            raise WireError(f"the server takes the images {wanted} under 'images.', and {unknown} do not agree")
    return pack({**openpi_features(query), "prompt": query.instruction, **query.extras})
