"""Several workers share the cores: one thread of torch in each, or they wait for each other."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, here and in children
