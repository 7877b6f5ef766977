"""Every answer is trained on as the model wrote it: under what it saw, once, whatever its template does."""

from __future__ import annotations

import random

import pytest
from tokenizers import normalizers

from tests.trainer.thinking_templates import HISTORY, OPEN
from trainer.errors import Refusal
from trainer.rendering import Conversation, Dropped, Renderer, parse_line

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "\nHello you"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "Yes."},
]
THOUGHTFUL = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "greet"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "Yes", "reasoning_content": "agree"},
]


def call(arguments: object) -> dict:
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLING = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [call({"a": 2, "b": 2})]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four", "reasoning_content": "say it"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome"},
]


def rendered(tokenizer, messages, template=None, **more) -> list[tuple[str, str]]:
    """(whole text, supervised text) of each document."""
    if template:
        tokenizer.chat_template = template
    documents = Renderer(tokenizer).documents(Conversation("x", messages, **more))
    return [
        (tokenizer.decode(d.ids), tokenizer.decode([i for i, m in zip(d.ids, d.mask, strict=True) if m]))
        for d in documents
    ]


def asked(tokenizer, messages, **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def test_only_what_the_model_would_emit_is_supervised(tokenizer):
    ((text, supervised),) = rendered(tokenizer, CHAT)
    assert supervised == "\nHello you<|im_end|>Yes.<|im_end|>"
    assert text + "\n" == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_what_follows_the_last_answer_is_left_out(tokenizer):
    assert rendered(tokenizer, CHAT[:3]) == rendered(tokenizer, CHAT[:2])


def test_what_closes_the_conversation_is_not_the_answers_end(tokenizer):
    closing = tokenizer.chat_template.replace(
        "{% if add", "{% if not add_generation_prompt %}<|endoftext|>{% endif %}{% if add"
    )
    plain = rendered(tokenizer, CHAT)
    assert rendered(tokenizer, CHAT, closing) == plain


def test_prompt_and_answer_never_merge_into_one_token(tokenizer):
    document = Renderer(tokenizer).documents(Conversation("x", CHAT[:2]))[0]
    prompt = tokenizer(asked(tokenizer, CHAT[:1]), add_special_tokens=False)["input_ids"]
    assert document.ids[: len(prompt)] == prompt
    assert document.mask == [False] * len(prompt) + [True] * (len(document.ids) - len(prompt))


@pytest.mark.parametrize("template", [HISTORY, OPEN], ids=["history", "open"])
def test_a_template_that_hides_earlier_thoughts_gives_a_document_for_each_view(tokenizer, template):
    opened = "<think>\n" if template is OPEN else ""
    first, second = rendered(tokenizer, THOUGHTFUL, template)
    for (text, supervised), turn, thought, answer in (
        (first, 2, "greet", "Hello"),
        (second, 4, "agree", "Yes"),
    ):
        written = f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>".removeprefix(opened)
        assert text == asked(tokenizer, THOUGHTFUL[:turn], enable_thinking=True) + written
        assert supervised == written
    assert "greet" not in second[0], "the model no longer saw that thought"


@pytest.mark.parametrize("template", [HISTORY, OPEN], ids=["history", "open"])
def test_an_answer_without_thoughts_is_asked_for_without_them(tokenizer, template):
    ((text, supervised),) = rendered(tokenizer, CHAT[2:], template)
    assert text == asked(tokenizer, CHAT[2:3], enable_thinking=False) + "Yes.<|im_end|>"
    assert supervised == "Yes.<|im_end|>"


def test_the_line_may_say_in_which_mode_it_was_answered(tokenizer):
    ((_, supervised),) = rendered(tokenizer, CHAT[2:], OPEN, options={"enable_thinking": True})
    assert supervised == "\n</think>\n\nYes.<|im_end|>"


def test_thoughts_inside_the_content_count_too(tokenizer):
    inline = [THOUGHTFUL[1], {"role": "assistant", "content": "<think>\ngreet\n</think>\n\nHello"}]
    assert rendered(tokenizer, inline, OPEN) == rendered(tokenizer, THOUGHTFUL[1:3], OPEN)


def test_a_tool_loop_is_one_document_until_the_next_user_turn(tokenizer):
    first, second = rendered(tokenizer, CALLING, OPEN, tools=TOOLS)
    called = "add\n</think>\n\n<call>add a=2 b=2</call><|im_end|>"
    assert first[1] == called + "say it\n</think>\n\nFour<|im_end|>"
    assert first[0].startswith("<|im_start|>system\nadd;<|im_end|>")
    assert "<result>4</result>" in first[0]
    assert second[1] == "Welcome<|im_end|>" and "say it" not in second[0]


@pytest.mark.parametrize("seed", range(20))
def test_each_answer_is_supervised_once_under_what_the_model_saw(tokenizer, seed):
    draw = random.Random(seed)
    messages: list[dict] = []
    for turn in range(draw.randrange(1, 5)):
        messages.append({"role": "user", "content": f"question {turn}"})
        while draw.random() < 0.3:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call({"n": turn})]})
            messages.append({"role": "tool", "content": f"result {draw.random()}"})
        messages.append({"role": "assistant", "content": f"answer {draw.random()}"})
    for message in messages:
        if message["role"] == "assistant" and draw.random() < 0.5:
            message["reasoning_content"] = f"thought {draw.random()}"
    tokenizer.chat_template = draw.choice([HISTORY, OPEN])
    documents = rendered(tokenizer, messages)
    answers = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = asked(tokenizer, messages[:turn], enable_thinking="reasoning_content" in message)
            whole = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
            answers.append(whole[len(prompt) :].removesuffix("\n"))
            assert sum(text.startswith(prompt + answers[-1]) for text, _ in documents) == 1
    assert "".join(supervised for _, supervised in documents) == "".join(answers)


def test_generation_marks_serve_where_the_prompt_is_no_prefix(tokenizer):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>said\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>says\n{% endif %}"
    )
    ((text, supervised),) = rendered(tokenizer, CHAT[2:], template)
    assert text == "<|im_start|>user\nMore<|im_end|>\n<|im_start|>said\nYes.<|im_end|>"
    assert supervised == "Yes.<|im_end|>"
    unmarked = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(Dropped, match="does not begin with its generation prompt"):
        rendered(tokenizer, CHAT[2:], unmarked)


def test_generation_marks_change_nothing_where_the_prompt_is_a_prefix(tokenizer):
    plain = rendered(tokenizer, CHAT)
    marked = tokenizer.chat_template.replace(
        "{{ message['content'] }}", "{% generation %}{{ message['content'] }}{% endgeneration %}"
    )
    assert rendered(tokenizer, CHAT, marked) == plain


def test_a_conversation_that_the_template_refuses_is_dropped_with_its_words(tokenizer):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('start with a user') }}{% endif %}"
    with pytest.raises(Dropped, match=r"the chat template refuses it \(start with a user\)"):
        rendered(tokenizer, THOUGHTFUL, strict + tokenizer.chat_template)


def test_a_greeting_that_nobody_asked_for_is_context(tokenizer):
    ((text, supervised),) = rendered(tokenizer, CHAT[1:])
    assert "Hello you" in text and supervised == "Yes.<|im_end|>"
    with pytest.raises(Dropped, match="no assistant turn"):
        rendered(tokenizer, CHAT[1:2])


@pytest.mark.parametrize(
    ("answer", "supervised"),
    [({"content": "Yes"}, "greet\n</think>\n\nYes"), ({"content": ""}, "greet")],
    ids=["in the answer", "in the thoughts"],
)
def test_of_an_answer_that_the_limit_cut_only_what_was_written_is_supervised(tokenizer, answer, supervised):
    cut = {"role": "assistant", "reasoning_content": "greet", "finish": "length"} | answer
    first, second = rendered(tokenizer, [CHAT[0], cut, *CHAT[2:]], OPEN)
    assert first[1] == supervised and first[0].endswith("<|im_end|>")
    assert second[1] == "Yes.<|im_end|>"


def test_text_that_the_tokens_cannot_spell_is_dropped(tokenizer):
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(Dropped, match="do not spell"):
        rendered(tokenizer, CHAT)


def test_a_line_of_a_server_or_a_data_set_is_read_as_templates_want_it():
    line = (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},'
        '{"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [{"id": "1", "function":'
        '{"name": "f", "arguments": "{\\"x\\": 1}"}}]}],'
        '"tools": "[{\\"type\\": \\"function\\"}]", "chat_template_kwargs": {"enable_thinking": true}}'
    )
    read = parse_line(line, "f:7")
    assert read.key == "f:7" and read.options == {"enable_thinking": True}
    assert read.tools == [{"type": "function"}]
    assert read.messages[0] == {"role": "user", "content": "ab"}
    answer = read.messages[1]
    assert answer["content"] == "" and answer["reasoning_content"] == "r" and "reasoning" not in answer
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    with pytest.raises(Refusal, match='f:7: turn 0 has no text "content"'):
        parse_line('{"messages": [{"role": "user", "content": null}]}', "f:7")
