"""`pct status | list | config | start | stop | shutdown | reboot`, and what the container is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from controller.sandbox.pct.host import write_pairs


def pids_in_space(init: int) -> set[int]:
    """Every process of the host that lives in the process space of `init`."""
    space = Path(f"/proc/{init}/ns/pid").readlink()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "ns" / "pid").readlink() == space:
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def lock(box, vmid: int) -> None:
    write_pairs(box.host.config_path(vmid), box.host.config(vmid) | {"lock": "backup"})


def test_status_is_one_line(box, second):
    assert box.pct("status", str(second)).out == b"status: running\n"
    box.pct("stop", str(second))
    assert box.pct("status", str(second)).out == b"status: stopped\n"


def test_verbose_status_is_sorted_pairs(box):
    lines = box.pct("status", "200", "--verbose").out.decode().splitlines()
    facts = dict(line.split(": ", 1) for line in lines)
    assert lines == sorted(lines)
    assert (facts["status"], facts["name"], facts["vmid"], facts["type"]) == (
        "running",
        "ct200",
        "200",
        "lxc",
    )
    assert int(facts["pid"]) == box.host.init_pid(200)
    assert {"cpus", "disk", "maxmem", "mem", "netin", "swap", "uptime"} <= facts.keys()


def test_list_has_fixed_widths(box, second):
    lock(box, second)
    header, *rows = box.pct("list").out.decode().splitlines()
    assert header == f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}"
    assert rows == [
        f"{'200':<10} {'running':<10} {'':<12} {'ct200':<20}",
        f"{'201':<10} {'running':<10} {'backup':<12} {'ct201':<20}",
    ]


def test_list_without_containers_prints_nothing(box, tmp_path):
    front = (box.folder / "bin" / "pct").read_text().replace(str(box.folder), str(tmp_path))
    done = subprocess.run(["sh", "-s", "list"], input=front, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_config_is_sorted_with_raw_lines_last(box, second):
    write_pairs(box.host.config_path(second), {"lxc.a": "1", "swap": "0", "digest": "x", "arch": "amd64"})
    assert box.pct("config", str(second)).out == b"arch: amd64\nswap: 0\nlxc.a: 1\n"


def test_start_of_a_running_and_stop_of_a_stopped_one_are_255(box, second):
    done = box.pct("start", str(second))
    assert (done.code, "already running" in done.err) == (255, True)
    assert box.pct("stop", str(second)).code == 0
    for command in ("stop", "shutdown", "reboot"):
        done = box.pct(command, str(second))
        assert (done.code, "not running" in done.err) == (255, True)


@pytest.mark.parametrize("command", ["stop", "shutdown"])
def test_locked_container_refuses(box, second, command):
    lock(box, second)
    done = box.pct(command, str(second))
    assert (done.code, "CT is locked (backup)" in done.err) == (255, True)
    assert box.pct("status", str(second)).out == b"status: running\n"


def test_locked_container_does_not_start(box, second):
    box.pct("stop", str(second))
    lock(box, second)
    done = box.pct("start", str(second))
    assert (done.code, "CT is locked (backup)" in done.err) == (255, True)


def test_reboot_of_a_locked_container_leaves_it_stopped(box, second):
    lock(box, second)
    done = box.pct("reboot", str(second))
    assert (done.code, "CT is locked (backup)" in done.err) == (255, True)
    assert box.pct("status", str(second)).out == b"status: stopped\n"


def test_stop_leaves_no_process(box, second):
    box.inside(
        "(trap '' TERM HUP INT; setsid sleep 600 & ) >/dev/null 2>&1 </dev/null\n"
        "tmux new-session -d -s s 'sleep 600'\n",
        second,
    )
    running = subprocess.Popen([box.folder / "bin" / "pct", "exec", str(second), "--", "sleep", "600"])
    box.wait_for(lambda: box.inside("pgrep -c sleep", second) == "3", "three sleepers")
    before = pids_in_space(box.host.init_pid(second))
    assert len(before) >= 5
    assert box.pct("stop", str(second)).code == 0
    assert running.wait(60) == 137
    assert not [pid for pid in before if Path(f"/proc/{pid}/exe").exists()]


def test_restart_empties_run_and_tmp_and_keeps_the_rest(box, second):
    for folder in ("opt", "var/lib", "root", "run", "tmp"):
        box.inside(f"echo x >/{folder}/file; mkdir -p /{folder}/d/e; chmod 500 /{folder}/d", second)
    assert box.pct("reboot", str(second)).code == 0
    assert (
        box.inside("cd /; ls -d {opt,root,run,tmp,var/lib}/file || true", second)
        == "opt/file\nroot/file\nvar/lib/file"
    )
    assert box.inside("ls /tmp; ls /run", second) == "initctl\nlock"


def test_shutdown_lets_programs_end_cleanly(box, second):
    box.inside(
        "cat >/root/polite <<'X'\ntrap 'sleep 0.2; echo saved >/root/saved; exit' TERM\ntouch /root/armed\n"
        "while :; do sleep 0.05; done\nX\nbash /root/polite >/dev/null 2>&1 </dev/null &\n",
        second,
    )
    box.wait_for(lambda: box.inside("ls /root", second).startswith("armed"), "the trap is set")
    assert box.pct("shutdown", str(second)).code == 0
    assert (box.folder / "ct" / str(second) / "root" / "saved").read_text() == "saved\n"
    box.pct("start", str(second))


def test_shutdown_of_a_stubborn_container_fails_unless_forced(box, second):
    box.inside("(trap '' TERM; touch /root/armed; exec sleep 600) >/dev/null 2>&1 </dev/null &", second)
    box.wait_for(lambda: "armed" in box.inside("ls /root", second), "the trap is set")
    done = box.pct("shutdown", str(second), "--timeout", "1")
    assert (done.code, "got timeout" in done.err) == (255, True)
    assert box.pct("status", str(second)).out == b"status: running\n"
    assert box.pct("shutdown", str(second), "--timeout", "1", "--forceStop", "1").code == 0
    assert box.pct("status", str(second)).out == b"status: stopped\n"


def test_exec_works_right_after_start(box, second):
    box.pct("stop", str(second))
    box.pct("start", str(second))
    assert box.pct("exec", str(second), "--", "true").code == 0


def test_container_has_its_own_spaces(box):
    assert box.inside("id -u; hostname; echo $$").splitlines()[:2] == ["0", "ct200"]
    for kind in ("user", "mnt", "pid", "ipc", "uts"):
        assert box.inside(f"readlink /proc/self/ns/{kind}") != str(Path(f"/proc/self/ns/{kind}").readlink())
    assert "bash" in box.inside("cat /proc/1/comm")


def test_root_holds_what_a_container_needs_and_no_more(box):
    names = set(box.inside("ls /").split())
    assert {
        "bin",
        "dev",
        "etc",
        "lib",
        "models",
        "opt",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "usr",
        "var",
    } <= names
    assert "boot" not in names
    for folder in ("opt", "var", "run", "tmp", "root", "dev/shm"):
        box.inside(f"echo x >/{folder}/writable && rm /{folder}/writable")
    for folder in ("usr", "etc", "models"):
        assert box.pct("exec", "200", "--", "touch", f"/{folder}/x").code == 1
    assert Path("/bin").is_symlink() == (box.inside("test -L /bin && echo yes || true") == "yes")
    assert box.inside("stat -f -c %T /dev/shm; stat -c %a /dev/shm /tmp") == "tmpfs\n1777\n1777"


def test_init_cannot_be_killed_from_inside_and_collects_orphans(box):
    box.inside("kill -9 1; (sleep 0.01 &) ; true")
    box.wait_for(lambda: "Z" not in box.inside("ps -eo stat").split(), "no zombie is left")
    assert box.host.init_pid(200) is not None


def test_interpreter_of_the_endpoint_works_inside(box):
    done = box.pct(
        "exec", "200", "--", box.endpoint.python, "-I", "-c", "import ssl, paramiko; print(paramiko.__name__)"
    )
    assert (done.code, done.out) == (0, b"paramiko\n"), done.err


def test_models_folder_is_seen_read_only(box):
    (box.folder / "models" / "tiny").mkdir()
    (box.folder / "models" / "tiny" / "config.json").write_text("{}")
    assert box.inside("cat /models/tiny/config.json") == "{}"
    from controller import sandbox

    assert sandbox.status().models == ("tiny",)
