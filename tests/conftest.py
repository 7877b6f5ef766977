"""Several workers share the cores, and start programs that must obey Ctrl-C."""

from __future__ import annotations

import os
import signal

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread of torch in each, or they wait for each other; read when torch is first imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A worker ignores SIGINT, and what it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
