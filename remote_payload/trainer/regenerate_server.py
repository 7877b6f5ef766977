"""Answers from an OpenAI-compatible server, at the rate it can give: bounded, patient, resumable.

As many conversations as `concurrency` are under way; each line is written when its conversation is whole,
so an interruption loses only those. What the server may yet answer (429, 5xx, timeouts, lost connections) is
asked again with growing pauses and is never recorded as dropped; a 4xx is final for its prompt.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import Refusal
from trainer.prompts import Conversation, append, dropped_path, finished_ids
from trainer.rendering import encodes

if TYPE_CHECKING:
    import aiohttp

_LONGEST_PAUSE_S = 60.0
_STUCK_TAIL, _STUCK_TIMES = 40, 4  # characters, repetitions: a cut answer that ends so is a loop


@dataclass(frozen=True)
class Server:
    """Where and how to ask. `extra` goes into each request; `key` is sent as a bearer token, never shown."""

    url: str
    model: str
    key: str | None
    concurrency: int
    max_new_tokens: int
    temperature: float
    timeout_s: float
    retries: int
    pause_s: float
    patience_s: float
    extra: dict[str, Any] = field(default_factory=dict)


class _Again(Exception):
    """Not answered now; `after` is the pause that the server asked for, in seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class _Never(Exception):
    """The server will not answer this prompt; the message is the reason."""


@dataclass
class Tally:
    """How far the work is. `failed`: prompts that got no answer and are asked again by the next --resume."""

    total: int
    kept: int = 0
    dropped: int = 0
    failed: int = 0
    retries: int = 0
    tokens: int = 0
    under_way: int = 0
    answered_at: float = field(default_factory=time.monotonic)
    last_trouble: str = ""


def regenerate(server: Server, prompts: list[Conversation], out: Path, keep: int | None) -> Tally:
    """Answer what `out` lacks. Raises Refusal when the server, the model or the key is not there, or when
    nothing was answered for `patience_s`; KeyboardInterrupt after the answers that came are safe."""
    return asyncio.run(_regenerate(server, prompts, out, keep))


async def _regenerate(server: Server, prompts: list[Conversation], out: Path, keep: int | None) -> Tally:
    import aiohttp

    kept, dropped = finished_ids(out), finished_ids(dropped_path(out))
    tally = Tally(len(prompts), len(kept), len(dropped))
    todo = iter([one for one in prompts if one.key not in kept | dropped])
    headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    timeout = aiohttp.ClientTimeout(total=server.timeout_s, sock_connect=min(30.0, server.timeout_s))
    connector = aiohttp.TCPConnector(limit=server.concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        await check(session, server)
        progress = asyncio.create_task(_progress(tally))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(server.concurrency):
                    group.create_task(_worker(session, server, todo, out, keep, tally))
        except* Refusal as several:
            raise several.exceptions[0] from None
        finally:
            progress.cancel()
    return tally


async def check(session: aiohttp.ClientSession, server: Server) -> None:
    """Raises Refusal if nothing answers at the URL, the key is refused, or the model is not served there."""
    import aiohttp

    try:
        async with session.get(f"{server.url}/models") as response:
            if response.status in (401, 403):
                raise Refusal(_key_refused(server, response.status))
            if response.status != 200:
                return  # not every server lists its models
            served = [str(model["id"]) for model in (await response.json(content_type=None))["data"]]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Refusal(
            f"{server.url}: no answer ({_words(error)}); start the server or correct --server"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if served and server.model not in served:
        raise Refusal(
            f"--model {server.model}: not served at {server.url}; there: {', '.join(sorted(served))}"
        )


def _key_refused(server: Server, status: int) -> str:
    mend = "correct the key in that variable" if server.key else "name its variable with --api-key-env"
    return f"{server.url}: HTTP {status}, the server wants another API key; {mend}"


async def _worker(
    session: aiohttp.ClientSession,
    server: Server,
    todo: Iterator[Conversation],
    out: Path,
    keep: int | None,
    tally: Tally,
) -> None:
    for one in todo:
        if keep is not None and tally.kept >= keep:
            return
        tally.under_way += 1
        try:
            await _converse(session, server, one, tally)
            if not encodes(one.line()):  # a limit may cut an emoji in two
                raise _Never("holds half a character (a lone surrogate)")
        except _Again as trouble:
            tally.failed += 1
            _tell(f"no answer to {one.key}: {trouble}; --resume asks again")
        except _Never as reason:
            append(dropped_path(out), [{"id": one.key, "reason": str(reason)}], sync=False)
            tally.dropped += 1
        else:
            if keep is None or tally.kept < keep:
                append(out, [one.line()], sync=False)
                tally.kept += 1
        finally:
            tally.under_way -= 1


async def _converse(session: aiohttp.ClientSession, server: Server, one: Conversation, tally: Tally) -> None:
    """Fill `messages` turn by turn; a call of a tool ends the conversation, for nobody here can answer it."""
    options = {**server.extra.get("chat_template_kwargs", {}), **one.extra.get("chat_template_kwargs", {})}
    if options:
        one.extra["chat_template_kwargs"] = options  # whoever renders it must know in which mode it was made
    for turn in one.turns:
        one.messages += turn
        request = {
            "model": server.model,
            "messages": [{k: v for k, v in message.items() if k != "finish"} for message in one.messages],
            "max_tokens": server.max_new_tokens,
            "temperature": server.temperature,
            **server.extra,
            **one.extra,
        }
        message, tokens = await _patiently(session, server, request, tally)
        tally.tokens += tokens
        if reason := fault(message):
            raise _Never(reason)
        one.messages.append(message)
        if "tool_calls" in message:
            return


async def _patiently(
    session: aiohttp.ClientSession, server: Server, request: dict[str, Any], tally: Tally
) -> tuple[dict[str, Any], int]:
    pause = server.pause_s
    for attempt in range(server.retries + 1):
        try:
            answer = await _ask(session, server, request)
            tally.answered_at = time.monotonic()
            return answer
        except _Again as trouble:
            tally.last_trouble = str(trouble)
            silence = time.monotonic() - tally.answered_at
            if silence > server.patience_s:
                raise Refusal(
                    f"{server.url}: no answer for {silence:.0f} s ({trouble}); mend it, then --resume"
                ) from None
            if attempt == server.retries:
                raise
            tally.retries += 1
            # the upper half at random: requests that failed together do not come back together
            await asyncio.sleep(max(trouble.after, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


async def _ask(
    session: aiohttp.ClientSession, server: Server, request: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """(assistant message, tokens) or _Again, _Never, Refusal."""
    import aiohttp

    try:
        async with session.post(f"{server.url}/chat/completions", json=request) as response:
            if response.status == 429 or response.status >= 500:
                raise _Again(f"HTTP {response.status}", _retry_after(response.headers.get("Retry-After")))
            if response.status in (401, 403):
                raise Refusal(_key_refused(server, response.status))
            if response.status == 404:
                raise Refusal(
                    f"{server.url}/chat/completions: HTTP 404; correct --server (it ends in /v1) or --model"
                )
            if response.status != 200:
                raise _Never(f"HTTP {response.status}: {' '.join((await response.text()).split())[:200]}")
            return message_of(await response.json(content_type=None))
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise _Again(_words(error)) from None
    except (ValueError, RecursionError):
        raise _Again("an answer that is not JSON") from None


def message_of(answer: Any) -> tuple[dict[str, Any], int]:
    """The message of a chat completion as our files hold it, and how many tokens it has.

    Thoughts are called `reasoning_content`, in newer servers `reasoning`. Raises _Again for another shape."""
    try:
        choice = answer["choices"][0]
        said, finish = choice["message"], choice.get("finish_reason")
        message: dict[str, Any] = {"role": "assistant", "content": said.get("content") or ""}
        thoughts = said.get("reasoning_content") or said.get("reasoning") or ""
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        if not isinstance(message["content"], str) or not isinstance(thoughts, str):
            raise TypeError
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise _Again("an answer of an unknown shape") from None
    if thoughts:
        message["reasoning_content"] = thoughts
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    if finish == "length":
        message["finish"] = "length"
    elif finish not in ("stop", "tool_calls", None):
        raise _Never(f"finish_reason {finish}")
    return message, tokens


def fault(message: dict[str, Any]) -> str | None:
    """Why an answer is no good example, or None."""
    thoughts, cut = message.get("reasoning_content", ""), "finish" in message
    if not message["content"].strip() and "tool_calls" not in message and not (thoughts and cut):
        return "empty answer"
    tail = (thoughts + message["content"])[-_STUCK_TAIL:]
    if cut and len(tail) == _STUCK_TAIL and (thoughts + message["content"]).count(tail) >= _STUCK_TIMES:
        return "repeats itself"
    return None


def _retry_after(value: str | None) -> float:
    try:
        return min(float(value or 0), 2 * _LONGEST_PAUSE_S)
    except ValueError:  # a date: the growing pauses will do
        return 0.0


def _words(error: BaseException) -> str:
    text = str(error).split("\n")[0]
    return text if text else {"TimeoutError": "timed out"}.get(type(error).__name__, type(error).__name__)


async def _progress(tally: Tally) -> None:
    began, before = time.monotonic(), tally.kept + tally.dropped
    while True:
        await asyncio.sleep(2.0 if sys.stderr.isatty() else 15.0)
        spent = time.monotonic() - began
        done = tally.kept + tally.dropped
        rate = (done - before) / spent
        left = f"{(tally.total - done) / rate / 60:,.0f} min left" if rate else "no rate yet"
        trouble = f", {tally.retries} retries (last: {tally.last_trouble})" if tally.retries else ""
        _tell(
            f"{done:,}/{tally.total:,} prompts, {tally.dropped:,} dropped, {tally.under_way} under way, "
            f"{tally.tokens / spent:,.0f} tok/s, {left}{trouble}"
        )


def _tell(text: str) -> None:
    print(f"regenerate: {text}", file=sys.stderr, flush=True)
