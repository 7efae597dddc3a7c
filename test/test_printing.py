"""A log that nobody reads keeps nobody from working."""

import os
import subprocess
import sys

LINES = 5_000
PRINTS = f"""
import sys, time
from vla_ros.process import Printing
printing, lost = Printing(), 0
for number in range({LINES}):
    if printing.has_room():
        print(f"line {{number:09d}} " + "x" * 80, file=sys.stderr, flush=True)
    else:
        lost += 1
print(lost)
"""


def test_printing_does_not_wait_and_what_has_room_arrives_whole() -> None:
    reads, writes = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", PRINTS], stdout=writes, stderr=writes)
    os.close(writes)
    assert process.wait(30) == 0, "nobody has read a line"
    with os.fdopen(reads) as log:
        lines = log.read().splitlines()
    assert len(lines) > 500
    assert all(line.startswith("line ") and line.endswith("x" * 80) for line in lines[:-1])
    assert len(lines) < LINES


def test_what_is_printed_last_arrives_after_the_process_has_ended() -> None:
    code = "from vla_ros.process import Printing; p = Printing(); print('the last words')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert "the last words" in done.stderr
