"""The demo family's tokenizer: byte-level BPE with 4,096 ids, shared by target and draft."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.corpus import ChatExample, SourceFile, chat_examples

VOCAB_SIZE = 4096
CONTEXT_LENGTH = 4096
SEPARATOR = "<|endoftext|>"
PAD = "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (SEPARATOR, PAD, SYSTEM, USER, ASSISTANT, END)
"""Ids 0..5, in this order."""
SEPARATOR_ID, PAD_ID, _, USER_ID, ASSISTANT_ID, END_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|system|>Functions that you may call, as JSON:\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ 'To call one, write\\n<tool_call>\\n"
    '{"name": its name, "arguments": its arguments}'
    "\\n</tool_call><|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\\n' + message['content'] + '\\n</tool_response><|end|>' }}"
    "{% else %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n' + {'name': call['function']['name'], 'arguments': call['function']['arguments']}"
    " | tojson + '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Tools are described, called and answered as the Hermes family does it. The demo models have not seen any in
training: their calls are of use only where a grammar keeps them to it."""

# Words (with one space or the underscores before them), digits, punctuation runs, newlines, indentation.
# Newlines and indentation stay apart, and punctuation apart from words: a prompt may end after any of them.
_PIECES = r" ?_+\p{L}*| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}_]+|\n+|[ \t]+|\s+"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train on ``texts``; deterministic for the same texts in the same order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=PAD,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template; older transformers read them too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for loading_option in ("backend", "is_local", "local_files_only"):
        settings.pop(loading_option, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a model folder."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of plain text: no separator is added and markers inside the text stay plain text."""
    return list(
        tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    )


def encode_chat(tokenizer: PreTrainedTokenizerFast, example: ChatExample) -> list[int]:
    """Token ids of one question and answer in the chat template's form."""
    return [
        USER_ID,
        *encode_text(tokenizer, example.user),
        END_ID,
        ASSISTANT_ID,
        *encode_text(tokenizer, example.assistant),
        END_ID,
    ]


def encode_files(tokenizer: PreTrainedTokenizerFast, files: Iterable[SourceFile]) -> list[np.ndarray]:
    """One uint16 array per file, without separators (the packing adds them)."""
    return [np.asarray(encode_text(tokenizer, file.text), dtype=np.uint16) for file in files]


def encode_chats(tokenizer: PreTrainedTokenizerFast, files: tuple[SourceFile, ...]) -> list[np.ndarray]:
    """One uint16 array per chat example derived from ``files``."""
    return [np.asarray(encode_chat(tokenizer, example), dtype=np.uint16) for example in chat_examples(files)]
