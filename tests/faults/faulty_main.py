"""The real trainer, in which a test switches faults on and off while it runs. Part of a test's release only.

Beside the runs' folder lies `fault`: "KIND WHAT", where KIND is the beginning of a thread's name and WHAT is
`raise`, `hang` (until the file changes) or `hold` (the interpreter lock, for five seconds); and `clock`: by
how many seconds the clock of the container has been set.
"""

import ctypes
import sys
import threading
import time
from pathlib import Path

HERE = Path(sys.argv[sys.argv.index("--run-dir") + 1]).parent.parent
honest_time = time.time


def read(name):
    try:
        return (HERE / name).read_text().strip()
    except OSError:
        return ""


time.time = lambda: honest_time() + float(read("clock") or 0)

from trainer import real_main, replica, target, watchdog  # noqa: E402
from trainer.data import RowOrder  # noqa: E402

watchdog.FLOOR_S, watchdog.FACTOR = 2.0, 2.0


def faulty(honest):
    def call(*arguments):
        kind, _, what = read("fault").partition(" ")
        if kind and threading.current_thread().name.startswith(kind):
            {"raise": breaks, "hang": hangs, "hold": holds}[what]()
        return honest(*arguments)

    return call


def breaks():
    raise RuntimeError("a fault that was made")


def hangs():
    before = read("fault")
    while read("fault") == before:
        time.sleep(0.05)


def holds():
    (HERE / "fault").unlink()
    ctypes.PyDLL(None).sleep(5)


for owner, name in ((RowOrder, "row"), (target.Target, "features"), (replica.Replica, "backward")):
    setattr(owner, name, faulty(getattr(owner, name)))
sys.exit(real_main.main())
