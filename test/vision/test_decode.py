"""Decoding: each encoding against an independent computation, and ImageError for all other input."""

import io
import struct
import time
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vla_ros.errors import ImageError
from vla_ros.vision.decode import ENCODINGS, MAX_PIXELS, decode_compressed, decode_image, warn_once
from vla_ros.vision.messages import encode_compressed, encode_image

CHANNELS = {
    name: layout.channels
    for name, layout in ENCODINGS.items()
    if not name.startswith("bayer") and layout.value_bytes == 1
}


def reference_rgb(raw: np.ndarray, encoding: str) -> np.ndarray:
    """RGB of raw pixels [H, W, channels] by the definition of the encoding, in float where it has a formula."""
    if encoding in ("rgb8", "rgba8"):
        return raw[..., :3]
    if encoding in ("bgr8", "bgra8"):
        return raw[..., 2::-1]
    if encoding == "mono8":
        return np.repeat(raw, 3, axis=2)
    luma, chroma = (1, 0) if encoding in ("yuv422", "uyvy") else (0, 1)
    y = 1.164383 * np.maximum(raw[..., luma].astype(float) - 16, 0)
    u = np.repeat(raw[:, 0::2, chroma].astype(float) - 128, 2, axis=1)
    v = np.repeat(raw[:, 1::2, chroma].astype(float) - 128, 2, axis=1)
    rgb = np.stack([y + 1.596027 * v, y - 0.391762 * u - 0.812968 * v, y + 2.017232 * u], axis=-1)  # BT.601
    return np.clip(np.rint(rgb), 0, 255).astype(np.uint8)


def levels(first: np.ndarray, second: np.ndarray) -> int:
    assert first.shape == second.shape
    return int(np.abs(first.astype(int) - second.astype(int)).max())


def jpeg(image: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def decompressed(data: bytes, image_format: str = "png") -> np.ndarray:
    return decode_compressed(encode_compressed(data, 42, "cam", image_format)).image


def png(image: np.ndarray | Image.Image) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("encoding", CHANNELS)
@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("little_endian", [True, False])
def test_encoding_padding_and_byte_order(serialize, encoding, padding, little_endian):
    height, width, channels = 6, 8, CHANNELS[encoding]
    rows = np.random.default_rng(3).integers(0, 256, (height, width * channels + padding), np.uint8)
    cdr = serialize(
        "Image",
        7_000000009,
        "cam",
        little_endian,
        height=height,
        width=width,
        encoding=encoding,
        is_bigendian=int(not little_endian),
        step=rows.shape[1],
        data=rows.tobytes(),
    )
    frame = decode_image(cdr)
    raw = rows[:, : width * channels].reshape(height, width, channels)
    assert levels(frame.image, reference_rgb(raw, encoding)) <= (1 if channels == 2 else 0)
    assert frame.image.dtype == np.uint8
    assert frame.stamp == 7_000000009


def test_rgb8_is_a_view_even_with_padding(sample):
    for step in (None, 64 * 3 + 7):
        buffer = np.frombuffer(encode_image(sample, 0, "cam", step=step), np.uint8)
        image = decode_image(memoryview(buffer)).image
        assert np.shares_memory(image, buffer)
        assert (image == sample).all()


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("16UC1", "depth.*colour topic"),
        ("32FC1", "depth.*colour topic"),
        ("mono16", "more than 8 bits"),
        ("8UC2", "expected one of rgb8.*nv12"),
        ("yuv420", "expected one of rgb8"),
        ("", "expected one of rgb8"),
        ("x" * 5000, "xxx\\.\\.\\."),
    ],
)
def test_other_encodings_say_why_and_what_to_do(encoding, text):
    with pytest.raises(ImageError, match=text) as caught:
        decode_image(encode_image(np.zeros((4, 4, 2), np.uint8), 0, "cam", encoding))
    assert len(str(caught.value)) < 400


def image_cdr(serialize, **changes) -> bytes:
    fields = {"height": 4, "width": 6, "encoding": "rgb8", "is_bigendian": 0, "step": 18, "data": bytes(72)}
    return serialize("Image", **(fields | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": b"", "height": 0}, "found size 6 x 0"),
        ({"data": b"", "width": 0, "step": 0}, "found size 0 x 4"),
        ({"data": b""}, "found 0 bytes of data, expected 72"),
        ({"step": 17}, "found step 17, expected at least 18"),
        ({"step": 0}, "found step 0"),
        ({"step": 24}, "found 72 bytes of data, expected 96"),
        ({"data": bytes(71)}, "found 71 bytes of data, expected 72"),
        ({"data": bytes(73)}, "found 73 bytes of data, expected 72"),
        ({"width": 2**32 - 1}, "expected at most 16384 a side"),
        ({"height": 2**32 - 1, "step": 2**32 - 1}, "expected at most 16384 a side"),
        ({"height": 16384, "width": 16384}, f"{MAX_PIXELS} pixels"),
        ({"step": 2**32 - 1}, f"expected {4 * (2**32 - 1)}"),
        (
            {"encoding": "nv12", "step": 5},
            "step 5 and 72 bytes of data with nv12, expected at least 6 and 30",
        ),
        ({"encoding": "nv21", "step": 6}, "found step 6 and 72 bytes .* expected at least 6 and 36"),
        ({"encoding": "nv24", "step": 8}, "found step 8 and 72 bytes .* expected at least 6 and 96"),
        ({"encoding": "nv12", "width": 5, "step": 5}, "found size 5 x 4 with nv12, expected even numbers"),
        ({"encoding": "yuv422_yuy2", "width": 5, "step": 10, "data": bytes(40)}, "width 5 .* multiple of 2"),
    ],
)
def test_wrong_sizes_are_named(serialize, changes, text):
    with pytest.raises(ImageError, match=text):
        decode_image(image_cdr(serialize, **changes))


def by_formula(y: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """RGB of planes [H, W] each, BT.601 with limited range."""
    y, u, v = 1.164383 * np.maximum(y.astype(float) - 16, 0), u.astype(float) - 128, v.astype(float) - 128
    rgb = np.stack([y + 1.596027 * v, y - 0.391762 * u - 0.812968 * v, y + 2.017232 * u], axis=-1)
    return np.clip(np.rint(rgb), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("encoding", ["nv12", "nv21", "nv24"])
def test_a_plane_of_chroma_behind_a_plane_of_luma(serialize, encoding: str, padding: int) -> None:
    rng, (height, width), each = np.random.default_rng(4), (8, 12), 1 if encoding == "nv24" else 2
    luma = rng.integers(0, 256, (height, width), np.uint8)
    u, v = rng.integers(0, 256, (2, height // each, width // each), np.uint8)
    pairs = np.stack([v, u] if encoding == "nv21" else [u, v], axis=-1).reshape(height // each, -1)
    rows = [np.pad(luma, ((0, 0), (0, padding))), np.pad(pairs, ((0, 0), (0, padding * 2 // each)))]
    data = b"".join(one.tobytes() for one in rows)
    fields = {"height": height, "width": width, "encoding": encoding, "step": width + padding, "data": data}
    image = decode_image(image_cdr(serialize, **fields)).image
    expected = by_formula(luma, *(one.repeat(each, axis=0).repeat(each, axis=1) for one in (u, v)))
    assert levels(image, expected) <= 1
    assert image.flags.c_contiguous


@pytest.mark.parametrize(("encoding", "meant"), [("8UC3", "bgr8"), ("8UC4", "bgra8"), ("8UC1", "mono8")])
def test_opencvs_types_are_read_in_its_order_with_a_warning(sample, caplog, encoding: str, meant: str) -> None:
    warn_once.cache_clear()
    raw = np.dstack([sample, sample[..., :1]])[..., : ENCODINGS[meant].channels]
    images = [decode_image(encode_image(raw, 1, "cam", name)).image for name in (encoding, encoding, meant)]
    assert (images[0] == images[2]).all()
    assert len(caplog.messages) == 1
    assert f"read as {meant}" in caplog.text


@pytest.mark.parametrize("big_endian", [False, True])
def test_a_12_bit_camera_in_16_bits_is_reported_once(serialize, caplog, big_endian: bool) -> None:
    warn_once.cache_clear()
    values = np.random.default_rng(2).integers(0, 4096, (8, 8), np.uint16)
    for scale in (16, 1, 1):
        decode_image(with_16_bits(serialize, values * scale, "bayer_rggb16", big_endian))
    assert len(caplog.messages) == 1
    assert "no value of an image is above 4095 of 65535" in caplog.text


# Compressed


@pytest.mark.parametrize(
    "image_format", ["jpeg", "rgb8; jpeg compressed bgr8", "bgr8; jpeg compressed bgr8", "", "jpg"]
)
def test_jpeg_is_what_pillow_decodes(sample, image_format):
    data = jpeg(sample, quality=95)
    frame = decode_compressed(encode_compressed(data, 42, "cam", image_format))
    with Image.open(io.BytesIO(data)) as expected:
        assert levels(frame.image, np.array(expected)) <= 1
    assert levels(frame.image, sample) < 30  # upright, and red is red
    assert frame.stamp == 42


@pytest.mark.parametrize("image_format", ["png", "rgb8; png compressed bgr8", "jpeg"])
def test_png_is_exact(sample, image_format):
    assert (decompressed(png(sample), image_format) == sample).all()


def test_big_endian_compressed(serialize, sample):
    cdr = serialize("CompressedImage", 5, "cam", little_endian=False, format="png", data=png(sample))
    assert (decode_compressed(cdr).image == sample).all()


def test_channels_swapped_before_compression_are_swapped_back(sample):
    data = png(np.ascontiguousarray(sample[..., ::-1]))
    assert (decompressed(data, "rgb8; png compressed rgb8") == sample).all()


def test_grey_alpha_and_palette(sample):
    grey = np.ascontiguousarray(sample[..., 0])
    assert levels(decompressed(jpeg(grey), "mono8; jpeg compressed ")[..., 2], grey) < 9
    assert (decompressed(png(grey)) == grey[..., None]).all()
    assert (decompressed(png(np.dstack([sample, grey]))) == sample).all()
    palette = Image.fromarray(sample).quantize(16)
    assert (decompressed(png(palette)) == np.array(palette.convert("RGB"))).all()


@pytest.mark.parametrize(
    ("image_format", "text"),
    [
        ("16UC1; compressedDepth png", "depth"),
        ("16UC1; png compressed ", "depth"),
        ("32FC1; compressedDepth", "depth"),
        ("bayer_gbrg8; jpeg compressed ", "Bayer"),
    ],
)
def test_depth_and_compressed_mosaics_are_refused(sample, image_format, text):
    with pytest.raises(ImageError, match=text):
        decompressed(png(sample), image_format)


def test_a_mosaic_that_was_made_grey_before_compression_is_grey(sample):
    """The format that compressed_image_transport writes for Bayer cameras; older versions name no "mono8"."""
    grey = np.asarray(Image.fromarray(sample).convert("L"))
    for image_format in ("bayer_rggb8; jpeg compressed mono8", "mono8; jpeg compressed mono8"):
        found = decompressed(jpeg(grey), image_format)
        assert np.abs(found[..., 0].astype(int) - grey).mean() < 4
        assert (found[..., 0] == found[..., 2]).all()


def png_of_size(width: int, height: int, bits: int = 8) -> bytes:
    """A PNG that declares any size, without the pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + bytes(64)


def jpeg_of_size(width: int, height: int) -> bytes:
    """A JPEG that declares any size: the true one with its frame header changed."""
    data = bytearray(jpeg(np.zeros((8, 8, 3), np.uint8)))
    start = data.index(b"\xff\xc0")
    data[start + 5 : start + 9] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "found no data"),
        (b"GIF89a" + bytes(20), "that begin with 47 49 46"),
        (b"\0\0\0\1\x67" + bytes(20), "a video stream .* image_transport to compressed"),
        (b"\xff\xd8\xff\xd9", "JPEG of 4 bytes is damaged"),
        (b"\x89PNG\r\n\x1a\n", "PNG of 8 bytes is damaged"),
        (png_of_size(50000, 50000), "found size 50000 x 50000, expected at most"),
        (png_of_size(0, 10), "found size 0 x 10"),
        (png_of_size(10, 10), "damaged"),
        (png_of_size(10, 10, bits=16), "16 bits a channel"),
        (jpeg_of_size(60000, 60000), "found size 60000 x 60000, expected at most"),
        (jpeg_of_size(12000, 12000), f"{MAX_PIXELS} pixels"),
        (jpeg_of_size(800, 600), "damaged"),
    ],
)
def test_damaged_or_oversized_files_are_named(data, text):
    with pytest.raises(ImageError, match=text):
        decompressed(data)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def two_headers(first: tuple[int, ...], second: tuple[int, ...]) -> bytes:
    """A PNG that can be decoded by its second header, (width, height, bits, colour type)."""
    width, height, bits, colours = second
    headers = b"".join(chunk(b"IHDR", struct.pack(">IIBBBBB", *each, 0, 0, 0)) for each in (first, second))
    row = bytes(1 + width * bits // 8 * (3 if colours == 2 else 1))
    return b"\x89PNG\r\n\x1a\n" + headers + chunk(b"IDAT", zlib.compress(row * height)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("second", [(90, 90, 8, 2), (10, 10, 16, 2), (10, 10, 16, 0)])
def test_a_png_with_two_headers_is_refused(second: tuple[int, ...]) -> None:
    assert decompressed(two_headers((10, 10, 8, 2), (10, 10, 8, 2))).shape == (10, 10, 3)
    with pytest.raises(ImageError, match="its headers differ"):
        decompressed(two_headers((10, 10, 8, 2), second))


def test_cmyk_is_refused(sample):
    buffer = io.BytesIO()
    Image.fromarray(sample).convert("CMYK").save(buffer, "JPEG")
    with pytest.raises(ImageError, match="expected YCbCr or greyscale"):
        decompressed(buffer.getvalue())


# Whatever arrives: a frame or an ImageError, and nothing else

SMALL = np.random.default_rng(0).integers(0, 256, (10, 12, 3), np.uint8)
MESSAGES = {
    "raw": (decode_image, encode_image(SMALL, 5, "cam", step=40)),
    "yuv": (decode_image, encode_image(SMALL[..., :2], 5, "cam", "yuv422")),
    "jpeg": (decode_compressed, encode_compressed(jpeg(SMALL), 5, "cam", "rgb8; jpeg compressed bgr8")),
    "png": (decode_compressed, encode_compressed(png(SMALL), 5, "cam", "png")),
}


def try_decode(decode, cdr: bytes) -> np.ndarray | None:
    try:
        image = decode(cdr).image
    except ImageError:
        return None
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.shape[2] == 3
    assert image.size > 0
    return image


@pytest.mark.parametrize("decode", [decode_image, decode_compressed])
@settings(max_examples=200, deadline=None)
@given(head=st.sampled_from([b"", b"\0\0\0\0", b"\0\1\0\0"]), body=st.binary(max_size=120))
def test_any_bytes(decode, head, body):
    try_decode(decode, head + body)


@pytest.mark.parametrize("name", MESSAGES)
@settings(max_examples=150, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_damage(name, edits):
    decode, cdr = MESSAGES[name]
    damaged = bytearray(cdr)
    for position, value in edits:
        damaged[position % len(cdr)] = value
    try_decode(decode, bytes(damaged))


@pytest.mark.parametrize("name", MESSAGES)
def test_every_truncation_of_the_message(name):
    decode, cdr = MESSAGES[name]
    assert try_decode(decode, cdr) is not None
    for length in range(len(cdr)):
        assert try_decode(decode, cdr[:length]) is None, length


@pytest.mark.parametrize("make", [jpeg, png])
def test_every_truncation_of_the_file_is_refused_or_harmless(make):
    data = make(SMALL)
    whole = decompressed(data)
    refused = 0
    for length in range(len(data)):
        image = try_decode(decode_compressed, encode_compressed(data[:length], 0, "cam", "x"))
        refused += image is None
        assert image is None or (image == whole).all(), length
    assert refused > 0.9 * len(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [*range(10), None])
def test_an_exif_orientation_turns_the_image_as_opencv_does(sample, kind, orientation):
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(sample).save(buffer, kind, exif=exif, comment=b"before it")
    found = decompressed(buffer.getvalue())
    expected = cv2.imdecode(np.frombuffer(buffer.getvalue(), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= 3  # another decoder of JPEG
    assert found.flags.c_contiguous


def test_damaged_exif_data_are_ignored(sample):
    buffer = io.BytesIO()
    Image.fromarray(sample).save(buffer, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decompressed(buffer.getvalue()).shape == sample.shape


WIDE = [name for name in ENCODINGS if name.startswith("bayer") or name.endswith("16")]
COLOURS = {"red": (200, 0, 0), "green": (0, 150, 0), "blue": (0, 0, 100), "grey": (90, 90, 90)}


def mosaic(rgb: np.ndarray, order: str) -> np.ndarray:
    """What a sensor with the filters ``order`` (upper left two by two, row by row) sees."""
    seen = np.zeros(rgb.shape[:2], rgb.dtype)
    for place, colour in enumerate(order):
        row, column = divmod(place, 2)
        seen[row::2, column::2] = rgb[row::2, column::2, "rgb".index(colour)]
    return seen


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("order", ["rggb", "bggr", "gbrg", "grbg"])
def test_one_colour_through_a_mosaic_is_that_colour(colour: str, order: str) -> None:
    expected = np.full((8, 12, 3), COLOURS[colour], np.uint8)
    image = decode_image(encode_image(mosaic(expected, order)[..., None], 1, "cam", f"bayer_{order}8")).image
    np.testing.assert_array_equal(image, expected)


def with_16_bits(serialize, values: np.ndarray, encoding: str, big_endian: bool) -> bytes:
    data = values.astype(">u2" if big_endian else "<u2").tobytes()
    height, width = values.shape[:2]
    fields = {"height": height, "width": width, "encoding": encoding, "is_bigendian": int(big_endian)}
    return serialize("Image", **fields, step=len(data) // height, data=data)


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("encoding", ["rgb16", "bgr16", "rgba16", "bgra16"])
def test_16_bits_become_8(serialize, encoding: str, big_endian: bool) -> None:
    rgb = np.random.default_rng(2).integers(0, 65536, (6, 8, 3), np.uint16)
    values = rgb if encoding.startswith("rgb") else rgb[..., ::-1]
    if encoding.endswith("a16"):
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=2)
    image = decode_image(with_16_bits(serialize, values, encoding, big_endian)).image
    assert np.abs(image - rgb / 257.0).max() <= 0.5
    assert image.max() > 200


@pytest.mark.parametrize("big_endian", [False, True])
def test_a_mosaic_of_16_bits(serialize, big_endian: bool) -> None:
    expected = np.full((8, 8, 3), COLOURS["red"], np.uint16) * 257
    cdr = with_16_bits(serialize, mosaic(expected, "grbg"), "bayer_grbg16", big_endian)
    np.testing.assert_array_equal(decode_image(cdr).image, expected // 257)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WIDE), st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
def test_any_size_gives_an_image_of_that_size(encoding: str, height: int, width: int, padding: int) -> None:
    raw = np.full((height, width, ENCODINGS[encoding].pixel_bytes), 7, np.uint8)
    step = raw.shape[1] * raw.shape[2] + padding
    image = decode_image(encode_image(raw, 1, "cam", encoding, step=step)).image
    assert (image.shape, image.dtype) == ((height, width, 3), np.uint8)


# Stray bytes and scans


@pytest.fixture(scope="module")
def smooth() -> np.ndarray:
    noise = np.random.default_rng(1).integers(0, 255, (240, 320, 3), np.uint8)
    return cv2.GaussianBlur(noise, (9, 9), 0)


def markers(data: bytes) -> list[int]:
    """Where the restart markers and the end of a file with one scan are."""
    wanted = {bytes((0xFF, marker)) for marker in (*range(0xD0, 0xD8), 0xD9)}
    return [at for at in range(data.index(b"\xff\xda"), len(data) - 1) if data[at : at + 2] in wanted]


LAYOUTS = [
    {"restart_marker_rows": 1},
    {"restart_marker_blocks": 7, "subsampling": "4:2:2"},
    {"restart_marker_blocks": 1000, "subsampling": "4:4:4"},
    {},
]


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stray_bytes_before_markers_change_no_pixel(smooth, layout: dict, grey: bool, capfd) -> None:
    clean = jpeg(smooth[..., 0] if grey else smooth, quality=90, **layout)
    expected, rng = decompressed(clean), np.random.default_rng(3)
    for stray in (b"\0", b"\0" * 9, bytes(rng.integers(0, 255, 5, np.uint8)), b"\x7f\xff\0\x11"):
        dirty = clean
        for at in reversed(markers(clean)[::3]):
            dirty = dirty[:at] + stray + dirty[at:]
        assert (decompressed(dirty) == expected).all()
        opencv = cv2.imdecode(np.frombuffer(dirty, np.uint8), cv2.IMREAD_COLOR_RGB)
        assert (opencv == expected).all()
    capfd.readouterr()  # OpenCV prints libjpeg's warnings


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_stray_bytes_do_not_hide_lost_data(smooth, layout: dict) -> None:
    clean = jpeg(smooth, quality=90, **layout)
    places = markers(clean)
    dirty = clean[: places[0]] + bytes(9) + clean[places[0] :]
    places = [at + 9 for at in places]
    assert decompressed(dirty).shape == smooth.shape
    damaged = {
        "cut": dirty[: len(dirty) // 2],
        "cut and ended": dirty[: len(dirty) // 2] + b"\xff\xd9",
        "the end is missing": dirty[:-200],
        "an interval is missing": dirty[: places[2]] + dirty[places[3] :],
        "data are missing within an interval": dirty[: places[4] - 60] + dirty[places[4] - 20 :],
    }
    for name, data in damaged.items():
        with pytest.raises(ImageError, match=r"JPEG of .* is damaged"):
            print(name, decompressed(data).shape)


def test_a_file_of_thousands_of_scans_is_refused_before_they_are_decoded() -> None:
    data = jpeg(np.zeros((1020, 1024, 3), np.uint8), progressive=True)
    last = data.rindex(b"\xff\xda")
    hostile = data[:-2] + data[last:-2] * 3000 + b"\xff\xd9"
    assert decompressed(data).shape == (1020, 1024, 3)
    began = time.thread_time()
    with pytest.raises(ImageError, match=r"30\d\d scans, allowed 64"):
        decompressed(hostile)
    assert time.thread_time() - began < 0.1
