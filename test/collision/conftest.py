"""Test modules are imported by path: without this, they would not find ``tiny_robot``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
