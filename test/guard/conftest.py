"""Finds the demo's arm and the arms that sag, lag and stick, in test/control."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "control"):
    sys.path.append(str(folder))
