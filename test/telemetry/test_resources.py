import os
import subprocess
import sys
import threading

from vla_ros.telemetry.resources import process_resources


def test_a_thread_and_a_descriptor_are_counted() -> None:
    before = process_resources()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    descriptor = os.open("/dev/null", os.O_RDONLY)
    after = process_resources(os.getpid())
    os.close(descriptor)
    done.set()
    thread.join()
    assert after["threads"] == before["threads"] + 1
    assert after["descriptors"] == before["descriptors"] + 1
    assert 10 * 2**20 < after["resident_bytes"] < 2**36


def test_a_process_that_has_ended_uses_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process_resources(process.pid) == {}
