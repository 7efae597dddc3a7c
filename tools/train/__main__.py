"""``python -m tools.train``: train the demo's checkpoint from scratch."""

import argparse
import sys

from tools.train import cli
from vla_ros.errors import VlaRosError

parser = argparse.ArgumentParser(
    prog="python -m tools.train", description=cli.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
cli.add_arguments(parser)
try:
    sys.exit(cli.run(parser.parse_args()))
except VlaRosError as error:
    sys.exit(f"{parser.prog}: {error}")
except KeyboardInterrupt:
    sys.exit(130)
