"""Encodes and strictly decodes msgpack messages that contain arrays.

Policy servers use four layouts for arrays: ``openpi`` writes ``{__ndarray__, data, dtype, shape}`` with bin keys,
``str_keys`` (vla-eval) the same with str keys; ``npy`` (GR00T up to the N1.7 tag) writes a .npy file; ``nd`` (the
package msgpack-numpy, used by GR00T's main branch) writes ``{nd, type, kind, shape, data}``. All can be read, with
bin or str keys. Nothing received is executed: pickles, object arrays and extension types are rejected.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from vla_ros.errors import VlaRosError

_MAX_ITEMS = 1 << 16  # entries of all lists and maps of a message; the numbers of arrays do not count
_MAX_DEPTH = 12
_MAX_AXES = 8
_MAX_TEXT = 1 << 20
_NPY_HEADER = 256  # bytes; np.save pads the headers of numeric arrays to 128
_TEXT = re.compile(r"([<>=|]?)([US])\d{1,7}", re.ASCII)  # dtypes of fixed-width strings
_KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_DTYPES = {order + kind: np.dtype(order + kind) for kind in _KINDS for order in ("", "<", ">", "|", "=")}


class WireError(VlaRosError):
    """A peer's message is damaged, hostile or violates its protocol."""


AnyArray = NDArray[Any]
_Layout = Callable[["AnyArray | np.generic"], Any]
"""Converts an array or a NumPy scalar to a map; raises TypeError if the layout cannot represent it."""


def openpi(value: AnyArray | np.generic) -> Any:
    """Convert an array to the layout of openpi's client and server."""
    dtype = _known(value.dtype.str).str
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": _bytes(value), b"dtype": dtype, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": dtype}


def npy(value: AnyArray | np.generic) -> Any:
    """Convert an array to a .npy file, the layout of GR00T up to the N1.7 tag."""
    if isinstance(value, np.generic):
        raise TypeError("a NumPy scalar cannot be written as a .npy file")
    _known(value.dtype.str)
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def nd(value: AnyArray | np.generic) -> Any:
    """Convert an array to msgpack-numpy's layout, which GR00T's main branch uses."""
    dtype = _known(value.dtype.str).str
    if isinstance(value, np.ndarray):
        return {b"nd": True, b"type": dtype, b"kind": b"", b"shape": value.shape, b"data": _bytes(value)}
    return {b"nd": False, b"type": dtype, b"data": value.tobytes()}


def str_keys(value: AnyArray | np.generic) -> Any:
    """Convert an array to openpi's layout with str keys, as vla-eval writes it, and a scalar to a plain number."""
    dtype = _known(value.dtype.str).str
    if isinstance(value, np.ndarray):
        return {"__ndarray__": True, "data": _bytes(value), "dtype": dtype, "shape": value.shape}
    return value.item()


def _bytes(value: AnyArray) -> bytes | memoryview:
    """Return an array's bytes in C order, without a copy if possible."""
    return value.data.cast("B") if value.flags.c_contiguous and value.size and value.ndim else value.tobytes()


def pack(message: Any, layout: _Layout = openpi) -> bytes:
    """Encode plain data and numeric or boolean arrays; raises WireError if there is anything else."""

    def encoded(value: Any) -> Any:
        if isinstance(value, (np.ndarray, np.generic)):
            return layout(value)
        raise TypeError(f"{type(value).__name__} cannot be sent in a message")

    try:
        packed: bytes = msgpack.packb(message, default=encoded)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a message cannot be encoded: {error}") from None
    return packed


def unpack(data: bytes, most: int = _MAX_ITEMS) -> Any:
    """Decode one message of at most ``most`` entries; arrays are read-only views of ``data``.

    Raises WireError if the message is damaged, is nested too deeply, has too many entries, or contains an array
    that is not numeric or boolean or does not have the stated size.
    """
    items = 0

    def count(entries: list[Any]) -> list[Any]:
        nonlocal items
        items += len(entries)
        if items > most:
            raise WireError(f"found a message with more than {most} entries")
        return entries

    def revive(pairs: list[tuple[Any, Any]]) -> Any:
        found = dict(count(pairs))
        if len(found) < len(pairs):
            raise WireError("found a map with a duplicate key")
        return _revived(found)

    try:
        message = msgpack.unpackb(
            data,
            object_pairs_hook=revive,
            list_hook=count,
            ext_hook=_no_extension,
            timestamp=1,
            max_str_len=_MAX_TEXT,
            max_array_len=most,
            max_map_len=most,
        )
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise WireError(f"not valid msgpack: {str(error)[:200] or type(error).__name__}") from None
    if isinstance(message, (dict, list)):
        _check_depth(message, _MAX_DEPTH - 1)
    return message


def _text(name: str, shape: Any, data: Any) -> str | None:
    """Return the one text of an array of NumPy's fixed-width strings (``<U15``, ``|S15``); None for other dtypes.

    A client that passes an array where a text is meant sends this, such as openpi's for ``np.array("pick")``.
    """
    found = _TEXT.fullmatch(name)
    if found is None:
        return None
    if shape not in ([], [1]) or not isinstance(data, bytes) or len(data) > 4 * _MAX_TEXT:
        raise WireError(f"found an array of {name} with the shape {str(shape)[:80]}, expected one text")
    coding = "utf-8" if found[2] == "S" else "utf-32-be" if found[1] == ">" else "utf-32-le"
    try:
        return data.decode(coding).rstrip("\0")
    except UnicodeDecodeError as error:
        raise WireError(f"found an array of {name} that is no text ({error.reason})") from None


def _array_or_text(kind: Any, shape: Any, data: Any) -> AnyArray | str:
    text = _text(_name(kind), shape, data)
    return array(kind, shape, data) if text is None else text


def array(kind: Any, shape: Any, data: Any) -> AnyArray:
    """Build an array from a dtype's name, a shape and bytes in C order; raises WireError if they do not match."""
    dtype = _known(kind)
    lengths = shape if isinstance(shape, list) and len(shape) <= _MAX_AXES else [-1]
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise WireError(
            f"found an array of shape {str(shape)[:80]}, expected up to {_MAX_AXES} lengths of 0 or more"
        )
    if not isinstance(data, (bytes, memoryview)):
        raise WireError(f"found array data of type {type(data).__name__}, expected bytes")
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise WireError(f"found an array {dtype.str} {list(shape)} with {len(data)} bytes, expected {needed}")
    return np.frombuffer(data, dtype).reshape(shape)


def _known(kind: Any) -> np.dtype[Any]:
    """Return the dtype named ``kind``, a boolean, integer or float of up to 8 bytes."""
    if (name := _name(kind)) in _DTYPES:
        return _DTYPES[name]
    raise WireError(f"found an array of dtype {str(kind)[:40]!r}, expected booleans, integers or floats")


def _name(kind: Any) -> str:
    """Return the name of a dtype or kind, which may be bytes; "" if it is neither text nor bytes."""
    name = kind.decode("ascii", "replace") if isinstance(kind, bytes) else kind
    return name if isinstance(name, str) else ""


def _kind(dtype: Any) -> str:
    """Return NumPy's letter for the kind of a dtype that messages may have; raises WireError for another dtype."""
    text = _TEXT.fullmatch(_name(dtype))
    return _known(dtype).kind if text is None else text[2]


def _revived(entries: dict[Any, Any]) -> Any:
    """Convert a map that represents an array to the array; return other maps unchanged."""
    if len(entries) > 5:
        return entries

    def get(key: str) -> Any:
        return entries.get(key.encode(), entries.get(key))

    if get("__ndarray__") is not None:
        return _array_or_text(get("dtype"), get("shape"), get("data"))
    if get("__npgeneric__") is not None:
        if isinstance(get("data"), str) and _TEXT.fullmatch(_name(get("dtype"))):
            return get("data")
        return _scalar(get("dtype"), get("data"))
    if get("__ndarray_class__") is not None:
        return _from_npy(get("as_npy"))
    marker = get("nd")
    if marker is None or get("type") is None:
        return entries
    kind, type_ = get("kind"), get("type")
    if kind not in (None, b"", "") and (_name(kind) in ("O", "V") or _name(kind) != _kind(type_)):
        raise WireError(
            f"found an array of kind {str(kind)[:40]} and type {str(type_)[:40]!r}; objects and records are not "
            "accepted"
        )
    if marker is True:
        return _array_or_text(get("type"), get("shape"), get("data"))
    return array(get("type"), [], get("data"))[()]


def _scalar(kind: Any, value: Any) -> np.generic:
    dtype = _known(kind)
    if not isinstance(value, (bool, int, float)):
        raise WireError(f"found a number of dtype {dtype.str} with a value of type {type(value).__name__}")
    # NumPy 1 would wrap it
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise WireError(f"found a number of dtype {dtype.str} with the value {value!r}")
    try:
        scalar: np.generic = dtype.type(value)
    except (OverflowError, ValueError) as error:
        raise WireError(f"found a number of dtype {dtype.str}: {error}") from None
    return scalar


def _from_npy(data: Any) -> AnyArray:
    """Read an array from a .npy file of format 1.0, as written by ``np.save``."""
    try:
        header = io.BytesIO(data[:_NPY_HEADER])
        if np.lib.format.read_magic(header) != (1, 0):
            raise ValueError("expected format 1.0")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(header)
    except Exception as error:  # numpy raises many kinds
        raise WireError(f"found an array that is not a .npy file ({str(error)[:80]})") from None
    rest, lengths = memoryview(data)[header.tell() :], list(shape)
    return array(dtype.str, lengths[::-1], rest).T if fortran else array(dtype.str, lengths, rest)


def _no_extension(code: int, data: bytes) -> Any:
    raise WireError(f"found a msgpack extension of type {code}; messages contain only plain data")


def _check_depth(value: dict[Any, Any] | list[Any], left: int) -> None:
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            if not left:
                raise WireError(f"found a message nested more than {_MAX_DEPTH} levels deep")
            _check_depth(item, left - 1)


def finite(value: Any, name: str) -> NDArray[np.float64]:
    """Convert ``value`` to finite float64 numbers; raises WireError if that fails."""
    if isinstance(value, list):
        try:
            value = np.array(value)  # without a dtype: float64 would accept strings of digits
        except ValueError as error:
            raise WireError(f"{name}: not an array of numbers: {str(error)[:120]}") from None
    elif type(value) in (int, float):
        value = np.float64(value)
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "biuf":
        raise WireError(f"{name}: {described(value)}, expected numbers")
    # Checked before the conversion, which may set a floating-point flag on a NaN.
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        bad = np.count_nonzero(~np.isfinite(value))
        raise WireError(f"{name}: {bad} of {value.size} numbers are not finite")
    return np.asarray(value, dtype=np.float64)


def text_map(value: Any, name: str) -> Mapping[str, Any]:
    """Return ``value``; raises WireError unless it is a map with string keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise WireError(f"{name} is {described(value)}, expected a map with string keys")
    return value


def described(value: Any) -> str:
    """Describe a value for an error: its dtype and shape, first keys, text or type."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a map with the keys {[str(key)[:40] for key in list(value)[:8]]}"
    if isinstance(value, str):
        return f"the text {value[:200]!r}"
    return type(value).__name__


def decode_json(data: bytes | str, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Read JSON; ``hook`` converts each object. Raises WireError for anything else, NaN and Infinity included."""
    try:
        return json.loads(data, object_hook=hook, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not valid JSON: {str(error)[:200]}") from None


def _refused(text: str) -> Any:
    raise WireError(f"found the number {text}, expected a finite number")
