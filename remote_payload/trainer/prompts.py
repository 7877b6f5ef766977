"""What is asked, and what has been answered, as files that an interruption cannot spoil."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import Refusal

_SHAPE = 'write {"id": "…", "turns": ["…", …]} or {"id": "…", "conversations": [{"role", "content"}, …]}'
_CARRIED = ("tools", "chat_template_kwargs")


@dataclass
class Conversation:
    """One prompt on its way to a document. `turns`: the messages that precede each answer; `messages`: what
    has been said so far; `seen`: ids (prompt, answer) of each turn, where the model ran here; `extra`: keys
    of the line that go into the output with it."""

    key: str
    turns: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        return {"id": self.key, "conversations": self.messages, **self.extra}


def read_prompts(path: Path) -> list[Conversation]:
    """Lines with `turns` (user texts), or with `conversations` whose answers are to be given anew: assistant
    turns are left out, and all from the first tool result on: its call may not come again.

    Raises Refusal with file:line for a line that is no prompt and for an id that comes twice."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")  # U+2028 may stand in a JSON string
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path}: cannot be read ({error})") from None
    prompts: dict[str, Conversation] = {}
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
            key, turns = item["id"], _turns(item)
        except (ValueError, KeyError, TypeError, AttributeError):
            key, turns = None, []
        if not isinstance(key, str) or not turns:
            raise Refusal(f"{path}:{number}: not a prompt; {_SHAPE}")
        if key in prompts:
            raise Refusal(f"{path}:{number}: id {key!r} is used twice; ids must be unique")
        extra = {name: item[name] for name in _CARRIED if item.get(name)}
        prompts[key] = Conversation(key, turns, extra=extra)
    return list(prompts.values())


def _turns(item: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Raises TypeError or KeyError for a line of another shape."""
    if "turns" in item:
        if not all(isinstance(turn, str) for turn in item["turns"]):
            raise TypeError
        return [[{"role": "user", "content": turn}] for turn in item["turns"]]
    turns: list[list[dict[str, Any]]] = []
    waiting: list[dict[str, Any]] = []
    for message in item.get("conversations") or item["messages"]:
        role = message["role"]
        if role == "tool":
            return turns
        if role != "assistant":
            if message["content"] is None:
                raise TypeError
            waiting.append({"role": role, "content": message["content"]})
        elif waiting:
            turns.append(waiting)
            waiting = []
    return [*turns, waiting] if waiting and waiting[-1]["role"] == "user" else turns


def dropped_path(out: Path) -> Path:
    return out.with_name(out.name + ".dropped.jsonl")


def finished_ids(path: Path) -> set[str]:
    """Ids in a jsonl file of ours; a last line torn by a kill is cut off first."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    try:
        return {json.loads(line)["id"] for line in data[:whole].splitlines()}
    except (ValueError, KeyError, TypeError):
        raise Refusal(f"{path} was not written by this program; choose another --out") from None


def append(path: Path, items: list[dict[str, Any]], *, sync: bool = True) -> None:
    """Whole lines in one write, which a kill leaves whole or torn at the end; `sync` outlives the machine."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
        file.flush()
        if sync:
            os.fsync(file.fileno())


@contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """Two programs on one output would write ids twice: the second is refused."""
    lock = out.with_name(f".{out.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(
                f"{out}: another process is writing it; wait for it or choose another --out"
            ) from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
