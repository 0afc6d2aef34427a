"""Chat templates, each with the rules of a public family. None of their text is a family's.

`FAMILIES` has them by name. `RULES` has the shapes that each refuses or loses.
"""

from __future__ import annotations

from typing import Any, Final

_CHATML_END: Final = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML: Final = (
    """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call: <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""
    + _CHATML_END
)

_LISTED: Final = """{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}"""

# Thoughts after the last question; results in turns of the user; any later system message.
THINKING: Final = """{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and message.reasoning_content %}<think>
{{ message.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user
{%- endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# A system message only first, a question somewhere, arguments one by one, thoughts kept by a switch.
SYSTEM_FIRST: Final = (
    """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be first.') }}{% endif %}
{%- endfor %}
{%- if ns.last < 0 %}{{ raise_exception('There is no question.') }}{% endif %}
{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and (loop.index0 > ns.last or preserve_thinking) %}<think>
{{ message.reasoning_content | trim }}
</think>

{% endif %}{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
"""
    + _LISTED
    + """</function>
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' %}{{ raise_exception('Unexpected message role.') }}
{%- endif %}
{%- endfor %}"""
    + _CHATML_END
)

# Turns alternate, calls and results apart; ids have nine characters; answers are not empty.
ALTERNATING_TOOLS: Final = """{{- bos_token }}
{%- if messages[0].role == 'system' %}[SYSTEM]{{ messages[0].content }}[/SYSTEM]{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- set ns = namespace(count=0) %}
{%- for message in rest %}
{%- if message.role in ('user', 'assistant') and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.count % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant after the system message.') }}{% endif %}
{%- set ns.count = ns.count + 1 %}
{%- endif %}
{%- endfor %}
{%- for message in rest %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}{{ message.content }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Ids of calls have nine characters.') }}{% endif -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}{{ eos_token }}
{%- elif message.role == 'assistant' %}
{%- if not message.content %}{{ raise_exception('An answer has content or calls.') }}{% endif %}
{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported.') }}
{%- endif %}
{%- endfor %}"""

# Turns alternate; the system message is part of the first question; no tools.
ALTERNATING: Final = """{{- bos_token }}
{%- set start = 1 if messages[0].role == 'system' else 0 %}
{%- for message in messages[start:] %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate.') }}{% endif -%}
<|im_start|>{{ 'model' if message.role == 'assistant' else message.role }}
{% if loop.first and start %}{{ messages[0].content }}

{% endif %}{{ message.content | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>model
{% endif %}"""

# No system message at all, and turns alternate.
NO_SYSTEM: Final = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate.') }}{% endif -%}
<|im_start|>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>model
{% endif %}"""

# A line with the date; one call in a turn; the developer's own name for results.
DATED: Final = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = "" %}{% set rest = messages %}{% endif -%}
<|im_start|>system

Today Date: {{ date_string }}

{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}
{% endfor %}{{ system }}<|im_end|>
{%- for message in rest %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}<|im_start|>assistant

{{ message.content }}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>
{%- elif message.role == 'tool' %}<|im_start|>ipython

{{ message.content | tojson if message.content is mapping else message.content }}<|im_end|>
{%- else %}<|im_start|>{{ message.role }}

{{ message.content | trim }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""

# Thoughts by a switch, arguments one by one, results under a role of their own.
OBSERVED: Final = """[gMASK]
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' %}<|assistant|>
{%- if message.reasoning_content and (loop.index0 > ns.last or clear_thinking is defined and not clear_thinking) %}
<think>{{ message.reasoning_content | trim }}</think>{% endif %}
{%- if message.content | trim %}
{{ message.content | trim }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value | tojson if value is not string else value }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- elif message.role == 'system' %}<|system|>
{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking }}
{%- endif %}"""

# Only the first message is the system's, others are lost; a result needs a call before it.
INVOKED: Final = (
    """{%- set system = messages[0].content if messages[0].role == 'system' else 'You help.' -%}
]~!b[]~b]system
{{ system }}
{% for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool>
{% endfor %}[e~[
{% set ns = namespace(last=-1, called=false) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}]~b]ai
{% if message.reasoning_content and loop.index0 > ns.last %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}
{%- if message.tool_calls %}{% set ns.called = true %}
<invokes>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
"""
    + _LISTED
    + """</invoke>
{% endfor %}</invokes>{% else %}{% set ns.called = false %}{% endif %}[e~[
{% elif message.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('There is no call before this result.') }}{% endif %}
{%- if messages[loop.index0 - 1].role != 'tool' %}]~b]tool
{%- endif %}
<response>{{ message.content }}</response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[
{% endif %}
{%- elif message.role == 'user' %}]~b]user
{{ message.content }}[e~[
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""
)

# Every system message stands at the front.
GATHERED: Final = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}{% if message.role == 'system' %}
{%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message.content %}{% endif %}{% endfor %}
{{- ns.system }}{% if tools %}
Tools: {{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|User|>{{ message.content }}
{%- elif message.role == 'assistant' %}<|Assistant|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<|call|>{{ call.function.name }}
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}<|/call|>
{%- endfor %}{{ eos_token }}
{%- elif message.role == 'tool' %}<|result|>{{ message.content }}<|/result|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|Assistant|>{{ '<think>' if thinking is defined and thinking else '</think>' }}
{%- endif %}"""

# Channels: the developer's message first; thoughts under another name, and not with content.
CHANNELS: Final = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if messages[0].role in ('developer', 'system') %}{% set first = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- if first or tools %}<|start|>developer<|message|>{{ first }}
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}
{%- set ns = namespace(name=none) %}
{%- for message in rest %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('A call has content or thinking.') }}{% endif %}
{%- if message.content or message.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.content or message.thinking }}<|end|>{% endif %}
{%- for call in message.tool_calls %}{% set ns.name = call.function.name %}<|start|>assistant to=functions.
{{- call.function.name }}<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>
{%- endfor %}
{%- else %}{% set ns.name = none %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- elif message.role == 'tool' %}
{%- if not ns.name %}{{ raise_exception('A result has no call.') }}{% endif -%}
<|start|>functions.{{ ns.name }} to=assistant
{{- '<|message|>' }}{{ message.content | tojson }}<|end|>
{%- elif message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Tools are in the system message, and only there; every call needs its result.
PAIRED: Final = (
    """{%- set ns = namespace(waiting=0) %}
{%- for message in messages %}
{%- if message.role != 'tool' and ns.waiting %}{{ raise_exception('A call has no result.') }}{% endif %}
{%- if message.role == 'tool' %}
{%- if not ns.waiting %}{{ raise_exception('A result has no call.') }}{% endif %}{% set ns.waiting = ns.waiting - 1 %}
{%- endif %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- if message.role == 'system' and tools %}
{{ tools | tojson }}{% endif %}
{%- for call in message.tool_calls or [] %}{% set ns.waiting = ns.waiting + 1 %}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""
    + _CHATML_END
)

FAMILIES: Final = {
    "chatml": CHATML,
    "thinking": THINKING,
    "system-first": SYSTEM_FIRST,
    "alternating-tools": ALTERNATING_TOOLS,
    "alternating": ALTERNATING,
    "no-system": NO_SYSTEM,
    "dated": DATED,
    "observed": OBSERVED,
    "invoked": INVOKED,
    "gathered": GATHERED,
    "channels": CHANNELS,
    "paired": PAIRED,
}
_SYSTEM: Final = {"second_system": True, "late_system": True}
RULES: Final[dict[str, dict[str, Any]]] = {
    "chatml": {},
    "thinking": {"developer": True},
    "system-first": _SYSTEM | {"developer": True, "first_user": True, "lists_arguments": True},
    "alternating-tools": _SYSTEM
    | {"developer": True, "first_user": True, "turns": "parted", "short_ids": True}
    | {"fills": frozenset({"assistant"})},
    "alternating": _SYSTEM | {"developer": True, "first_user": True, "turns": "parted"},
    "no-system": _SYSTEM | {"first_system": True, "first_user": True, "turns": "parted"},
    "dated": {},
    "observed": {"developer": True, "lists_arguments": True},
    "invoked": _SYSTEM | {"developer": True, "orphans": True, "answered_results": True, "lists_arguments": True},
    "gathered": {"late_system": True, "developer": True},
    "channels": _SYSTEM | {"orphans": True, "answered_results": True, "thoughts": "thinking", "thoughts_alone": True},
    "paired": {
        "orphans": True,
        "late_results": True,
        "answered_results": True,
        "missing_results": True,
        "tools_need_system": True,
    },
}
