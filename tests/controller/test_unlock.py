"""Two operators on one box: who holds it is told, and ending that wants a word of consent."""

from __future__ import annotations

import threading
import time

from controller import links, unlock
from controller.console import Console
from controller.errors import Usage
from controller.execution import execute
from controller.inventory import Box

HOLD = """
import fcntl, json, os, sys, time
os.makedirs(sys.argv[1], exist_ok=True)
file = open(sys.argv[1] + "/lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
owner = {"user": "bob", "host": "attic"}
json.dump({"operator": owner, "verb": "restart", "since": time.time() - 150, "pid": os.getpid()}, file)
file.flush()
time.sleep(600)
"""


def test_the_holder_is_named_and_ended_only_with_consent(box: Box) -> None:
    assert unlock.run(box, Console()).text == "free: nobody holds this box"
    codes: list[int] = []

    def hold() -> None:
        codes.append(execute(box, [links.get(box).endpoint.agent_python, "-c", HOLD, box.roots.run]).code)

    holder = threading.Thread(target=hold)
    holder.start()
    deadline = time.monotonic() + 60
    told = ""
    while "bob" not in told:  # until it has the lock and has written its name
        assert time.monotonic() < deadline, told
        try:
            told = unlock.run(box, Console()).text
        except Usage as refused:
            told = f"{refused.message}; {refused.hint}"
    held = "bob@attic holds sandbox/200 for 2m with restart: end that?"
    assert told == f"nothing was done: nobody is here to answer '{held}'; --yes answers it"
    done = unlock.run(box, Console(), yes=True)
    assert done.text.startswith("broken: bob@attic holds sandbox/200 for 2m with restart; invoke status")
    holder.join(60)
    assert codes == [143] and unlock.run(box, Console()).document["outcome"] == "free"
