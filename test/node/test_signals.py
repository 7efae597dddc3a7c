"""A signal that arrives just before a long call into C, in a process of its own, is answered.

Regression pinned: the C handler ran before the call began, so the call was not interrupted, and Python's handler
would have run only after it.
"""

import signal
import subprocess
import sys
import time

import pytest

BEFORE_A_CALL = """
import ctypes, signal, sys, time
from itertools import chain
from vla_ros.node.signals import Signals

number, interrupts = int(sys.argv[1]), sys.argv[2] == "True"
signals = Signals(interrupts=interrupts)
# No step of Python lies between the signal and the call: neither does raise() look for handlers, nor chain().
together = chain(map(getattr(ctypes.CDLL(None), "raise"), [number]), map(time.sleep, [30]))
try:
    list(together)
except KeyboardInterrupt:
    signals.ending()
    time.sleep(1.5)  # in which nothing may be raised
    print(signals.name)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("interrupts", [True, False])
def test_a_signal_just_before_a_long_call_is_answered(number: signal.Signals, interrupts: bool) -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", BEFORE_A_CALL, str(int(number)), str(interrupts)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"{number.name}\n"), ended.stderr
    assert time.monotonic() - began < 25, "the call ended by itself"
