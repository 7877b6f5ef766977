"""What a run needs inside the container, GPUs aside: programs, room, the payload, its recipe and model."""

from __future__ import annotations

from collections.abc import Iterator

from controller import causes, words
from controller.checks import Check, Json, failed, ok, skipped, warning
from controller.checks_host import then_reboot
from controller.endpoint import Endpoint
from controller.inventory import Roots

CONTAINER, PAYLOAD = "container", "payload"
CONTAINER_CHECKS = ("agent", "tmux", "disk", "inodes", "/dev/shm")
PAYLOAD_CHECKS = ("python", "release", "recipe", "model", "caches")
SMALL_BYTES = 2**20  # for what holds no more than a lock and sockets, as /run does
FEW_INODES = 20_000  # a compile cache alone takes thousands


def container(facts: Json, look: Json | None, endpoint: Endpoint, roots: Roots) -> Iterator[Check]:
    """From the facts of the agent's `doctor`; `look` are the host's, None when it could not be asked."""
    python = facts["agent_python"]
    yield ok(CONTAINER, "agent", f"python {python['version']}, {python['path']}")
    yield _tmux(facts["tmux"])
    yield _disk(facts, roots)
    yield _inodes(facts["disks"])
    yield _shm(facts, look, endpoint)


def _tmux(tmux: Json) -> Check:
    if tmux["path"] is None:
        return warning(
            CONTAINER,
            "tmux",
            "not installed: a run starts all the same, with no session to attach to",
            "invoke exec 'apt-get install -y tmux'",
        )
    return ok(CONTAINER, "tmux", f"{tmux['version'] or 'of unknown version'}, {tmux['path']}")


def _disk(facts: Json, roots: Roots) -> Check:
    """Checkpoints lie with the runs; the `status` of a run asks the same of that disk."""
    need, rows = 2 * (facts["recipe"].get("checkpoint_bytes") or 0), facts["disks"]
    if not rows:
        return skipped(CONTAINER, ["disk"], "its file systems do not tell their room")[0]
    of_runs, *others = (causes.under(rows, path) for path in (roots.lib, roots.opt, roots.cache))

    def least(row: Json) -> int:
        whole = causes.FULL_BYTES if row is of_runs or row in others else SMALL_BYTES
        return max(need, whole) if row is of_runs else whole

    tight = [row for row in rows if row["free_bytes"] < least(row)]
    says = ", ".join(f"{row['path']} {words.size(row['free_bytes'])} free" for row in tight or rows)
    if need and (not tight or of_runs in tight):
        says += f"; two checkpoints need {words.size(need)}"
    elif tight:
        says += f"; {words.size(least(tight[0]))} are the least"
    if tight:
        mend = f"free some: invoke exec 'du -xsh {tight[0]['path']}', or give the container more disk"
        return failed(CONTAINER, "disk", says, mend)
    return ok(CONTAINER, "disk", says)


def _inodes(rows: list[Json]) -> Check:
    counted = [row for row in rows if row["inodes_total"]]
    if not counted:
        return skipped(CONTAINER, ["inodes"], "these file systems do not count them")[0]
    least = min(counted, key=lambda row: int(row["inodes_free"]))
    says = f"{least['path']} {least['inodes_free']:,} free"
    if least["inodes_free"] < FEW_INODES:
        mend = "many small files fill it: old caches are safe to delete while no run is alive"
        return failed(CONTAINER, "inodes", says, mend)
    return ok(CONTAINER, "inodes", says)


def _shm(facts: Json, look: Json | None, endpoint: Endpoint) -> Check:
    """A model staged in memory is loaded in seconds at each start; without room it comes from the disk."""
    shm, model = facts["shm"], facts["recipe"].get("model_bytes")
    if shm is None:
        return warning(
            CONTAINER, "/dev/shm", "is not there", "mount -t tmpfs tmpfs /dev/shm, in the container"
        )
    if model is None:
        return ok(CONTAINER, "/dev/shm", f"{words.size(shm['free_bytes'])} free; no model to compare it with")
    says = f"{words.size(shm['free_bytes'])} free, the model has {words.size(model)}"
    if str(facts["recipe"]["model"]).startswith("/dev/shm/"):
        return ok(CONTAINER, "/dev/shm", f"the model ({words.size(model)}) is staged there")
    if shm["free_bytes"] < model:
        size = f"{-(-model * 5 // 4 // 2**30)}g"
        mend = f"on {endpoint.host}, in /etc/pve/lxc/{endpoint.vmid}.conf: "
        mend += f"lxc.mount.entry: tmpfs dev/shm tmpfs rw,nosuid,nodev,size={size} 0 0; "
        mend += then_reboot(facts, look, endpoint)
        return warning(CONTAINER, "/dev/shm", f"{says}: it cannot be staged there", mend)
    return ok(CONTAINER, "/dev/shm", says)


def payload(facts: Json, ours: str) -> Iterator[Check]:
    """`ours` is the release that a deploy from here would make; that imports it with the interpreter."""
    yield _python(facts)
    current = facts["release"]["current"]
    if current is None:
        yield failed(PAYLOAD, "release", "there is none in the container", "invoke deploy")
    elif current != ours:
        says = f"{current[:8]} is current, the payload here is {ours[:8]}"
        yield warning(PAYLOAD, "release", says, "invoke deploy, unless it is meant to stay")
    else:
        yield ok(PAYLOAD, "release", f"{current[:8]}, the same as here")
    yield from _recipe(facts)
    yield _caches(facts["caches"])


def _python(facts: Json) -> Check:
    python = facts["python"]
    if python["error"]:
        mend = "invoke env.build makes one, or name one that is there: python: in inventory.yaml"
        return failed(PAYLOAD, "python", python["error"], mend)
    found = python["versions"]
    missing = [name for name in ("torch", "transformers") if not found.get(name)]
    if missing:
        lock = "cpu" if facts["gpus"]["status"] == "absent" else "cu130"
        mend = f"invoke env.build --name {lock}, or install them in the interpreter of your own"
        return failed(PAYLOAD, "python", f"{python['path']} has no {' and no '.join(missing)}", mend)
    shown = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    return ok(PAYLOAD, "python", shown)


def _recipe(facts: Json) -> Iterator[Check]:
    recipe = facts["recipe"]
    if facts["release"]["current"] is None:
        yield from skipped(PAYLOAD, ("recipe", "model"), "there is no release to read it with")
        return
    if recipe["error"]:
        yield failed(PAYLOAD, "recipe", recipe["error"], recipe["hint"] or "correct it, then invoke deploy")
        yield from skipped(PAYLOAD, ["model"], "the recipe could not be read")
        return
    yield ok(PAYLOAD, "recipe", str(recipe["name"]))
    if recipe["model_bytes"] is None:
        mend = "put the target model there, or name another: target.model in the recipe"
        yield failed(PAYLOAD, "model", f"no folder {recipe['model']} in the container", mend)
    elif recipe.get("model_closed"):
        mend = "chmod -R a+rX it on the host: an unprivileged container's root is nobody there"
        yield failed(PAYLOAD, "model", f"the container's root may not read {recipe['model_closed']}", mend)
    else:
        yield ok(PAYLOAD, "model", f"{recipe['model']}, {words.size(recipe['model_bytes'])}")


def _caches(caches: Json) -> Check:
    """Information, never a fault: an old key is only room that could be freed."""
    rows, current = caches["rows"], caches["current"]
    if not rows:
        return ok(PAYLOAD, "caches", "empty: the first start compiles everything")
    total = words.size(sum(row["bytes"] for row in rows))
    more = "" if all(row["whole"] for row in rows) else " or more"
    warm = (
        "the next start's is among them"
        if current in {row["key"] for row in rows}
        else "the next start's is new"
    )
    legacy = "; torch's default places hold one, too" * bool(caches["legacy"])
    return ok(PAYLOAD, "caches", f"{words.plural(len(rows), 'key')}, {total}{more}, {warm}{legacy}")
