"""Fuzz with randomly damaged seeds, without atheris: ``python fuzz/run.py`` (``make fuzz``).

Every input must be accepted, or refused with our own error, within a second and without memory growth. A failing
input is written to a file whose name is printed, and the exit status is 1.
"""

import argparse
import faulthandler
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from targets import TARGETS, only_our_errors, seeds

CORPUS = Path(__file__).parent / "corpus"
COUNTS = {
    "message": 100_000,
    "image": 10_000,
    "compressed": 10_000,
    "bag": 10_000,
    "request": 20_000,
    "answer": 20_000,
}
_HANG = 1.0  # s of processor time, so that other load does not count
_GROWTH = 256 << 20  # bytes
_NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)


class Hang(BaseException):
    """An input took more than a second of processor time; a BaseException, so that no handler catches it."""


def damage(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Apply one to four kinds of damage; the first byte, which selects a variant, is kept in half of the cases."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not damaged:
            break
        at = rng.randrange(min(len(damaged), 128) if rng.random() < 0.5 else len(damaged))
        kind = rng.randrange(8)
        if kind == 0:
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            damaged[at] = rng.randrange(256)
        elif kind == 2:
            width = rng.choice((2, 4, 8))
            number = rng.choice(_NUMBERS) & (256**width - 1)
            damaged[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
        elif kind == 3:
            del damaged[at:]
        elif kind == 4:
            del damaged[at : at + rng.randrange(1, 64)]
        elif kind == 5:
            damaged[at:at] = rng.randbytes(rng.randrange(1, 64))
        elif kind == 6:
            begin = rng.randrange(len(damaged))
            damaged[at:at] = damaged[begin : begin + rng.randrange(1, 256)]
        else:
            begin = rng.randrange(len(other)) if other else 0
            damaged[at : at + 64] = other[begin : begin + 64]
    if data and damaged and rng.random() < 0.5:
        damaged[0] = data[0]
    return bytes(damaged)


def fuzz(name: str, count: int, seed: int) -> list[str]:
    """Run one target; returns the failures, each with its input file."""
    rng, sources, failures = random.Random(f"{name} {seed}"), seeds(name, CORPUS), []
    failures += [f"{name}: a seed was refused" for source in sources if not only_our_errors(TARGETS[name], source)]
    before, slowest, accepted, began = _peak(), 0.0, 0, time.monotonic()
    for _ in range(count):
        data = damage(rng.choice(sources), rng.choice(sources), rng)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _HANG)
        try:
            accepted += only_our_errors(TARGETS[name], data)
        except (Exception, Hang) as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            with tempfile.NamedTemporaryFile(prefix=f"fuzz_{name}_", delete=False) as file:
                file.write(data)
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}; input: {file.name}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - start)
    growth = _peak() - before
    if growth > _GROWTH:
        failures.append(f"{name}: the process grew by {growth >> 20} MiB")
    figures = f"{accepted:>6} accepted, {count - accepted:>6} refused, {len(failures)} failed"
    growth_text = f"grew {growth / 2**20:.1f} MiB, {time.monotonic() - began:.0f} s, seed {seed}"
    print(f"{name:<12} {count:>7} inputs, {figures}; slowest {1e3 * slowest:.1f} ms, {growth_text}", flush=True)
    return failures


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _hang(number: int, frame: object) -> None:
    raise Hang(f"more than {_HANG:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="*", choices=[*TARGETS, []], help="default: all")
    parser.add_argument("--count", type=int, help=f"inputs per target (default: {COUNTS})")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGPROF, _hang)
    failures = [
        text for name in given.target or TARGETS for text in fuzz(name, given.count or COUNTS[name], given.seed)
    ]
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
