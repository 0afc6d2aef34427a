"""Chat templates with scales of efforts of their own. None of their text is a family's."""

from __future__ import annotations

from typing import Final

_TURNS: Final = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
"""
_REFUSES: Final = "{{ raise_exception('no effort ' ~ reasoning_effort) }}"

SCALES: Final = {
    # Low, medium, xhigh while it thinks, and any while it does not.
    "low medium xhigh": "{%- set effort = reasoning_effort | default('xhigh') %}"
    "{%- if enable_thinking is not defined or enable_thinking %}"
    "{%- if effort not in ['low', 'medium', 'xhigh'] %}"
    + _REFUSES
    + "{% endif %}Effort {{ effort }}.\n{% endif %}"
    + _TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}<think>{% endif %}",
    # High and max, whether it thinks or not. Another switch.
    "high max": "{%- set effort = reasoning_effort | default('high') %}"
    "{%- if effort not in ('high', 'max') %}"
    + _REFUSES
    + "{% endif %}{% if effort == 'max' %}Most.{% endif %}"
    + _TURNS
    + "{{ '<think>' if thinking is not defined or thinking else '</think>' }}{% endif %}",
    # The effort is the switch.
    "none high": "{%- set effort = reasoning_effort | default('none') %}"
    "{%- if effort not in ('none', 'high') %}"
    + _REFUSES
    + "{% endif %}Effort {{ effort }}.\n"
    + _TURNS
    + "{% endif %}",
    # Thoughts cannot be turned off. The middle one writes nothing.
    "always": "{%- if enable_thinking is defined and not enable_thinking %}{{ raise_exception('always') }}{% endif %}"
    "{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}"
    + _REFUSES
    + "{% endif %}"
    "{%- if reasoning_effort == 'low' %}Brief.{% elif reasoning_effort == 'xhigh' %}Long.{% endif %}"
    + _TURNS
    + "<think>{% endif %}",
    # Any word is written.
    "any": "Reasoning: {{ reasoning_effort or 'medium' }}\n" + _TURNS + "{% endif %}",
}
