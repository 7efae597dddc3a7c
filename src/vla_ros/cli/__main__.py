"""``python -m vla_ros.cli``."""

import sys

from vla_ros.cli.main import main

sys.exit(main())
