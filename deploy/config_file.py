"""Reads a configuration, from a file or from values, and says where in it what is wrong.

Relative paths in a file are relative to the folder of the file; values have no folder, and no relative paths.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

import yaml
from pydantic import BaseModel, ValidationError

from deploy.config import DrafthouseConfig
from specdec.core.errors import ConfigError

Location = tuple[int | str, ...]
_DRAFTER_PATH_KEYS: tuple[Location, ...] = (
    ("model",),
    ("compile", "cache_dir"),
    ("retrieval", "path"),
    ("retrieval", "cache_dir"),
)
_PATH_KEYS: tuple[Location, ...] = (
    ("target", "model"),
    ("target", "compile", "cache_dir"),
    *(("speculative_config", *keys) for keys in _DRAFTER_PATH_KEYS),
    ("speculative_config", "profile_dir"),
    ("http", "api_keys_file"),
    ("http", "tls", "certificate_file"),
    ("http", "tls", "key_file"),
)


def load_config(path: str | Path) -> DrafthouseConfig:
    """Read and check a YAML file.

    Raises:
        ConfigError: one line per problem, each with file, line, dotted key, what is wrong and what would
            be right.
    """
    file = Path(path)
    try:
        root, values = _parse(file)
        lines = dict(_lines(root))
    except RecursionError:  # also what refers to itself, by an alias
        raise ConfigError(f"{file}: its blocks and lists are too deep in each other") from None
    problems = [f"{file}:{line}: {text}" for line, text in _duplicate_keys(root)]
    if problems:
        raise ConfigError("\n".join(problems))
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: must hold keys and values (target: ...), not {type(values).__name__}")
    problems = [f"{file}:{_line_of(keys, lines)}: {text}" for keys, text in _made_absolute(values, file)]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return DrafthouseConfig.model_validate(values)
    except ValidationError as error:
        found = [_problem(details, lines) for details in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{file}:{line}: {text}" for line, text in found)) from None


def parse_config(values: object) -> DrafthouseConfig:
    """Check values that did not come from a file, such as the arguments in a Serve config.

    Raises:
        ConfigError: one line per problem, as `load_config` words them, without a place.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"must hold keys and values (target: ...), not {type(values).__name__}")
    problems = [
        f"{_dotted(keys)}: must be absolute here, got {path!r}"
        for keys in _path_keys(values)
        if isinstance(path := _at(values, keys), str) and not Path(path).is_absolute()
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return DrafthouseConfig.model_validate(values)
    except ValidationError as error:
        found = [_problem(details, {(): 0}) for details in error.errors(include_url=False)]
        raise ConfigError("\n".join(text for _, text in found)) from None


def _path_keys(values: dict[str, Any]) -> Iterator[Location]:
    """Yield where paths may stand: for every model its own."""
    yield from _PATH_KEYS
    yield from _drafter_path_keys(values, ())
    models = values.get("models")
    for name in models if isinstance(models, dict) else ():
        yield from (("models", str(name), *keys) for keys in _PATH_KEYS if keys[0] != "http")
        yield from _drafter_path_keys(values, ("models", str(name)))


def _drafter_path_keys(values: dict[str, Any], model: Location) -> Iterator[Location]:
    """Yield where paths may stand in the list of several drafters."""
    drafters = (*model, "speculative_config", "drafters")
    listed = _at(values, drafters)
    for index in range(len(listed)) if isinstance(listed, list) else ():
        yield from ((*drafters, index, *keys) for keys in _DRAFTER_PATH_KEYS)


def _at(values: dict[str, Any], keys: Location) -> Any:
    block: Any = values
    for name in keys:
        if isinstance(block, list) and isinstance(name, int):
            block = block[name]
        else:
            block = block.get(name) if isinstance(block, dict) else None
    return block


def _parse(file: Path) -> tuple[yaml.Node, Any]:
    """Return the tree with its positions, and the plain values."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {file} does not exist") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error.strerror}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{file}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if root is None:
        raise ConfigError(f"{file} is empty; it needs at least target: model: PATH")
    return root, values


def _lines(node: yaml.Node, location: Location = ()) -> Iterator[tuple[Location, int]]:
    """Yield the line (1-based) on which each key or item stands."""
    yield location, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*location, str(key.value))
            yield from _lines(value, inner)
            yield inner, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines(item, (*location, index))


def _duplicate_keys(node: yaml.Node, location: Location = ()) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for every key that appears twice in one block; YAML would let the last one win."""
    if isinstance(node, yaml.MappingNode):
        first_line: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first_line and name != "<<":
                yield line, f"{_dotted((*location, name))}: appears twice, first on line {first_line[name]}"
            first_line.setdefault(name, line)
            yield from _duplicate_keys(value, (*location, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _duplicate_keys(item, (*location, index))


def _made_absolute(values: dict[str, Any], file: Path) -> Iterator[tuple[Location, str]]:
    """Make paths in the values of a file absolute; yield where one is that cannot be, and why.

    Links stay what they are: who renews a key or a certificate lets one lead to another file.
    """
    for keys in _path_keys(values):
        *blocks, key = keys
        block = _at(values, tuple(blocks))
        if not isinstance(block, dict) or not isinstance(block.get(key), str):
            continue
        try:
            block[key] = str(_without_steps_back(file.absolute().parent / Path(block[key]).expanduser()))
        except (OSError, ValueError, RuntimeError) as error:  # no text for a system, or ~ of nobody
            yield keys, f"{_dotted(keys)}: {block[key]!r} is no path: {error}"


def _without_steps_back(path: Path) -> Path:
    """Return the path without `..`, which may be behind a link; raise where it is none."""
    path.resolve()
    last = max((index for index, part in enumerate(path.parts) if part == ".."), default=None)
    if last is None:
        return path
    return Path(*path.parts[: last + 1]).resolve().joinpath(*path.parts[last + 1 :])


def _problem(details: Any, lines: dict[Location, int]) -> tuple[int, str]:
    kind = details["type"]
    location, block = _in_file(tuple(details["loc"]))
    if kind == "union_tag_not_found":
        location, kind = (*location, _discriminator(details)), "missing"
    line = _line_of(location, lines)
    key = _dotted(location)
    if kind == "missing":
        return line, f"{key}: is required"
    if kind == "extra_forbidden":
        return line, f"{key}: unknown key{_did_you_mean(str(location[-1]), block)}"
    if kind == "union_tag_invalid":
        expected, tag = details["ctx"]["expected_tags"], details["ctx"]["tag"]
        return line, f"{key}.{_discriminator(details)}: input should be one of {expected}, got {tag!r}"
    reason = details["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return line, f"{key}: {reason}" if key else reason
    return line, f"{key}: {reason[:1].lower()}{reason[1:]}, got {details['input']!r}"


def _line_of(location: Location, lines: dict[Location, int]) -> int:
    """Return the line of a key; of the block that should hold it, where it has none."""
    known = location
    while known not in lines:
        known = known[:-1]
    return lines[known]


def _in_file(location: Location) -> tuple[Location, type[BaseModel] | None]:
    """Return where in a file a place is that pydantic names, and the block that the last key belongs to.

    Of a union of blocks pydantic names the one that is meant, by its tag (`tree.dynamic.top_k`): a file has
    no such key. The block is None where the place is an item of a list, or the name of a model.
    """
    keys: list[int | str] = []
    block: type[BaseModel] | None = None
    allowed: Any = DrafthouseConfig
    for part in location:
        blocks = _blocks_in(allowed)
        if len(blocks) > 1:
            allowed = next((one for one in blocks if _has_tag(one, part)), None)
            continue
        keys.append(part)
        block = blocks[0] if blocks else None
        if block is None:
            allowed = _item_of(allowed)
        else:
            field = block.model_fields.get(str(part))
            allowed = None if field is None else field.annotation
    return tuple(keys), block


def _item_of(annotation: Any) -> Any:
    """Return what the items of a list are, or those that have names; None: it is neither."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is dict:
        return inner[1]
    return inner[0] if typing.get_origin(annotation) is tuple else None


def _blocks_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the blocks that a value may be which an annotation describes, not as items of a list."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _blocks_in(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [block for option in typing.get_args(annotation) for block in _blocks_in(option)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _has_tag(block: type[BaseModel], tag: int | str) -> bool:
    """Whether a block of a union is the one that is meant by a tag: a field of it takes that alone."""
    return any(tag in typing.get_args(field.annotation) for field in block.model_fields.values())


def _discriminator(details: Any) -> str:
    """Return the key that tells the blocks of a union apart."""
    return str(details["ctx"]["discriminator"]).strip("'")


def _did_you_mean(key: str, block: type[BaseModel] | None) -> str:
    if block is None:
        return ""
    near = difflib.get_close_matches(key, block.model_fields, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known here: {', '.join(block.model_fields)}"


def _dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
