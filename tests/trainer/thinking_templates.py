"""Chat templates that behave as those of thinking models do, written for the tests.

HISTORY hides the thoughts of an answer once a later user turn is there, and keeps them while tools are
called; without thinking its prompt closes an empty thought. OPEN is the same, but its prompt opens a thought.
"""

from __future__ import annotations

_BODY = r"""
{%- if tools %}{{ "<|im_start|>system\n" }}{% for tool in tools %}{{ tool.function.name }};{% endfor %}
{{- "<|im_end|>\n" }}{% endif %}
{%- set at = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == "user" %}{% set at.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == "tool" %}{{ "<|im_start|>user\n<result>" + m.content + "</result><|im_end|>\n" }}
{%- elif m.role != "assistant" %}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}
{%- else %}
{%- set thoughts = m.reasoning_content or "" %}
{%- if not thoughts and "</think>" in m.content %}
{%- set thoughts = m.content.split("</think>")[0].replace("<think>", "") %}{% endif %}
{{- "<|im_start|>assistant\n" }}
{%- if loop.index0 > at.user %}{{ "<think>\n" + thoughts|trim + "\n</think>\n\n" }}{% endif %}
{{- m.content.split("</think>")[-1].lstrip("\n") }}
{%- for call in m.tool_calls or [] %}{{ "<call>" + call.function.name }}
{%- for name, value in call.function.arguments|items %}{{ " " + name + "=" ~ value }}{% endfor %}
{{- "</call>" }}{% endfor %}
{{- "<|im_end|>\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ "<think>\n\n</think>\n\n" }}
{%- else %}OPENING{% endif %}{% endif %}"""
HISTORY = _BODY.replace("OPENING", "")
OPEN = _BODY.replace("OPENING", r'{{ "<think>\n" }}')
