"""Arguments and bytes through every real layer: SSH, the login shell, pct, the container, the agent."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller import execution, links, sandbox
from controller.inventory import Box

LIST_COUNT = int(os.environ.get("PCTRUN_EXAMPLES", "200"))  # each is one `pct exec`, 0.1 s of two cores
LOG_BYTES = 20 * 1000 * 1000

awkward = st.sampled_from(
    [
        "",
        "-",
        "--",
        "-c",
        "--keep-env",
        "'",
        '"',
        "$HOME",
        "`id`",
        "$(id)",
        "\\",
        "\n",
        "a b",
        ";",
        "é→漢",
        "😀",
        "\r",
        "*",
    ]
)
free = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
argument = st.one_of(awkward, free)
# One argument of 100 KiB of UTF-8 among short ones; the kernel's own limit is 128 KiB an argument.
long_argument = st.tuples(free.filter(bool), argument).map(
    lambda pair: (pair[0] * 102_400)[:25_600] + pair[1]
)
lists = st.one_of(*[st.lists(argument, max_size=6)] * 19, st.lists(long_argument, min_size=1, max_size=2))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCTRUN_SANDBOX", str(tmp_path_factory.mktemp("exec")))
        endpoint = sandbox.up()
        yield Box(name="sandbox", sandbox=True, vmid=endpoint.vmid, recipe="none")
        links.close_all()
        sandbox.down(container=True, keep_data=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(
    max_examples=LIST_COUNT,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(lists)
def test_argument_lists_come_back_unchanged(box: Box, arguments: list[str]) -> None:
    seen = execution.execute(box, ["/usr/bin/printf", "%s\\0", *arguments, "end"])
    assert seen.code == 0, seen.stderr
    assert seen.stdout.decode("utf-8").split("\0") == [*arguments, "end", ""]


def test_twenty_megabytes_of_log_cost_two_seconds_beyond_the_bare_channel(box: Box) -> None:
    """The bare channel runs `cat`; ours is the whole command, its start included."""
    folder = "/var/lib/pctrun/runs/r-0001"
    line = "step 00001 loss 3.1415926 " + "x" * 73
    script = f"mkdir -p {folder} && echo '{{}}' >{folder}/run.json"
    script += f" && yes '{line}' | head -c {LOG_BYTES} >{folder}/train.log"
    assert execution.execute(box, ["sh", "-c", script]).code == 0

    heard: list[int] = []
    link = links.get(box)
    command = f"pct exec {box.vmid} -- cat {folder}/train.log"
    beyond = []
    for _ in range(8):  # the best of eight: other work on the cores is not ours to answer for
        heard.clear()
        began = time.monotonic()
        link.run(command, on_stdout=lambda data: heard.append(len(data)), on_stderr=lambda data: None)
        bare = time.monotonic() - began
        assert sum(heard) == LOG_BYTES

        began = time.monotonic()
        ours = subprocess.run(
            [sys.executable, "-m", "invoke", "logs", "--lines", "0"], capture_output=True, timeout=600
        )
        took = time.monotonic() - began
        assert len(ours.stdout) == LOG_BYTES, ours.stderr[-500:]
        print(f"bare channel {bare:.2f} s, invoke logs {took:.2f} s")
        beyond.append(took - bare)
        if beyond[-1] < 2.0:
            break
    assert min(beyond) < 2.0
