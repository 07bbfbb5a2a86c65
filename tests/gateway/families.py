"""Chat templates with the peculiarities of published model families, in words of our own.

They are written with the tiny tokenizer's special tokens. What each family does is from its
published template as of November 2026.
"""

from dataclasses import dataclass

from templates import LLAMA3, QWEN3, QWEN3_HYBRID, QWEN25

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.testing.tiny import CHATML, tiny_tokenizer

_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Roles of the user and the assistant take turns, after a system message.
_ALTERNATE = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
_NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
_FOLDED = (  # the system's text is part of the first message
    "{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set messages = messages[1:] if first else messages %}"
)


def _roles(*roles: str, end: str = "<|im_end|>\n", content: str = "m.content") -> str:
    """Return a template that writes messages of these roles and no others."""
    return (
        "{% for m in messages %}{% if m.role in "
        f"{list(roles)} %}}<|im_start|>{{{{ m.role }}}}\n{{{{ {content} }}}}{end}"
        "{% endif %}{% endfor %}" + _OPEN
    )


_LLAMA2 = (
    _FOLDED + _ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>[INST] "
    "{{ (first if loop.first else '') + m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} <|im_end|>{% endif %}{% endfor %}"
)
_MISTRAL = (
    _NO_SYSTEM + _ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
_MISTRAL_TOOLS = (
    "{% if tools %}[TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' %}"
    "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[CALLS]{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters and digits') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% endfor %}<|im_end|>{% elif m.role == \'tool\' %}'
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '[RESULT]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/RESULT]'
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
_GEMMA = (
    "{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ (first if loop.first else '') + m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
_PHI4_MINI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'system' and m.tools %}<tool>{{ m.tools }}</tool>{% endif %}<|im_end|>"
    "{% endfor %}" + _OPEN
)
_DEEPSEEK_R1 = (
    "{{ (messages | selectattr('role', 'equalto', 'system') | list | map(attribute='content') "
    "| join('\n')) }}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<output>{{ m.content }}</output>{% elif m.tool_calls %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments + '\n```' }}</call>{% endfor %}<|im_end|>"
    "{% elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<think>\n{% endif %}"
)
_GLM4 = (  # a turn ends where the next one begins
    "{% if tools %}<|im_start|>system{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ 'observation' if m.role == 'tool' else m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<k>{{ k }}</k><v>{{ v }}</v>{% endfor %}</call>"
    "{% endfor %}{% endfor %}" + _OPEN
)
_GPT_OSS = (
    "{% if tools %}<|im_start|>developer{% for t in tools %}type {{ t.function.name }} = "
    "({{ t.function.parameters | tojson if t.function.parameters }}) // "
    "{{ t.function.description }}\n{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}"
    "<|im_start|>assistant to={{ m.tool_calls[0].function.name }}\n"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|im_end|>{% elif m.role == 'tool' %}"
    "<|im_start|>functions to=assistant\n{{ m.content | tojson }}<|im_end|>{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}" + _OPEN
)
_COMMAND_R_TOOLS = (  # its calls are a list in a fence, its results come from the system
    "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' }}"
    "{% for t in tools %}def {{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
    "<|im_end|>{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "<|im_start|>system\n{{ m.content }}<|im_end|>{% elif m.role in ['user', 'assistant'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}\n```json\n"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}\n```{% endif %}<|im_end|>"
    "{% elif m.role == 'tool' %}<|im_start|>system\n<results>{{ m.content }}</results><|im_end|>"
    "{% endif %}{% endfor %}" + _OPEN
)
_KIMI = (
    "{% if tools %}<|im_start|>tools{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.id }}{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    " {{ c.function.name }}</call>{% endfor %}<|im_end|>{% endfor %}" + _OPEN
)
_SMOLLM3 = (  # it reads words of the system message that switch thoughts, and removes them
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set thinks = '/no_think' not in system and enable_thinking | default(true) %}"
    "{% set system = system.replace('/no_think', '').replace('/think', '') | trim %}"
    "<|im_start|>system\nmode: {{ '/think' if thinks else '/no_think' }}\n{{ system }}"
    "{% if tools %}<tools>{% for t in tools %}{{ t | string }}{% endfor %}</tools>{% endif %}"
    "<|im_end|>\n{% for m in messages %}{% if m.role == 'user' %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ '' if thinks else '<think>\n\n</think>\n' }}{{ m.content }}"
    "<|im_end|>\n{% elif m.role == 'tool' %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _OPEN + "{% if "
    "add_generation_prompt and not thinks %}<think>\n\n</think>\n{% endif %}"
)
_GRANITE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson(indent=4) }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'tool_response' if m.role == 'tool' else m.role }}\n"
    "{{ m.content }}{% if m.tool_calls %}<|tool_call|>["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]{% endif %}<|im_end|>\n"
    "{% endfor %}" + _OPEN
)
_STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('unknown role') }}"
    "{% endif %}{% endfor %}" + _roles("system", "user", "assistant")
)


@dataclass(frozen=True)
class Family:
    """Template of a family and, if it has one, its other template for tools."""

    template: str
    tool_template: str | None = None
    ends: tuple[str, ...] = ("<|im_end|>",)

    def tokenizer(self) -> Tokenizer:
        """Return the tiny tokenizer with these templates."""
        tiny = tiny_tokenizer()
        chat = tiny.with_chat(template=self.template, tool_template=self.tool_template)
        chat.named_eos_ids = frozenset(tiny.encode("".join(self.ends)))
        return chat


FAMILIES = {
    "SmolLM2": Family(CHATML),
    "Qwen2.5": Family(QWEN25),
    "Qwen3": Family(QWEN3_HYBRID),
    "QwQ, Qwen3 Thinking": Family(QWEN3),
    "Hermes 2 Pro and 3": Family(_roles("system", "user", "assistant", "tool"), QWEN25),
    "Llama 2": Family(_LLAMA2),
    "Llama 3": Family(CHATML.replace("m['content']", "m['content'] | trim")),
    "Llama 3.1 to 3.3": Family(LLAMA3),
    "Mistral 7B v0.1, Mixtral": Family(_MISTRAL),
    "Mistral 7B v0.3, Nemo": Family(_MISTRAL_TOOLS),
    "Zephyr, TinyLlama": Family(_roles("user", "system", "assistant")),
    "Gemma 1 and 2": Family(_NO_SYSTEM + _ALTERNATE + "{% set first = '' %}" + _GEMMA),
    "Gemma 3": Family(_FOLDED + _ALTERNATE + _GEMMA),
    "Phi-3": Family(_roles("system", "user", "assistant", end="<|im_end|>\n")),
    "Phi-4 mini": Family(_PHI4_MINI),
    "DeepSeek R1 and its distillates": Family(_DEEPSEEK_R1),
    "GLM-4": Family(_GLM4, ends=("<|im_end|>", "<|im_start|>")),
    "gpt-oss": Family(_GPT_OSS),
    "Command R": Family(_roles("system", "user", "assistant"), _COMMAND_R_TOOLS),
    "Kimi K2": Family(_KIMI),
    "SmolLM3": Family(_SMOLLM3),
    "Granite 3": Family(_GRANITE),
    "OLMo 2": Family(_roles("system", "user", "assistant", end=" <|im_end|>\n")),
    "InternLM 2": Family(_STRICT),
}
