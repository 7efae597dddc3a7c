"""Coverage-guided fuzzing with atheris: ``python fuzz/coverage_guided.py TARGET [libFuzzer arguments]``.

It needs ``pip install atheris``. Seeds come from ``fuzz/corpus``; new inputs are kept in a temporary folder.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["vla_ros", "rosbags"]):
    from targets import TARGETS, only_our_errors, seeds

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    """Fuzz one target until it fails or reaches a limit (``-runs=100000``, ``-max_total_time=60``)."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        raise SystemExit(f"usage: {sys.argv[0]} {{{','.join(TARGETS)}}} [libFuzzer arguments]")
    name = sys.argv[1]
    folder = Path(tempfile.mkdtemp(prefix=f"atheris_{name}_"))
    for number, seed in enumerate(seeds(name, CORPUS)):
        (folder / f"seed_{number}").write_bytes(seed)
    target = TARGETS[name]
    # Instrumented code is several times as slow; run.py asks for a second.
    limits = ["-timeout=10", "-rss_limit_mb=1024", f"-artifact_prefix={folder}/"]
    arguments = [sys.argv[0], str(folder), *limits, *sys.argv[2:]]
    atheris.Setup(arguments, lambda data: only_our_errors(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
