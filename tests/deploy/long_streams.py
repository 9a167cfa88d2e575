"""Rolling updates under streams that outlast the drain time, for real; run by `test_rolling_update.py`.

python tests/deploy/long_streams.py MODELS PORT

MODELS has the folders target, draft, redrafted and other, as for `rolling.py`. There are two doors and two
target groups, which serve one request at a time each: what waits, and what runs, outlasts the drain time of a
group, and that of a door. Clients come back with the id of the last event that they have.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.reconnecting import Reading, read_stream
from tests.deploy.rolling import changed, deploy, serve_config, serving, wait_for

NUM_CLIENTS = 8
DRAIN_S = 1.0
_PATIENCE_S = 200.0
_LIMIT_S = 900.0
_MAX_TOKENS = 220
_PROMPTS = [[5 + index, 6, 7 + index, 8] for index in range(4)]
_ROOM = 5


def config_of(models: Path) -> dict[str, Any]:
    """That of `rolling.py` with a short drain time, two doors, and groups that serve one at a time."""
    config = changed(serve_config(models), "cluster", drain_timeout_s=DRAIN_S)
    config = changed(config, "http", num_replicas=2)
    config["applications"][0]["args"]["config"]["scheduler"] = {"max_num_seqs": 1}
    return config


@dataclass(slots=True)
class Load:
    """Clients that never rest, and what they have read since the last look."""

    client: httpx.AsyncClient
    done: list[tuple[int, Reading]] = field(default_factory=list)
    """By prompt."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _is_over: bool = False

    def start(self) -> None:
        self._tasks += [asyncio.create_task(self._read_on(number)) for number in range(NUM_CLIENTS)]

    async def _read_on(self, number: int) -> None:
        while not self._is_over:
            which = number % len(_PROMPTS)
            self.done.append((which, await read(self.client, which)))
            number += 1

    async def while_updating(self, config: dict[str, Any]) -> None:
        """Deploy this beside the load, and read on until every client has begun anew."""
        since_s = await asyncio.to_thread(deploy, config)
        await asyncio.to_thread(wait_for, "RUNNING", since_s)
        least, until_s = len(self.done) + 2 * NUM_CLIENTS, time.monotonic() + _LIMIT_S
        while len(self.done) < least:
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < until_s, f"streams stand still at {len(self.done)}"
            await asyncio.sleep(0.1)

    def taken(self) -> list[tuple[int, Reading]]:
        """The streams since the last call."""
        done, self.done = self.done, []
        return done

    async def end(self) -> None:
        self._is_over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), _LIMIT_S)


async def read(client: httpx.AsyncClient, which: int) -> Reading:
    body = {
        "model": "m",
        "prompt": _PROMPTS[which],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    return await read_stream(client, "/v1/completions", body, patience_s=_PATIENCE_S, reading=Reading())


async def answers(client: httpx.AsyncClient) -> dict[int, list[int]]:
    """What the target says to each prompt, with nobody else there."""
    of_target = {}
    for which in range(len(_PROMPTS)):
        reading = await read(client, which)
        assert reading.is_complete, reading
        assert len(reading.token_ids) == _MAX_TOKENS, reading
        of_target[which] = reading.token_ids
    return of_target


def kind_of(reading: Reading, old: list[int], new: list[int] | None) -> str:
    """Whose stream it was: of one target from beginning to end, whole or (the old one's) told to be cut."""
    if reading.is_complete:
        kinds = {"old": old, "new": new}
        return next((name for name, tokens in kinds.items() if tokens == reading.token_ids), "wrong")
    told = reading.refusal or ""
    was_cut = told.startswith("400") and "another request, API key or model" in told
    is_part = reading.token_ids == old[: len(reading.token_ids)]
    return "cut" if new is not None and was_cut and is_part and reading.num_breaks else "wrong"


async def scenario(models: Path, url: str) -> None:
    first = config_of(models)
    wait_for("RUNNING", deploy(first))
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(_PATIENCE_S)) as client:
        old = await answers(client)
        load = Load(client)
        load.start()
        redrafted = changed(first, "speculative_config", model=str(models / "redrafted"))
        await load.while_updating(redrafted)
        report("another draft model", load.taken(), old, {})

        other = changed(redrafted, "target", model=str(models / "other"))
        await load.while_updating(other)
        await load.end()
        new = await answers(client)
        assert new != old
        report("a new target", load.taken(), old, new)


def report(
    what: str, readings: list[tuple[int, Reading]], old: dict[int, list[int]], new: dict[int, list[int]]
) -> None:
    """Say what came of all streams, and raise what should not have; `new` is empty if there is none."""
    each = [(kind_of(one, old[which], new.get(which)), one) for which, one in readings]
    kinds, wrong = Counter(kind for kind, _ in each), [one for kind, one in each if kind == "wrong"]
    num_breaks = sum(one.num_breaks for _, one in each)
    longest_s = max(one.longest_pause_s for _, one in each)
    told = f"{num_breaks} connections broke, longest pause {longest_s:.1f} s"
    print(f"{what}: {dict(kinds)}, {told}", flush=True)
    assert not wrong, wrong[:3]
    assert num_breaks > 0, "no stream has outlasted its door: this has shown nothing"
    assert not new or kinds["new"] >= NUM_CLIENTS, "too few streams have begun behind the update"


def main() -> None:
    models, port = Path(sys.argv[1]), int(sys.argv[2])
    with serving(port, _ROOM) as url:
        asyncio.run(scenario(models, url))
        print("updated without a wrong token")


if __name__ == "__main__":
    main()
