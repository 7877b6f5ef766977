"""Several workers share the cores, and start programs that must obey Ctrl-C."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# Hypothesis would fail a test for an example that took 200 ms, or the drawing of ten that took a second: that
# is the machine's. The same examples every time: a failure is of what was changed.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread of torch in each, or they wait for each other; read when torch is first imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As in a worker, and behind a shell's `&`: what is started here would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
