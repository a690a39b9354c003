"""Tokenizers that put a space before a text, each in another way, as those of SentencePiece do."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = ["the sum of two and three is five please add more and say the answer again [INST] [/INST] yes no = 24>>"] * 50
MARKS = ["<unk>", "<s>", "</s>"]
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_PARTS = {
    "prepend": {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])},
    "first": {"pre_tokenizer": pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)},
    "always": {"pre_tokenizer": pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)},
    "never": {"pre_tokenizer": pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)},
}
KINDS = tuple(_PARTS)


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a kind, with the chat template of Llama 2 and the first Mistrals."""
    base = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    single = [f"<0x{i:02X}>" for i in range(256)]
    base.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=500, special_tokens=MARKS + single))
    text = json.loads(base.to_str())
    text |= {"normalizer": None, "pre_tokenizer": None, "added_tokens": text["added_tokens"][:3]}
    whole = Tokenizer.from_str(json.dumps(text))
    for name, part in _PARTS[kind].items():
        setattr(whole, name, part)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    whole.decoder = decoders.Sequence(parts)
    names = dict(zip(("unk_token", "bos_token", "eos_token"), MARKS, strict=True))
    made = PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<unk>", **names)
    made.chat_template = LLAMA_2
    return made
