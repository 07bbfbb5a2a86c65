"""Chat templates for the tests, each with the habits of one model family.

They write the family's wire format, and treat old messages as that family's templates do.
"""

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.testing.tiny import CHATML, tiny_tokenizer

_TOOLS = (
    "{%- if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' }}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "{#- in <tool_call> tags -#}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{%- endif %}"
)
_CALLS = (
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_REPLY = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)

# Tool replies share one user turn.
QWEN25 = (
    _TOOLS + "{%- for m in messages %}{%- if m.role == 'tool' %}" + _REPLY + "{%- elif "
    "m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
    "{%- elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Old think blocks are dropped, and the prompt opens a block that is not repeated in the history.
QWEN3 = (
    _TOOLS + "{%- for m in messages %}{%- if m.role == 'tool' %}" + _REPLY + "{%- elif "
    "m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}" + _CALLS + "<|im_end|>\n"
    "{%- elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Thinks unless the variable `enable_thinking` is false: then the prompt has an empty block. Blocks
# are shown again only after the user's last question.
QWEN3_HYBRID = (
    "{%- set last = namespace(question=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}"
    + _TOOLS
    + "{%- for m in messages %}{%- if m.role == 'tool' %}"
    + _REPLY
    + "{%- elif m.role == 'assistant' %}{%- set thought = m.reasoning_content %}"
    "{%- set whole = '<think>' + thought + '</think>' + m.content if thought else m.content %}"
    "{%- set parts = whole.split('</think>') %}"
    "<|im_start|>assistant\n{%- if loop.index0 > last.question and (loop.last or parts[1:]) %}"
    "<think>\n{{ parts[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}" + _CALLS + "<|im_end|>\n"
    "{%- elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The header has the number of messages, as other templates have the time. Content is trimmed, and a
# message may have only one call.
LLAMA3 = (
    "<|im_start|>system\nMessages: {{ messages | length }}\n"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with {"name": ..., "parameters": ...}<|start_header_id|>{% endif %}<|im_end|>'
    "{%- for m in messages %}{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '<|im_start|>assistant\n\n{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>"
    "{%- else %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
    "{{ m.content | trim }}<|im_end|>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
TEMPLATES = {"smollm": CHATML, "qwen2.5": QWEN25, "qwen3": QWEN3}
TEMPLATES |= {"qwen3-hybrid": QWEN3_HYBRID, "llama3": LLAMA3}


def tokenizer_with(template: str) -> Tokenizer:
    """Return the tiny tokenizer with another template."""
    return tiny_tokenizer().with_chat(template=template)
