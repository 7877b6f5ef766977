"""Look at a run in its own terminal: the ssh line that opens tmux in the container, printed or run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from controller import status
from controller.console import Console
from controller.endpoint import Endpoint, resolve
from controller.errors import NotRunning, Unreachable
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step
from controller.route import route


def ssh_argv(box: Box, endpoint: Endpoint, run_id: str) -> list[str]:
    """`ssh -t …` with one argument for the login shell on the host."""
    argv = ["ssh", "-t"]
    if endpoint.port:
        argv += ["-p", str(endpoint.port)]
    if endpoint.identity_file:
        argv += ["-i", endpoint.identity_file]
    if endpoint.known_hosts != "~/.ssh/known_hosts":
        # quoted: ssh reads a list of files here, divided by spaces
        argv += ["-o", f'UserKnownHostsFile="{Path(endpoint.known_hosts).expanduser()}"']
    if endpoint.proxy_jump:
        argv += ["-J", endpoint.proxy_jump]
    user = endpoint.user or route(endpoint)[-1].user  # as every other command logs in, not as one's own name
    # pct overwrites PATH and leaves out /usr/local/bin; tmux needs a terminal type and a UTF-8 locale.
    inside = [
        *(["sudo", "-n"] if endpoint.sudo else []),
        *("pct", "exec", str(endpoint.vmid), "--", "env"),
        *(f"TMUX_TMPDIR={box.roots.run}/tmux", f"TERM={_terminal()}", "LC_ALL=C.UTF-8"),
        *("tmux", "-L", "pctrun", "attach", "-t", run_id),
    ]
    return [*argv, f"{user}@{endpoint.host}", shlex.join(inside)]


def plan(box: Box, *, run_id: str = "", only_print: bool = False) -> Plan:
    find = [] if run_id else [Step("find the newest run", "snapshot", status.look_args())]
    open_it = f"{'print' if only_print else 'open'} the ssh line that attaches to {run_id or 'it'} in tmux"
    return Plan("attach", (*find, Step(open_it)))


def run(box: Box, console: Console, *, run_id: str = "", only_print: bool = False) -> Outcome:
    """Print the line; with a terminal on stdin become it instead, unless `only_print`."""
    run_id = run_id or _newest(box)
    argv = ssh_argv(box, resolve(box), run_id)
    if sys.stdin.isatty() and not only_print:
        console.note(f"attaching to {run_id}; leave with C-b d, the run goes on")
        os.execvp(argv[0], argv)
    return Outcome({"run": run_id, "argv": argv}, shlex.join(argv))


def _newest(box: Box) -> str:
    verdict, snapshot = status.look(box)
    run_ = (snapshot or {}).get("run")
    if snapshot is None:
        failure = Unreachable if verdict.word == "unreachable" else NotRunning
        raise failure(f"cannot look for the run: {'; '.join(verdict.reasons)}", verdict.mend)
    if run_ and run_.get("tmux", False) is None:
        raise NotRunning("tmux in the container does not answer", "invoke logs --follow shows what it would")
    if not run_ or not run_.get("tmux"):
        hint = "invoke logs" if run_ else "invoke restart"
        raise NotRunning(f"no tmux session to attach to: {verdict.word}, {verdict.summary}", hint)
    return str(run_["id"])


def _terminal() -> str:
    terminal = os.environ.get("TERM", "")
    return terminal if terminal.isascii() and terminal not in ("", "dumb") else "xterm-256color"
