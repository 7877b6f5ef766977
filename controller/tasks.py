"""The command line: parse, call, print, exit code; controller/ does the work."""

from __future__ import annotations

from typing import Any

from invoke.collection import Collection

from controller import mistyped, typed
from controller.options import RUN, SLOW, On, box_task, cli, named
from controller.tasks_grouped import env, runs, sandbox


@box_task(**SLOW)
def deploy(on: On, allow_slow_kernels: bool = False) -> None:
    """Put the payload into the container: verified, or not."""
    on("deploy", allow_slow_kernels=allow_slow_kernels)


@box_task(
    "set_",
    optional=("auto_restart",),
    fresh_cache="start with an empty compile cache; the old one is deleted once the run is up",
    recipe="recipe under remote_payload/recipes/ (default: the box's)",
    set="override of the recipe such as train.steps=200; repeat it for several",
    from_scratch="do not resume from a checkpoint",
    release="release to run (current, previous, or the beginning of a name; default: current)",
    auto_restart="try a crash again from its last checkpoint, so many times (without a number: 3; 0: not)",
    from_="run to repeat and resume, or newest: its recipe, overrides, release and --auto-restart",
    reason="why, for the record of the run that is stopped",
    **SLOW,
)
def restart(
    on: On,
    fresh_cache: bool = False,
    recipe: str = "",
    set_: Any = None,
    from_scratch: bool = False,
    reason: str = "",
    release: str = "",
    from_: str = "",
    auto_restart: Any = None,
    allow_slow_kernels: bool = False,
) -> None:
    """Stop what runs and start at its last checkpoint."""
    options = {"fresh_cache": fresh_cache, "recipe": recipe, "settings": set_}
    options |= {"release": release, "from_run": from_, "allow_slow_kernels": allow_slow_kernels}
    options |= {"auto_restart": auto_restart}
    on("restart", from_scratch=from_scratch, reason=reason, **options)


@box_task(**RUN)
def status(on: On, run: str = "") -> None:
    """Say whether the run is fine, why, and what to do next."""
    on("status", run_id=named(run))


@box_task(reason="why, for the record of the run", **RUN)
def abort(on: On, run: str = "", reason: str = "") -> None:
    """Stop the run after a checkpoint; nothing is lost."""
    on("abort", run_id=named(run), reason=reason)


@box_task(
    follow="go on until the run ends",
    lines="lines from the end (default: 40; 0: all)",
    since="begin there: 90s, 10m, 2h, 1d ago, or a time of day in UTC such as 14:10",
    grep="only lines in which this regular expression is found (in none: exit code 1)",
    **RUN,
)
def logs(
    on: On,
    follow: bool = False,
    lines: str = "",  # Invoke would answer a wrong number with a traceback
    since: str = "",
    grep: str = "",
    run: str = "",
) -> None:
    """Print the run's log; --follow outlives a lost connection."""
    options = {"run_id": named(run), "follow": follow, "since": since, "grep": grep}
    options |= {"whole": {"lines": lines} if lines else {}}
    on("logs", one_at_a_time=True, capture=on.as_json, **options)


@box_task(
    "arg",
    name="exec",
    positional=("command",),
    or_dashes=True,
    command="command and arguments in one text, split as a shell would; no shell runs them (sh -c 'a|b')",
    arg="one more argument, exactly as given; repeat it for several, or write them all behind a --",
    stdin="stream our stdin to the command",
    cwd="folder in the container to run it in",
    timeout="seconds until it is ended (default: 0, none)",
)
def exec_(
    on: On, command: Any = None, arg: Any = None, stdin: bool = False, cwd: str = "", timeout: str = "0"
) -> None:
    """Run one command: exec 'nvidia-smi -L', exec -- ls -l."""
    options = {
        "command": command or "",
        "more": [*arg, *typed.after_dashes()],
        "with_stdin": stdin,
        "cwd": cwd,
    }
    options |= {"seconds": {"timeout_s": timeout}}
    on("exec", module="execution", one_at_a_time=True, capture=on.as_json, **options)


@box_task(print="print the ssh line, do not run it", **RUN)
def attach(on: On, print_: bool = False, run: str = "") -> None:
    """Open the run's tmux session (leave with C-b d)."""
    on("attach", one_at_a_time=True, run_id=named(run), only_print=print_ or on.as_json)


@box_task(
    until="the verdict to wait for, such as finished, or several with commas (default: healthy)",
    timeout="seconds to wait at most (default: 600)",
    **RUN,
)
def wait(on: On, until: str = "healthy", timeout: str = "600", run: str = "") -> None:
    """Wait for a verdict, as long as it can still come."""
    on("wait", until=until, seconds={"timeout_s": timeout}, run_id=named(run))


@box_task(
    every="seconds between two looks (default: 2)",
    notify="tell the box's `notify:` addresses of changes, unless the run does so itself",
    **RUN,
)
def watch(on: On, run: str = "", every: str = "2", notify: bool = False) -> None:
    """See the run live until it ends; Ctrl-C only leaves."""
    options = {"run_id": named(run), "notify": notify, "seconds": {"every_s": every}}
    on("watch", lone=True, capture=on.as_json, **options)


@box_task(
    positional=("run",),
    run="run id, or newest",
    checkpoint="best (by τ), last, a step, or export (default: the export, else the last)",
    out="folder to put it into, as RUN-NAME (default: drafters, which git ignores)",
)
def fetch(on: On, run: Any = None, checkpoint: str = "", out: str = "drafters") -> None:
    """Bring a drafter here, verified; a cut is resumed."""
    options = {"run_id": named(run), "checkpoint": checkpoint, "out": out}
    on("fetch", one_at_a_time=True, **options)


@box_task(
    positional=("runs",),
    runs="run ids with commas between, or newest",
    out="picture to write: .png, .svg or .pdf (default: draw in the terminal)",
    over="step or time: what to draw over, in the terminal (default: step; a picture has both)",
)
def plot(on: On, runs: Any = None, out: str = "", over: str = "step") -> None:
    """Draw loss, τ, speed and busy shares of runs."""
    on("plot", lone=True, runs=runs or "", out=out, over=over)


@box_task(release="release, or the beginning of its name (default: the previous one)")
def rollback(on: On, release: str = "") -> None:
    """Make an earlier release the current one."""
    on("rollback", release=release)


@box_task(yes="do not ask")
def unlock(on: On, yes: bool = False) -> None:
    """End another operator's command that holds a box."""
    on("unlock", one_at_a_time=True, yes=yes)


@box_task(quick="without the kernel proof, which takes a minute or two with a cold cache")
def doctor(on: On, quick: bool = False) -> None:
    """Check all from here to the GPU, each with its mend."""
    on("doctor", quick=quick)


@box_task()
def boxes(on: On) -> None:
    """List the boxes of the inventory."""
    cli().boxes(on.boxes, as_json=on.as_json)


namespace = Collection(
    deploy,
    restart,
    status,
    abort,
    logs,
    exec_,
    attach,
    wait,
    watch,
    fetch,
    plot,
    rollback,
    unlock,
    doctor,
    boxes,
)
for group in (sandbox, runs, env):
    namespace.add_collection(group)
mistyped.tell()
