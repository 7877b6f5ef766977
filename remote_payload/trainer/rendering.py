"""A document must hold what the model saw when it wrote each answer, whatever its chat template does later.

Templates of thinking models rewrite history: Qwen3 to 3.6 show the thoughts of an answer only until the next
user turn. One rendering of a whole conversation then teaches answers without their thoughts, or thoughts in
places where the model never sees any. So each answer is rendered as it was asked for: the messages before it
with the generation prompt, then what the template adds for the answer. As long as that text continues the
text so far, the conversation stays one document; where the template rewrote something, a new document begins
with the history as the model then saw it, not supervised. An answer is supervised exactly once.

A turn is asked for in the mode in which it was answered: where the template knows `enable_thinking` and the
line does not say, a turn with thoughts is rendered with it, one without them without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import Refusal

VERSION = 1  # of the rules above; a file prepared under others is refused
_SHAPE = 'write {"id": "…", "conversations": [{"role": "user", "content": "…"}, …]}'
_HALF_A_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # the only way to write one in UTF-8
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Dropped(ValueError):
    """A well-formed conversation of no use here; the message is the reason, the same for all of its kind."""


@dataclass(frozen=True)
class Conversation:
    """One line of a file: messages in the words of templates, tools, and template options of its own."""

    key: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rendered:
    """One document: ids, and for each whether the model wrote it."""

    ids: list[int]
    mask: list[bool]


def parse_line(line: str, place: str) -> Conversation:
    """A jsonl line. Messages as of an OpenAI-compatible server: `content` text, a list of text parts or null;
    `reasoning_content`, `tool_calls`, role `tool`; beside them `tools`, `chat_template_kwargs`.

    Raises Refusal at `place` (file:line) for a malformed line, Dropped for one that holds more than text."""
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{place}: not JSON ({error}); {_SHAPE}") from None
    if _HALF_A_CHARACTER.search(line) and not encodes(item):
        raise Dropped("holds half a character (a lone surrogate)")
    messages = item.get("conversations", item.get("messages")) if isinstance(item, dict) else None
    if not isinstance(messages, list) or not messages:
        raise Refusal(f'{place}: no list "conversations"; {_SHAPE}')
    tools, options = item.get("tools"), item.get("chat_template_kwargs") or {}
    if isinstance(tools, str):  # some data sets keep the schemas as text
        tools = _json(tools)
    if tools is not None and not isinstance(tools, list):
        raise Refusal(f'{place}: "tools" is no list; write the schemas that the model was given')
    if not isinstance(options, dict):
        raise Refusal(f'{place}: "chat_template_kwargs" is no mapping; write {{"enable_thinking": false}}')
    parsed = [_message(message, f"{place}: turn {turn}") for turn, message in enumerate(messages)]
    return Conversation(str(item.get("id", place)), parsed, tools or None, options)


def encodes(item: Any) -> bool:
    """No tokenizer takes a lone surrogate; servers send one where a limit cut an emoji in two."""
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(f'{place} has no text "role"; {_SHAPE}')
    content, calls = message.get("content"), message.get("tool_calls")
    thoughts = next((message[name] for name in _REASONING if message.get(name)), None)
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type", "text") != "text" for part in content):
            raise Dropped("holds more than text")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and (calls or thoughts):
        content = ""
    if not isinstance(content, str) or not isinstance(thoughts, str | None):
        raise Refusal(f'{place} has no text "content"; {_SHAPE}')
    plain = {key: value for key, value in message.items() if key not in (*_REASONING, "tool_calls")}
    plain["content"] = content
    if thoughts:
        plain["reasoning_content"] = thoughts
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise Refusal(f'{place}: "tool_calls" is no list of calls')
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Servers send arguments as JSON text, templates walk through a mapping."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _json(function["arguments"])
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True)
class _Answer:
    """`prompt` is all that the model saw; of the `text` that follows it wrote `written` characters."""

    prompt: str
    text: str
    written: int


class Renderer:
    """Conversations to documents under one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        template = tokenizer.get_chat_template()
        self.knows_thinking = "enable_thinking" in template
        self.marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        specials = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")

    def documents(self, conversation: Conversation) -> list[Rendered]:
        """At least one document. Raises Dropped with the reason for a conversation that gives none."""
        documents = [self._tokenise(pieces) for pieces in self._documents(conversation)]
        if not documents:
            raise Dropped("no assistant turn")
        return documents

    def _documents(self, conversation: Conversation) -> Iterator[list[tuple[str, bool]]]:
        """Each document as pieces (text, supervised), in order."""
        pieces: list[tuple[str, bool]] = []
        so_far = ""
        for turn, message in enumerate(conversation.messages):
            if message["role"] != "assistant" or turn == 0:  # a greeting that nobody asked for is context
                continue
            answer = self._answer(conversation, turn)
            if not answer.prompt.startswith(so_far):
                yield pieces
                pieces, so_far = [], ""
            pieces.append((answer.prompt[len(so_far) :], False))
            pieces.append((answer.text[: answer.written], True))
            if answer.written < len(answer.text):
                pieces.append((answer.text[answer.written :], False))
            so_far = answer.prompt + answer.text
        if pieces:
            yield pieces

    def _answer(self, conversation: Conversation, turn: int) -> _Answer:
        message = conversation.messages[turn]
        for options in self._modes(conversation, message):
            prompt = self._text(conversation, turn, options, prompt=True)
            whole = self._text(conversation, turn + 1, options)
            if whole.startswith(prompt):
                text = whole[len(prompt) :]
                text = self._up_to_end(text)
                return _Answer(prompt, text, _written(text, message, self.special))
        if self.marks_answers:
            return self._marked(conversation, turn)
        raise Dropped("the chat template renders an answer that does not begin with its generation prompt")

    def _up_to_end(self, text: str) -> str:
        """Up to the token that ended the answer: the last special one, but not one that the template puts on
        a line of its own after that (Phi-3 closes a whole conversation so)."""
        marks = list(self.special.finditer(text))
        while len(marks) > 1 and (between := text[marks[-2].end() : marks[-1].start()]) and between.isspace():
            marks.pop()
        return text[: marks[-1].end()] if marks else text

    def _modes(self, conversation: Conversation, message: dict[str, Any]) -> list[dict[str, Any]]:
        if not self.knows_thinking or "enable_thinking" in conversation.options:
            return [conversation.options]
        thought = "reasoning_content" in message or "</think>" in message["content"]
        return [conversation.options | {"enable_thinking": mode} for mode in (thought, not thought)]

    def _text(
        self, conversation: Conversation, upto: int, options: dict[str, Any], prompt: bool = False
    ) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                conversation.messages[:upto],
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **options,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise Dropped(f"the chat template refuses it ({reason})") from None

    def _marked(self, conversation: Conversation, turn: int) -> _Answer:
        """The answer as the template's author marks it, with `{% generation %}`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        (whole,), (spans,) = render_jinja_template(
            [conversation.messages[: turn + 1]],
            tools=conversation.tools,
            chat_template=self.tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **(self.tokenizer.special_tokens_map | conversation.options),
        )
        if not spans:
            raise Dropped("the chat template marks no answer as generated")
        start, end = spans[-1]
        text = whole[start:end]
        return _Answer(whole[:start], text, _written(text, conversation.messages[turn], self.special))

    def _tokenise(self, pieces: list[tuple[str, bool]]) -> Rendered:
        """Each piece by itself, as at serving time, where prompt and answer never merge into one token."""
        tokens = self.tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"]
        ids = [token for piece in tokens for token in piece]
        mask = [supervised for piece, (_, supervised) in zip(tokens, pieces, strict=True) for _ in piece]
        spelt = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if spelt != "".join(text for text, _ in pieces):
            raise Dropped("its tokens do not spell the rendered text")
        return Rendered(ids, mask)


def _written(text: str, message: dict[str, Any], special: re.Pattern[str]) -> int:
    """How much of an answer's text the model wrote: all of it, up to its end token; of one that a token limit
    cut (`"finish": "length"`) what it had said by then, for what closes it is the template's."""
    if message.get("finish") != "length":
        return len(text)
    ends = [match.start() for match in special.finditer(text)]
    before_end = ends[-1] if ends and special.fullmatch(text[ends[-1] :]) else len(text)
    if not message["content"] and "reasoning_content" in message:
        thoughts = message["reasoning_content"].strip()
        at = text.rfind(thoughts)
        return at + len(thoughts) if at >= 0 else before_end
    return before_end
