"""Makes the README's moving picture from a run of the demo: what the camera saw, with the instruction below.

python -m tools.picture docs/images/demo.webp      # a minute; --seed and --episodes choose other scenes
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rosbags.highlevel import AnyReader

SIDE, BAR = 400, 34  # pixels
PERIOD_MS, LAST = 100, 12  # of a frame; frames for which an episode's end is shown


def frames(bag: Path) -> Iterator[Image.Image]:
    """Yield each camera image of a bag, upright, with the instruction that was in force."""
    instruction, before = "", None
    with AnyReader([bag]) as reader:
        wanted = ("/camera/image_raw", "/vla_policy/instruction")
        connections = [each for each in reader.connections if each.topic in wanted]
        for connection, _, data in reader.messages(connections=connections):
            message: Any = reader.deserialize(data, connection.msgtype)
            if connection.topic != "/camera/image_raw":
                if before is not None:
                    yield from [before] * LAST  # the end of an episode
                instruction = message.data
                continue
            pixels = np.asarray(message.data).reshape(message.height, message.width, 3)[::-1, ::-1]
            before = captioned(Image.fromarray(pixels), instruction)
            yield before


def captioned(image: Image.Image, text: str) -> Image.Image:
    """Return the image at the size of the picture, with a bar of text below."""
    whole = Image.new("RGB", (SIDE, SIDE + BAR), (24, 26, 30))
    whole.paste(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    font = ImageFont.load_default(18)
    ImageDraw.Draw(whole).text((SIDE / 2, SIDE + BAR / 2), f"“{text}”", (235, 235, 235), font, anchor="mm")
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--episodes", default="4")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bag, size = Path(folder) / "bag", f"{2 * SIDE}"
        scenes = ["--seed", arguments.seed, "--episodes", arguments.episodes]
        demo = [sys.executable, "-m", "vla_ros.cli", "demo", *scenes]
        options = ["-p", f"camera.width:={size}", "-p", f"camera.height:={size}", "--record", str(bag)]
        subprocess.run([*demo, *options], check=True)
        shown = list(frames(bag))
    first, *others = shown
    first.save(
        arguments.output, save_all=True, append_images=others, duration=PERIOD_MS, loop=0, quality=75, method=6
    )
    print(f"{arguments.output}: {len(shown)} frames, {arguments.output.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
