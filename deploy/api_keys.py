"""The file of API keys: made, read, and followed while the server runs. It holds digests, never a key.

One key per line:

    NAME sha256:HEX [max_concurrency=N] [tokens_per_minute=N] [min_priority=P]

A line may also be the 64 hexadecimal digits alone, or, with a warning, a key of 16 characters or more as it
is. Empty lines, and lines that start with #, are skipped. No message of this module shows what a line says:
where a digest is expected, somebody may have put a key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from deploy.openai.file_stamp import FileStamp, stamp_of
from deploy.openai.keys import ApiKey, KeyRing, digest_api_key
from specdec.core.errors import ConfigError
from specdec.scheduling.admission import MAX_PRIORITY

KEY_PREFIX = "dh-"
_NUM_RANDOM_BYTES = 32
_MIN_BARE_LENGTH = 16
"""A shorter word alone is no key: it would be guessed, or is the name of a line that was broken in two."""
_FOLLOW_S = 2.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
_MOST_DIGITS = 12
"""Of a limit."""
_LIMIT = re.compile(
    rf"(max_concurrency|tokens_per_minute)=([1-9][0-9]{{0,{_MOST_DIGITS - 1}}})"
    r"|(min_priority)=(-?[0-9]{1,4})"
)
_LIKE_A_DIGEST = re.compile(r"(?:sha256:.*)|[0-9a-fA-F]{32,}", re.DOTALL)
"""A word like this was meant to be one: it is not taken for a key."""
_LIKE_A_LIMIT = re.compile(r"(?:max_concurrency|tokens_per_minute|min_priority)=")
_BEGINS_WITH_DIGEST = re.compile(r"\s*sha256:[0-9a-fA-F]{64}(?!\S)")
_FORM = "`NAME sha256:HEX [max_concurrency=N] [tokens_per_minute=N] [min_priority=P]`"
_HOW = (
    "the file holds keys as their SHA-256: `drafthouse keys new NAME` makes a key and its line, "
    "`printf %s KEY | sha256sum` the digest of one that you have"
)
logger = logging.getLogger(__name__)


class _UnreadableFile(ConfigError):
    """What is in the file is not known."""


def new_api_key(
    name: str, *, max_concurrency: int | None, tokens_per_minute: int | None, min_priority: int = 0
) -> tuple[str, ApiKey]:
    """Return a random key, which is nowhere else, and what the server is to know of it.

    Raises:
        ConfigError: the name has characters, or a limit more digits, than the file could hold.
    """
    if not _NAME.fullmatch(name) or _DIGEST.fullmatch(name):
        raise ConfigError(
            f"NAME must be up to 64 letters, digits and . _ @ -, the first a letter or digit, got {name!r}"
        )
    for option, limit in (("--max-concurrency", max_concurrency), ("--tokens-per-minute", tokens_per_minute)):
        if limit is not None and limit >= 10**_MOST_DIGITS:
            raise ConfigError(f"{option}: give a number of at most {_MOST_DIGITS} digits, got {limit}")
    text = KEY_PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)
    key = ApiKey(
        name=name,
        digest=digest_api_key(text),
        max_concurrency=max_concurrency,
        tokens_per_minute=tokens_per_minute,
        min_priority=min_priority,
    )
    return text, key


def line_of(key: ApiKey) -> str:
    """Return a key's line in the file."""
    limits = {"max_concurrency": key.max_concurrency, "tokens_per_minute": key.tokens_per_minute}
    given = [f"{name}={value}" for name, value in limits.items() if value is not None]
    given += [f"min_priority={key.min_priority}"] if key.min_priority else []
    return " ".join((key.name, f"sha256:{key.digest.hex()}", *given))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line that holds a key."""

    number: int
    key: ApiKey
    is_bare: bool
    """It is the key as it is."""


def read_api_keys(file: str | Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file.

    Raises:
        ConfigError: the file cannot be read, holds no key, or has lines that are wrong: names file and lines.
    """
    lines = _lines_of(file, "http.api_keys_file")
    for line in lines:
        if line.is_bare:
            logger.warning("http.api_keys_file: %s:%d holds a key as it is; %s", file, line.number, _HOW)
    if not lines:
        raise ConfigError(f"http.api_keys_file: {file} holds no key; {_HOW}")
    return tuple(line.key for line in lines)


def add_api_key(file: Path, key: ApiKey) -> None:
    """Add a key's line to a file, which is made for its owner alone where there is none.

    Raises:
        ConfigError: the file cannot be written, has lines that are wrong, or a key of that name; nothing is
            written. The text is that of an option, `--file`.
    """
    try:
        if file.exists():
            if not file.is_file():
                raise ConfigError(f"--file: {file} is not a file")
            if any(line.key.name == key.name for line in _lines_of(file, "--file")):
                raise ConfigError(
                    f"--file: {file} has a key named {key.name}: give another name, or delete its line first"
                )
        with open(file, "ab+", opener=_for_its_owner) as out:
            out.seek(max(0, out.tell() - 1))
            is_line_open = out.read() not in (b"", b"\n")
            out.write((b"\n" if is_line_open else b"") + f"{line_of(key)}\n".encode())
    except OSError as error:
        raise ConfigError(f"--file: {file} cannot be written: {error.strerror}") from None


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _lines_of(file: str | Path, what: str) -> list[_Line]:
    """Return the lines that hold keys. `what` names the file in messages: a field, or an option."""
    try:
        texts = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise _UnreadableFile(f"{what}: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: {file} cannot be read: not UTF-8 text") from None
    lines: list[_Line] = []
    problems = []
    for number, text in enumerate(texts, 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        try:
            if _is_bare(text):
                _require_key(text.strip(), "".join(texts[number : number + 1]))
            line = _Line(number=number, key=_parsed(text), is_bare=_is_bare(text))
            _require_distinct(line, lines)
            lines.append(line)
        except ConfigError as error:
            problems.append(f"{what}: {file}:{number}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return lines


def _is_bare(line: str) -> bool:
    words = line.split()
    return len(words) == 1 and not _LIKE_A_DIGEST.fullmatch(words[0])


def _require_key(word: str, following: str) -> None:
    """Refuse a word alone that is a part of a line: an editor may have broken it in two, and whoever guessed
    the word would be let in.

    `following` is the line after it.
    """
    if _LIKE_A_LIMIT.match(word):
        raise ConfigError(f"is a limit alone: it stands in the line of its key, {_FORM}")
    if len(word) < _MIN_BARE_LENGTH:
        raise ConfigError(
            f"is a word of fewer than {_MIN_BARE_LENGTH} characters, too short for a key: a name and its "
            f"digest are one line, {_FORM}; {_HOW}"
        )
    if _NAME.fullmatch(word) and _BEGINS_WITH_DIGEST.match(following):
        raise ConfigError(f"is a word alone before a line with a digest alone: they are one line, {_FORM}")


def _parsed(line: str) -> ApiKey:
    words = line.split()
    if _is_bare(line):
        bare = digest_api_key(words[0])
        return ApiKey(name=f"key-{bare.hex()[:8]}", digest=bare)
    alone = _DIGEST.fullmatch(words[0])
    name = f"key-{alone[1][:8].lower()}" if alone else words[0]
    if alone is None and not _NAME.fullmatch(name):
        raise ConfigError(f"is not {_FORM}: {_HOW}")
    digest = alone or (_DIGEST.fullmatch(words[1]) if len(words) > 1 else None)
    if digest is None:
        raise ConfigError(f"is not {_FORM}: {_HOW}")
    limits: dict[str, int] = {}
    for position, word in enumerate(words[1 if alone else 2 :], 2 if alone else 3):
        limit = _LIMIT.fullmatch(word)
        name_of_limit = "" if limit is None else limit[1] or limit[3]
        value = 0 if limit is None else int(limit[2] or limit[4])
        is_priority = name_of_limit == "min_priority"
        if not name_of_limit or name_of_limit in limits or (is_priority and abs(value) > MAX_PRIORITY):
            raise ConfigError(
                f"word {position} is neither max_concurrency=N nor tokens_per_minute=N (N >= 1) nor "
                f"min_priority=P (-{MAX_PRIORITY} to {MAX_PRIORITY}), each once"
            )
        limits[name_of_limit] = value
    return ApiKey(
        name=name,
        digest=bytes.fromhex(digest[1]),
        max_concurrency=limits.get("max_concurrency"),
        tokens_per_minute=limits.get("tokens_per_minute"),
        min_priority=limits.get("min_priority", 0),
    )


def _require_distinct(line: _Line, before: list[_Line]) -> None:
    for other in before:
        if other.key.digest == line.key.digest:
            if other.is_bare != line.is_bare:
                bare, hashed = (line, other) if line.is_bare else (other, line)
                number = bare.number
                raise ConfigError(
                    f"line {number} is the key of line {hashed.number} as it is: delete line {number}"
                )
            raise ConfigError(f"has the digest of another line (the key named {other.key.name})")
        if other.key.name == line.key.name:
            raise ConfigError(f"has the name of another line ({line.key.name})")


class ApiKeysFile:
    """A file of keys that may change at any time, also by being replaced, as Kubernetes does with secrets."""

    def __init__(self, file: str | Path) -> None:
        self.path = Path(file)
        self._seen: FileStamp | None = None
        self._unreadable: str | None = None
        """What was said last, while the file cannot be read."""

    def changed(self) -> tuple[ApiKey, ...] | None:
        """Return the keys if the file is another one than at the call before, else None.

        Raises:
            ConfigError: it is another one, and wrong, or it cannot be read. Said once per change.
        """
        seen = stamp_of(self.path)
        if seen is not None and seen == self._seen:
            return None
        self._seen = seen
        unreadable, self._unreadable = self._unreadable, None
        try:
            return read_api_keys(self.path)
        except _UnreadableFile as error:
            # That may pass without the file looking any different: it is tried again each time.
            self._seen, self._unreadable = None, str(error)
            if self._unreadable == unreadable:
                return None
            raise


async def take_api_keys(keys_file: ApiKeysFile, ring: KeyRing) -> None:
    """Put the file's keys into `ring`, if the file is another one than before.

    A file that is wrong, or cannot be read, changes nothing, and the log says so: the keys from before stay
    in force. Where there are none yet, nobody is let in until the file can be read.
    """
    try:
        keys = await asyncio.to_thread(keys_file.changed)
    except ConfigError as error:
        if ring.why_unread is None:
            logger.error("the API keys from before stay in force: %s", error)
        else:
            ring.note_unread(str(error))
            logger.error("nobody is let in until the API keys can be read: %s", error)
    else:
        if keys is not None:
            ring.replace(keys)
            logger.info("%d API keys read from %s", len(keys), keys_file.path)


async def follow_api_keys(keys_file: ApiKeysFile, ring: KeyRing, *, interval_s: float = _FOLLOW_S) -> None:
    """Put the file's keys into `ring` whenever it changes, until cancelled; see `take_api_keys`."""
    has_failed = False
    while True:
        try:
            await take_api_keys(keys_file, ring)
        except Exception:  # the border to threads and files: who stops looking keeps revoked keys for good
            if not has_failed:
                logger.exception("the API keys could not be looked at, which is tried again")
            has_failed = True
        else:
            has_failed = False
        await asyncio.sleep(interval_s)
