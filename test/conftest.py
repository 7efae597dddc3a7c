"""Settings of the whole suite."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A busy machine is no failure of the property; CI looks at the same examples each time, developers at new ones.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("suite"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "suite")

# A shell starts background jobs with SIGINT ignored, and children inherit that: what the tests start must hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
