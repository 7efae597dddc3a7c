"""Skips the tests of this folder if msgpack is not installed."""

import pytest

pytest.importorskip("msgpack", reason="the library msgpack is not installed (extra 'remote')")
