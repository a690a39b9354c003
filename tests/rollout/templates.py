"""Chat templates of the kinds that models have, and those that TRL ships, each with a tokenizer of its tokens."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from fppo import quickstart
from fppo.data.chat import end_of_turn

WORDS = ["What is 3 x 4? The answer is 12. and then? <think> hm </think> Let me call the tool with x = 1. Oslo"] * 3
_SPECIAL = re.compile(r"<\|?[A-Za-z_]+\|?>|<\uff5c[^\uff5c<>]+\uff5c>|\[/?[A-Z_]+\]")
_PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|tools|function|parameter|IMPORTANT)>")
_OPEN = "{% if add_generation_prompt %}"

# what each leaves out, changes or ends otherwise than at the end of a conversation
KINDS = {
    "forgets thinking": (  # as Qwen3: thoughts before the last user's message go, one comes at the end, maybe empty
        "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n{% if '</think>' in m.content %}"
        "{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}{% endif %}\n</think>\n\n{% endif %}"
        "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
        "{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}<|im_end|>\n{% endfor %}"
        + _OPEN
        + "<|im_start|>assistant\n{% endif %}"
    ),
    "ends at the end": (  # as Phi-3: a token more where a conversation ends
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        + _OPEN
        + "<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
    ),
    "no end of a turn": (  # as GLM-4: the next turn's role is what ends one
        "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}\n"
        "{{ m.content }}{% endfor %}" + _OPEN + "<|assistant|>\n{% endif %}"
    ),
    "another end, and calls": (  # as gpt-oss: <|return|> ends a conversation, <|end|> a turn; tools answer calls alone
        "{% for m in messages %}{% if m.thinking and loop.last %}<|start|>assistant<|message|>{{ m.thinking }}<|end|>"
        "{% endif %}{% if m.role == 'tool' %}"
        "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        "<|start|>functions.{{ messages[loop.index0 - 1].tool_calls[0].function.name }}<|message|>"
        "{{ m.content | tojson }}<|end|>"
        "{% elif m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endif %}{% endfor %}"
        + _OPEN
        + "<|start|>assistant{% endif %}"
    ),
    "answers within a turn": (  # as Gemma 4: a tool's answer is a part of the turn that called it
        "{% for m in messages %}{% if m.role != 'tool' %}<|turn>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}<|tool_call>{% set call = m.tool_calls[0].function %}{{ call.name }}"
        "{{ call.arguments | tojson }}<tool_call|>"
        "<|tool_response>{{ messages[loop.index0 + 1].content }}<tool_response|>{% else %}<turn|>\n{% endif %}"
        "{% endif %}{% endfor %}"
        + _OPEN
        + "{% if messages[-1].role != 'tool' %}<|turn>assistant\n{% endif %}{% endif %}"
    ),
    "parts": (  # as those of image models: contents are lists of parts
        "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% endif %}{% endfor %}<eos>\n{% endfor %}" + _OPEN + "<|assistant|>{% endif %}"
    ),
    "strips": (  # as many: what an assistant said is stripped of white space
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|eot|>{% endfor %}"
        + _OPEN
        + "<|assistant|>{% endif %}"
    ),
}


def shipped() -> dict[str, str]:
    """The templates that TRL ships, by name, read off its files; none where it is not installed."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(next(iter(found.submodule_search_locations))) / "chat_templates"
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}


@cache
def _trained() -> str:
    return quickstart.bpe_tokenizer(WORDS, size=420).backend_tokenizer.to_str()


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the template and its special tokens, whose end is that of the template's turns."""
    from tokenizers import Tokenizer

    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    named = set(_SPECIAL.findall(template)) | set(re.findall(r"<\|(?:user|assistant|tool|system)\|>", template))
    if "<|{{" in template:
        named |= {f"<|{role}|>" for role in ("user", "assistant", "tool", "system")}
    special = sorted(name for name in named if not _PLAIN.fullmatch(name) and name not in ("<pad>", "<eos>"))
    words.add_special_tokens({"additional_special_tokens": special})
    words.chat_template = template
    words.bos_token = "<eos>"
    end = end_of_turn(words)
    if end is None and "<|user|>" in special:  # the next turn's role ends one
        end = words.convert_tokens_to_ids("<|user|>")
    if end is not None:
        words.eos_token = words.convert_ids_to_tokens(end)
    return words
