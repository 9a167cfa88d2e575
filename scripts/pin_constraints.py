"""Write constraints.txt from what is installed: `.venv/bin/python scripts/pin_constraints.py`.

Only distributions that drafthouse needs (directly, through an extra, or through another of them) are
pinned, so that stray packages of a developer's environment stay out.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
EXTRAS = frozenset({"train", "dev"})
TOOLS = ("pip",)
"""Pinned too, although no distribution declares that it needs them."""

HEADER = """\
# Every dependency of drafthouse, direct and indirect, at the version that the tests run with
# (Python 3.11, Linux x86-64). Written by scripts/pin_constraints.py; `make install` applies it.
# The CUDA packages that a CUDA build of torch brings are pinned by torch itself.
"""


def required_closure(name: str, extras: frozenset[str]) -> dict[str, str]:
    """Installed versions (canonical name -> public version) of everything `name` needs, itself excluded."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while pending:
        current, extra = pending.pop()
        if (current, extra) in seen:
            continue
        seen.add((current, extra))
        try:
            distribution = metadata.distribution(current)
        except metadata.PackageNotFoundError:
            continue
        # Build tags such as torch's "+cpu" name a wheel of one index, not a version.
        versions[current] = Version(distribution.version).public
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            needed = canonicalize_name(requirement.name)
            pending.extend((needed, wanted) for wanted in ("", *requirement.extras))
    versions.pop(canonicalize_name(name), None)
    return versions


def tested_versions() -> dict[str, str]:
    """What constraints.txt should hold, given the environment that this runs in."""
    tools = {tool: metadata.version(tool) for tool in TOOLS}
    return required_closure("drafthouse", EXTRAS) | tools


def comes_with_torch(name: str) -> bool:
    """Whether a CUDA build of torch pins this distribution exactly by itself."""
    return name.startswith(("nvidia-", "cuda-")) or name == "triton"


def main() -> None:
    pins = {name: version for name, version in tested_versions().items() if not comes_with_torch(name)}
    CONSTRAINTS.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
    print(f"{CONSTRAINTS}: {len(pins)} pins")


if __name__ == "__main__":
    main()
