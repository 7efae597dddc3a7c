"""Encodes the images of episodes as MP4 files with PyAV."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from vla_ros.types import UInt8Array

_PRESET = "ultrafast"  # the same PSNR as "veryfast" in a third of the time, with twice the bytes
_KEY_FRAMES = 2  # every second frame is a key frame, because training reads frames in random order


def pixel_format(height: int, width: int) -> str:
    """Return a format with half the colour resolution, or full resolution if a side is odd."""
    return "yuv444p" if height % 2 or width % 2 else "yuv420p"


def encode(path: Path, images: Iterable[UInt8Array], rate: int, crf: int) -> int:
    """Write RGB images, uint8 [H, W, 3], as H.264 at ``rate`` per second; return their number."""
    count = 0
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = None
        for image in images:
            if stream is None:
                options = {"preset": _PRESET, "crf": str(crf), "g": str(_KEY_FRAMES)}
                stream = container.add_stream("libx264", rate=rate, options=options)
                stream.height, stream.width = image.shape[:2]
                stream.pix_fmt = pixel_format(*image.shape[:2])
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = count
            frame.time_base = Fraction(1, rate)
            container.mux(stream.encode(frame))
            count += 1
        if stream is not None:
            container.mux(stream.encode(None))
    return count


def concatenate(parts: Sequence[Path], path: Path, lengths: Sequence[int], rate: int) -> None:
    """Join videos of one format, with ``lengths`` frames each, without re-encoding them."""
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as whole:
        target: Any = None
        before = 0
        for part, length in zip(parts, lengths, strict=True):
            with av.open(str(part)) as source:
                stream = source.streams.video[0]
                target = target or whole.add_stream_from_template(stream)
                assert stream.time_base is not None
                shift = round(before / rate / stream.time_base)
                for packet in source.demux(stream):
                    if packet.dts is None:  # the demuxer's last packet, which is empty
                        continue
                    assert packet.pts is not None
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = target
                    whole.mux(packet)
            before += length
