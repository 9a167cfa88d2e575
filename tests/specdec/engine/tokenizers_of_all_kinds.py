"""Small tokenizers of the kinds that models come with, made from scratch."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec.engine.text.tokenizer import HuggingFaceTokenizer

EOS = "<eos>"


class _WithBackend:
    """As much of a transformers tokenizer as the engine uses."""

    def __init__(self, backend: Tokenizer, special_ids: list[int]) -> None:
        self.backend_tokenizer = backend
        self.all_special_ids = special_ids

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode(text).ids}


def byte_level() -> HuggingFaceTokenizer:
    """GPT-2's kind: 256 bytes and a few merges, some of them in the middle of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {EOS: 0} | {character: index + 1 for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for text in ("th", "in", "\u00e9", "\U0001f600", "\u4f60", " a"):
        pieces = [
            piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        ]
        symbols = list("".join(pieces))
        merge = (symbols[0], symbols[1])  # the first two bytes only: a token that ends inside a character
        if "".join(merge) not in vocab:
            vocab["".join(merge)] = len(vocab)
            merges.append(merge)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return HuggingFaceTokenizer(_WithBackend(backend, [0]))


def sentencepiece_like(*, declares_special_ids: bool = True) -> HuggingFaceTokenizer:
    """Llama 2's kind: words begin with U+2581, unknown characters fall back to bytes."""
    words = ["\u2581the", "\u2581a", "\u2581", "cat", "s", "\u2581dog", "e", "t", "h", "a", "\u00e9"]
    tokens = [EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens([EOS])
    return HuggingFaceTokenizer(_WithBackend(backend, [0] if declares_special_ids else []))


def word_piece() -> HuggingFaceTokenizer:
    """BERT's kind: a space before every token that does not begin with ##."""
    tokens = [EOS, "[UNK]", "play", "##ing", "##ed", "the", "a", "dog", "##s", "."]
    backend = Tokenizer(
        models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens([EOS])
    return HuggingFaceTokenizer(_WithBackend(backend, [0]))


KINDS = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like, "word_piece": word_piece}
