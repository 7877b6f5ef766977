"""A whole corpus comes back from a server that fails in every way, each conversation once, kills or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.chat_server import MODEL, answer_to, chat_server
from trainer.data import load_corpus
from trainer.prompts import only_writer, read_prompts
from trainer.regenerate import main
from trainer.regenerate_server import fault

PAYLOAD = Path(__file__).parents[2] / "remote_payload"
QUICK = ["--pause", "0.02", "--concurrency", "8"]


def prompts_file(path: Path, count: int, *texts: str) -> Path:
    """`count` prompts of one or two turns, then one for each text."""
    lines = [{"id": f"p{n}", "turns": [f"q{n}", "more"] if n % 3 == 0 else [f"q{n}"]} for n in range(count)]
    lines += [{"id": text, "turns": [text]} for text in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(prompts: Path, out: Path, url: str, *more: str) -> list[str]:
    return ["--server", url, "--model", MODEL, "--prompts", str(prompts), "--out", str(out), *QUICK, *more]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def holds_every_answer(out: Path, prompts: Path) -> None:
    """Each id once, each answer that of its own conversation."""
    items = lines_of(out)
    assert sorted(item["id"] for item in items) == sorted(one.key for one in read_prompts(prompts))
    turns = {one.key: one.turns for one in read_prompts(prompts)}
    for item in items:
        messages = item["conversations"]
        assert [m["content"] for m in messages[::2]] == [turn[0]["content"] for turn in turns[item["id"]]]
        for turn in range(1, len(messages), 2):
            assert messages[turn] == {"role": "assistant", "content": answer_to(messages[:turn])}


def test_every_trouble_is_outlived(tmp_path):
    prompts = prompts_file(tmp_path / "prompts.jsonl", 90)
    troubles = ["ok", "busy_now", "broken", "hangs_up", "cut_answer", "no_json"]
    with chat_server(troubles=troubles, delay_s=0.05) as server:
        assert main(command(prompts, tmp_path / "out.jsonl", server.url)) == 0
        assert max(server.seen.values()) == 2 and list(server.seen.values()).count(2) > 60
        assert 4 <= server.busiest <= 8
    holds_every_answer(tmp_path / "out.jsonl", prompts)
    assert not (tmp_path / "out.jsonl.dropped.jsonl").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_an_answer_that_takes_too_long_is_asked_for_again(tmp_path):
    prompts = prompts_file(tmp_path / "prompts.jsonl", 6)
    with chat_server(troubles=["sleeps"]) as server:
        assert main(command(prompts, tmp_path / "out.jsonl", server.url, "--timeout", "3")) == 0
        assert set(server.seen.values()) == {2}
    holds_every_answer(tmp_path / "out.jsonl", prompts)


def test_killed_in_mid_run_it_goes_on_without_loss_or_double(tmp_path):
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 240), tmp_path / "out.jsonl"
    with chat_server(troubles=["ok", "broken"], delay_s=0.05) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.regenerate", *command(prompts, out, server.url)],
            env=os.environ | {"PYTHONPATH": str(PAYLOAD)},
        )
        deadline = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < 40:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.wait()
        before = out.read_bytes()
        done = before.count(b"\n")
        assert 40 <= done < 240
        out.write_bytes(before + b'{"id": "p7", "conv')  # and the write itself may have been torn
        asked = len(server.bodies)
        assert main(command(prompts, out, server.url, "--resume")) == 0
        assert len(server.bodies) - asked < 2 * (320 - done * 4 // 3) + 40, "what was done is not asked again"
    assert out.read_bytes().startswith(before)
    holds_every_answer(out, prompts)


def test_an_interruption_keeps_what_came_and_says_how_to_go_on(tmp_path):
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 400), tmp_path / "out.jsonl"
    with chat_server(delay_s=0.05) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.regenerate", *command(prompts, out, server.url)],
            env=os.environ | {"PYTHONPATH": str(PAYLOAD)},
            stderr=subprocess.PIPE,
            text=True,
        )
        while not out.exists() or out.read_bytes().count(b"\n") < 10:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume continues" in err and "Traceback" not in err
    assert len(lines_of(out)) >= 10


def test_thoughts_calls_limits_and_losses_are_kept_apart(tmp_path, capsys):
    texts = ["THINK", "OLD THINK", "CALL", "LONG", "LOOP", "EMPTY", "FILTER", "TOO MUCH"]
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 0, *texts), tmp_path / "out.jsonl"
    with chat_server() as server:
        assert main(command(prompts, out, server.url)) == 0
        assert len(server.bodies) == len(texts), "a final answer is not asked for again"
        answers = {item["id"]: item["conversations"][1] for item in lines_of(out)}
        assert answers.keys() == {"THINK", "OLD THINK", "CALL", "LONG"}
        assert (
            answers["THINK"]["reasoning_content"] == answers["OLD THINK"]["reasoning_content"] == "let me see"
        )
        assert answers["CALL"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert answers["LONG"]["finish"] == "length" and "finish" not in answers["THINK"]
        dropped = {item["id"]: item["reason"] for item in lines_of(tmp_path / "out.jsonl.dropped.jsonl")}
        assert dropped == {
            "LOOP": "repeats itself",
            "EMPTY": "empty answer",
            "FILTER": "finish_reason content_filter",
            "TOO MUCH": 'HTTP 400: {"error": {"message": "context\\nlength exceeded"}}',
        }
        assert main(command(prompts, out, server.url, "--resume")) == 0
        assert len(server.bodies) == len(texts), "nor by the next run"


def test_the_output_is_what_recipes_read(tmp_path, tokenizer):
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 5, "THINK", "LONG"), tmp_path / "out.jsonl"
    with chat_server() as server:
        assert main(command(prompts, out, server.url)) == 0
    corpus = load_corpus(out, tokenizer, max_document=400)
    assert len(corpus.documents) == 7 and not corpus.dropped
    cut = next(d for d in corpus.documents if d.key == "LONG")
    assert tokenizer.decode(cut.ids[cut.loss_mask]).startswith("answer ") and not cut.loss_mask[-1]


def test_requests_are_greedy_and_carry_what_the_line_and_the_operator_add(tmp_path):
    line = {
        "id": "a",
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "conversations": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "not the target's words"},
            {"role": "user", "content": "two"},
        ],
    }
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    extra = json.dumps({"seed": 1, "chat_template_kwargs": {"enable_thinking": False}})
    with chat_server() as server:
        out = tmp_path / "out.jsonl"
        more = ["--extra", extra, "--max-new-tokens", "99"]
        assert main(command(tmp_path / "prompts.jsonl", out, server.url, *more)) == 0
        first, second = server.bodies
    assert first["temperature"] == 0 and first["max_tokens"] == 99 and first["seed"] == 1
    assert first["tools"] == line["tools"] and first["chat_template_kwargs"] == {"enable_thinking": False}
    assert [m["content"] for m in first["messages"]] == ["be brief", "one"]
    assert second["messages"][2]["content"] == answer_to(first["messages"])
    (item,) = lines_of(out)
    assert item["tools"] == line["tools"] and item["chat_template_kwargs"] == {"enable_thinking": False}
    assert "not the target's words" not in json.dumps(item)


def test_what_follows_a_tool_result_is_left_out(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    turns = [{"role": "user", "content": "1"}, call, {"role": "tool", "content": "2"}, call]
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "a", "messages": turns}) + "\n")
    assert [t[0]["content"] for t in read_prompts(tmp_path / "p.jsonl")[0].turns] == ["1"]


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(tmp_path, monkeypatch, capsys):
    prompts = prompts_file(tmp_path / "prompts.jsonl", 3)
    with chat_server(key="s3cret") as server:
        assert main(command(prompts, tmp_path / "out.jsonl", server.url)) == 2
        assert "name its variable with --api-key-env" in capsys.readouterr().err
        assert main(command(prompts, tmp_path / "out.jsonl", server.url, "--api-key-env", "NO_SUCH")) == 2
        assert "NO_SUCH: the variable is not set" in capsys.readouterr().err
        monkeypatch.setenv("SERVER_KEY", "wrong")
        assert main(command(prompts, tmp_path / "out.jsonl", server.url, "--api-key-env", "SERVER_KEY")) == 2
        assert "correct the key in that variable" in capsys.readouterr().err
        monkeypatch.setenv("SERVER_KEY", "s3cret")
        assert main(command(prompts, tmp_path / "out.jsonl", server.url, "--api-key-env", "SERVER_KEY")) == 0
    said = capsys.readouterr()
    assert "s3cret" not in said.out + said.err + "".join(p.read_text() for p in tmp_path.iterdir())


def test_a_server_or_model_that_is_not_there_is_one_line(tmp_path, capsys):
    prompts = prompts_file(tmp_path / "prompts.jsonl", 3)
    with chat_server(served=["other/a", "other/b"]) as server:
        assert main(command(prompts, tmp_path / "out.jsonl", server.url)) == 2
        assert (
            f"--model {MODEL}: not served at {server.url}; there: other/a, other/b" in capsys.readouterr().err
        )
    assert main(command(prompts, tmp_path / "out.jsonl", server.url)) == 2  # it is gone now
    err = capsys.readouterr().err
    assert "no answer (" in err and "start the server or correct --server" in err and "Traceback" not in err
    with chat_server(lists_models=False) as server:
        assert main(command(prompts, tmp_path / "out.jsonl", server.url + "/wrong")) == 0
    for extra in ("[]", "{"):
        assert main(command(prompts, tmp_path / "o.jsonl", "http://127.0.0.1:1", "--extra", extra)) == 2


def test_a_server_that_dies_is_waited_for_then_refused_and_nothing_is_lost(tmp_path, capsys):
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 60), tmp_path / "out.jsonl"
    more = ["--patience", "1", "--retries", "50"]
    with chat_server(delay_s=0.05) as server:

        def die() -> None:
            while not out.exists():
                time.sleep(0.01)
            server.troubles, server.seen = ["broken"], NeverSeen()

        threading.Thread(target=die).start()
        assert main(command(prompts, out, server.url, *more)) == 2
        assert "no answer for" in (err := capsys.readouterr().err) and "then --resume" in err
        server.troubles = ["ok"]
        assert main(command(prompts, out, server.url, "--resume")) == 0
    holds_every_answer(out, prompts)


class NeverSeen(dict):
    """A counter to which each request is new, so that its trouble never ends."""

    def __missing__(self, key: str) -> int:
        return 0

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, 1)


def test_a_prompt_that_always_fails_is_left_for_the_next_run(tmp_path, capsys):
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 12), tmp_path / "out.jsonl"
    with chat_server(troubles=["ok", "broken"], seen=NeverSeen()) as server:
        assert main(command(prompts, out, server.url, "--retries", "2")) == 3
        said = capsys.readouterr()
        lacking = 12 - len(lines_of(out))
        assert 0 < lacking < 12 and f"{lacking} prompts got no answer; --resume asks again" in said.err
        assert not (tmp_path / "out.jsonl.dropped.jsonl").exists()
        server.troubles = ["ok"]
        assert main(command(prompts, out, server.url, "--resume")) == 0
    holds_every_answer(out, prompts)


def test_keep_stops_at_the_number_asked_for(tmp_path):
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 60), tmp_path / "out.jsonl"
    with chat_server(delay_s=0.01) as server:
        assert main(command(prompts, out, server.url, "--keep", "20")) == 0
        assert len(server.bodies) < 50
    assert len(lines_of(out)) == 20


def test_two_writers_of_one_file_are_refused(tmp_path, capsys):
    prompts, out = prompts_file(tmp_path / "prompts.jsonl", 3), tmp_path / "out.jsonl"
    with chat_server() as server, only_writer(out):
        assert main(command(prompts, out, server.url)) == 2
    assert "another process is writing it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x" * 400, "finish": "length"}, "repeats itself"),
        ({"content": "x" * 400}, None),
        (
            {"content": "def f(): return 1\n" * 3 + "and then something else entirely", "finish": "length"},
            None,
        ),
        ({"content": "", "reasoning_content": "cut here", "finish": "length"}, None),
        ({"content": "", "reasoning_content": "thought, said nothing"}, "empty answer"),
        ({"content": "", "tool_calls": [{}]}, None),
    ],
)
def test_faults_of_an_answer(message, reason):
    assert fault(message) == reason
