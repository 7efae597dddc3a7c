"""``python -m vla_ros.guard``: started by a node."""

import sys

from vla_ros.guard.process import main

sys.exit(main(sys.argv[1:]))
