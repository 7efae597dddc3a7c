"""Says why a library that is written in C++ failed: such libraries tell standard error, and raise a sentence."""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")

_CONSOLE = re.compile(r"^(?:\x1b\[[0-9;]*m)*(?:\[?ERROR\]?|Error|Warning)?:?\s*", re.IGNORECASE)
_PLACE = re.compile(r"^\s*at line \d+ in .*$|\x1b\[[0-9;]*m")  # of the library's own source
_MOST = 300  # characters


def with_reason(call: Callable[[], Result]) -> Result:
    """Return what ``call`` returns; a ValueError or RuntimeError gets what was written to standard error."""
    try:
        saved = os.dup(2)
    except OSError:  # standard error is closed
        return call()
    failed: ValueError | RuntimeError | None = None
    with tempfile.TemporaryFile() as file:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            result = call()
        except (ValueError, RuntimeError) as error:
            failed = error
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        written = file.read()
    if failed is None:
        with suppress(OSError):
            os.write(2, written)
        return result
    raise type(failed)(_joined(str(failed), written.decode("utf-8", "replace"))) from None


def _joined(text: str, written: str) -> str:
    lines = (_CONSOLE.sub("", _PLACE.sub("", line)).strip() for line in written.splitlines())
    reason = "; ".join(dict.fromkeys(line for line in lines if line))
    reason = "".join(each if each.isprintable() else " " for each in reason)[:_MOST]
    return f"{reason}; {text}" if reason else text
