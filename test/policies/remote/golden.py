"""The recorded conversations of test/data/wire: messages of real servers and clients, and their contents."""

import base64
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from vla_ros.policies.remote.messages import nd, npy, openpi

FOLDER = Path(__file__).parents[2] / "data" / "wire"
LAYOUTS: dict[str, Callable[[Any], Any]] = {"openpi": openpi, "npy": npy, "msgpack-numpy": nd}


@dataclass(frozen=True)
class Recorded:
    """One message: its sender, its bytes, and its content as a tree (None if it is not valid msgpack)."""

    family: str
    scenario: str
    number: int
    sender: str
    kind: str
    payload: bytes
    meaning: Any = None
    text: str = ""

    @property
    def frame(self) -> bytes | str:
        return self.payload.decode() if self.kind == "text" else self.payload

    def __str__(self) -> str:
        return f"{self.family}/{self.scenario}/{self.number}"


@cache
def recorded(family: str) -> tuple[Recorded, ...]:
    """All messages of a family of servers, in order."""
    found, scenario = [], ""
    for line in gzip.decompress((FOLDER / f"{family}.jsonl.gz").read_bytes()).splitlines():
        entry = json.loads(line)
        if "scenario" in entry:
            scenario = entry["scenario"]
            continue
        payload = base64.b64decode(entry.get("payload", ""))
        message = family, scenario, entry["n"], entry["dir"], entry["kind"], payload
        found.append(Recorded(*message, entry.get("meaning"), entry.get("text", "")))
    return tuple(found)


def whole(*families: str) -> list[Recorded]:
    """Messages of valid msgpack."""
    messages = [message for family in families for message in recorded(family)]
    return [each for each in messages if each.meaning is not None and each.kind in ("binary", "zmtp-frame")]


def one(family: str, scenario: str, number: int) -> Recorded:
    return next(each for each in recorded(family) if (each.scenario, each.number) == (scenario, number))


def nodes(meaning: Any) -> Iterator[tuple[str, Any]]:
    """Every node of a tree: its kind and value."""
    [(kind, value)] = list(meaning.items())[:1]
    yield kind, value
    if kind == "map":
        for key, entry in value:
            yield from nodes(key)
            yield from nodes(entry)
    elif kind == "list":
        for entry in value:
            yield from nodes(entry)


def layout_of(meaning: Any) -> str:
    """The layout of a message's arrays."""
    found = [value.get("layout", "openpi") for kind, value in nodes(meaning) if kind in ("ndarray", "npscalar")]
    return found[0] if found else "openpi"


def agrees(value: Any, meaning: Any) -> bool:
    """True if a decoded value equals the recorded tree."""
    [(kind, content)] = list(meaning.items())[:1]
    if kind == "map":
        pairs = [(key["str"] if "str" in key else base64.b64decode(key["bin"]), entry) for key, entry in content]
        return list(value) == [key for key, _ in pairs] and all(agrees(value[key], e) for key, e in pairs)
    if kind == "list":
        return len(value) == len(content) and all(map(agrees, value, content))
    if kind == "ndarray":
        same = value.dtype.str == content["dtype"] and list(value.shape) == content["shape"]
        return same and sha256(value.tobytes()).hexdigest() == content["sha256"]
    if kind in ("npgeneric", "npscalar"):
        data = content["data"] if kind == "npgeneric" else {"float": content["value"]}
        return value.dtype.str == content["dtype"] and value.item() == next(iter(data.values()))
    if kind == "bin":
        return value == base64.b64decode(content)
    if kind == "nil":
        return value is None
    if kind == "float" and isinstance(content, str):
        return str(value) == content
    return type(value) is {"str": str, "int": int, "float": float, "bool": bool}[kind] and value == content


def pattern(text: str, shape: list[int]) -> np.ndarray[Any, Any]:
    """The image that recordings call ``pattern(START)``."""
    i = np.arange(np.prod(shape))
    start = int(text.removeprefix("pattern(").removesuffix(")"))
    return ((17 * i + start + i // 251) % 256).astype(np.uint8).reshape(shape)


def built(meaning: Any) -> Any:
    """A value built from the recorded tree: patterns and values, not the recorded bytes."""
    [(kind, content)] = list(meaning.items())[:1]
    if kind == "map":
        return {key["str"]: built(entry) for key, entry in content}
    if kind == "list":
        return [built(entry) for entry in content]
    if kind == "nil":
        return None
    if kind == "ndarray":
        if content.get("made_by", "").startswith("pattern("):
            return pattern(content["made_by"], content["shape"])
        return np.array(content["values"], dtype=content["dtype"]).reshape(content["shape"])
    return content
