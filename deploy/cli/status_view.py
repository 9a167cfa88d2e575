"""A status as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.status import ApplicationStatus, Status
from specdec.scheduling.speculation.explanation import BOUNDS_IN_WORDS
from specdec.transport.status import (
    ChoiceStatus,
    DrafterStatus,
    DraftWorkerStatus,
    OnlineStatus,
    RecentStatus,
    TargetGroupStatus,
)

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def view_of(status: Status, url: str) -> RenderableType:
    """Return what a terminal shows of a status."""
    parts: list[RenderableType] = [_application(status.application, status.now, url), Text()]
    parts.append(_target_groups(status.target_groups, status.now))
    alone, has_pool = len(status.target_groups) == 1, bool(status.draft_workers)
    for group in status.target_groups:
        if group.choice is not None:
            parts += [Text(), _speculation(group, group.choice, alone=alone, has_pool=has_pool)]
    if status.draft_workers:
        parts += [Text(), _draft_workers(status.draft_workers, status.now)]
        parts += [
            _online(_name(worker), worker.online)
            for worker in status.draft_workers
            if worker.online is not None
        ]
    return Group(*parts)


def _application(application: ApplicationStatus, now: float, url: str) -> Text:
    text = Text(f"drafthouse {application.version} at {url}: ")
    state = ("ready", "green") if application.is_ready else ("not ready", "red")
    text.append(*state)
    text.append(f", for {_age(now - application.since)}\n")
    if not application.is_ready:
        text.append("no model takes requests: it is being loaded, replaced or shut down")
        return text
    lines = [] if application.model is None else [_model(application)]
    if application.further_models:
        lines.append(f"{'beside it ' if lines else ''}{', '.join(application.further_models)}")
    text.append("\n".join(lines))
    if application.missing_models:
        missing = ", ".join(name or "the first model" for name in application.missing_models)
        text.append(f"\ntakes no requests: {missing} (being loaded or replaced)", "red")
    return text


def _model(application: ApplicationStatus) -> str:
    numbers = "-".join(filter(None, (application.dtype, application.quantization)))
    revision = (application.revision or "")[:12]
    return (
        f"model {application.model} in {numbers}, {application.parallelism}, revision {revision}, "
        f"rule {application.rule}, up to {application.max_model_len} tokens"
    )


def _name(member: TargetGroupStatus | DraftWorkerStatus) -> str:
    """Which one it is, and of which model where there are several."""
    return member.id if member.model is None else f"{member.id} ({member.model})"


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=index != 1)
    return table


def _target_groups(groups: Iterable[TargetGroupStatus], now: float) -> Table:
    columns = (
        "target group",
        "state",
        "alive for",
        "incarnation",
        "running",
        "waiting",
        "epoch > 0",
        "KV cache",
        "busy",
    )
    table = _table("Target groups", columns)
    for group in groups:
        if not group.is_answering:
            table.add_row(_name(group), _colored("not answering", "red"), *["-"] * (len(columns) - 2))
            continue
        table.add_row(
            _name(group),
            _group_state(group),
            _age(now - group.since) if group.is_serving else "-",
            str(group.incarnation),
            f"{group.num_running} of {group.max_num_running}",
            str(group.num_waiting),
            str(group.num_continued),
            _percent(group.kv_cache_usage),
            _percent(group.utilization),
        )
    if not table.rows:
        table.add_row("none", _colored("starting, or lost", "red"))
    return table


def _group_state(group: TargetGroupStatus) -> Text:
    if group.is_draining:
        return _colored("draining", "yellow")
    if not group.is_serving:
        return _colored("replacing its target", "red")
    if group.compile_state in ("pending", "failed"):
        return _colored(f"serving, compiling {group.compile_state}", "yellow")
    return _colored("serving", "green")


def _draft_workers(workers: Iterable[DraftWorkerStatus], now: float) -> Table:
    columns = ("draft worker", "state", "alive for", "incarnation", "requests", "places", "busy")
    table = _table("Draft pool", columns)
    num_requests = num_places = 0
    busy: list[float] = []
    for worker in workers:
        num_requests += worker.num_requests
        num_places += worker.max_requests
        busy += [] if worker.utilization is None else [worker.utilization]
        table.add_row(
            _name(worker),
            _draft_state(worker),
            _age(now - worker.since),
            str(worker.incarnation),
            f"{worker.num_requests} of {worker.max_requests}",
            _share(worker.num_requests, worker.max_requests),
            "-" if worker.utilization is None else _percent(worker.utilization),
        )
    if len(table.rows) > 1:
        mean = _percent(sum(busy) / len(busy)) if busy else "-"
        total = (f"{num_requests} of {num_places}", _share(num_requests, num_places), mean)
        table.add_row("all", "", "", "", *total, style="bold")
    return table


def _online(worker: str, online: OnlineStatus) -> Text:
    """What a draft model has learnt."""
    served = f"version {online.version}" if online.version else "the weights that it came with"
    text = (
        f"{worker} learns online: drafts with {served}; {online.num_tried} tried, "
        f"{online.num_refused} refused; {online.num_buffered_tokens} tokens kept"
    )
    if online.acceptance_before is not None and online.acceptance_after is not None:
        text += (
            f"; held-back acceptance at the last trial {online.acceptance_before:.3f}, of the new version "
            f"{online.acceptance_after:.3f}"
        )
    return Text(text)


def _draft_state(worker: DraftWorkerStatus) -> Text:
    if worker.is_waited_for is None:
        return Text("not asked yet")
    if not worker.is_waited_for:
        return _colored("was late or silent", "red")
    return _colored("in time", "green")


def _speculation(
    group: TargetGroupStatus, choice: ChoiceStatus, *, alone: bool, has_pool: bool
) -> RenderableType:
    title = "Speculation" if alone else f"Speculation of {_name(group)}"
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column()
    state = ("on", "green") if choice.is_speculating else ("off", "yellow")
    lines.add_row("state", Text.assemble(state, f", {choice.mode}: {choice.explanation}"))
    lines.add_row("k", _chosen_k(choice))
    if choice.mean_kv_budget is not None:
        lines.add_row("KV budget", f"drafts attend to {choice.mean_kv_budget:.0f} tokens at most")
    recent = group.recent
    lines.add_row("tokens/s", _tokens_per_s(choice, recent))
    lines.add_row("acceptance", _acceptance(choice, recent))
    lines.add_row("T_draft", _draft_times(choice, recent))
    lines.add_row(
        "T_verify", _expected_measured(choice.expected_verify_s, None if recent is None else recent.verify_s)
    )
    lines.add_row("round", _round_times(choice, recent))
    if recent is not None and recent.hit_rate is not None:
        lines.add_row(
            "draft ahead", f"{_percent(recent.hit_rate)} hits, {_percent(recent.late_rate or 0.0)} late"
        )
    for drafter in group.drafters:
        lines.add_row("shadow" if drafter.is_shadow else "drafter", _drafter(drafter))
    lines.add_row("pool worth" if has_pool else "worth", _worth(choice.pool_worth, has_pool=has_pool))
    return Group(Text(title, style="bold"), lines)


def _drafter(drafter: DrafterStatus) -> str:
    if drafter.is_shadow:
        text = f"{drafter.name}: looks at {drafter.num_requests} requests"
    else:
        text = f"{drafter.name}: {drafter.num_running} running, {drafter.num_requests} since the start"
    if drafter.acceptance is None or drafter.tokens_per_pass is None:
        return f"{text}; no proposals yet"
    would = "would have been accepted" if drafter.is_shadow else "accepted"
    return f"{text}; {drafter.acceptance:.2f} {would}, {drafter.tokens_per_pass:.2f} tokens per proposal"


def _chosen_k(choice: ChoiceStatus) -> str:
    by_k, bound = choice.num_requests_by_k, BOUNDS_IN_WORDS.get(choice.bounded_by)
    if by_k:
        shares = (f"{k} for {count} request{'s' * (count != 1)}" for k, count in sorted(by_k.items()))
        text = f"{', '.join(shares)} (mean {choice.mean_num_draft_tokens:.3g})"
    else:
        text = f"{choice.mean_num_draft_tokens:g}"
    return text if bound is None else f"{text}; {bound}"


def _tokens_per_s(choice: ChoiceStatus, recent: RecentStatus | None) -> str:
    text = ""
    if choice.expected_tokens_per_s is not None:
        rates = choice.expected_tokens_per_s_by_mode.items()
        by_mode = ", ".join(f"{mode} {rate:.0f}" for mode, rate in rates)
        text = f"{choice.expected_tokens_per_s:.0f} expected (by mode: {by_mode}); "
    if recent is None:
        return f"{text}no rounds in the last seconds"
    return f"{text}{recent.tokens_per_s:.0f} measured over {recent.num_rounds} rounds"


def _acceptance(choice: ChoiceStatus, recent: RecentStatus | None) -> str:
    parts = []
    if choice.expected_acceptance:
        parts.append(f"{' '.join(f'{one:.2f}' for one in choice.expected_acceptance)} expected by position")
    if recent is not None and recent.acceptance is not None:
        by_method = recent.acceptance_by_method.items()
        methods = ", ".join(f"{method} {acceptance:.2f}" for method, acceptance in by_method)
        parts.append(
            f"{recent.acceptance:.2f} of draft tokens measured"
            f"{f' ({methods})' if len(by_method) > 1 else ''}, "
            f"{recent.mean_acceptance_length or 1.0:.2f} tokens per proposal"
        )
    return "; ".join(parts) or "-"


def _draft_times(choice: ChoiceStatus, recent: RecentStatus | None) -> str:
    text = _expected_measured(choice.expected_draft_s, None if recent is None else recent.draft_s)
    if recent is None:
        return text
    if recent.hidden_share is not None:
        text += f", {_percent(recent.hidden_share)} hidden behind verification"
    return f"{text}; waited for {_ms(recent.draft_wait_s)}"


def _round_times(choice: ChoiceStatus, recent: RecentStatus | None) -> str:
    text = _expected_measured(choice.expected_round_s, None if recent is None else recent.round_s)
    return text if recent is None else f"{text}; coordinator {_ms(recent.coordinator_s)}"


def _expected_measured(expected_s: float | None, measured_s: float | None) -> str:
    parts = []
    if expected_s is not None:
        parts.append(f"{_ms(expected_s)} expected")
    if measured_s is not None:
        parts.append(f"{_ms(measured_s)} measured")
    return ", ".join(parts) or "-"


def _worth(worth: float | None, *, has_pool: bool) -> Text:
    """What speculation is worth, and with it the draft workers, where there are any."""
    if worth is None:
        return Text("not known: the controller compares nothing")
    text = Text(f"{worth:.2f} of plain decoding over the last minutes: ")
    if worth > 1.0:
        text.append("worth its devices" if has_pool else "drafting pays", "green")
    elif has_pool:
        text.append("the draft pool is not worth its devices", "red")
    else:
        text.append("drafting does not pay", "yellow")
    return text


def _colored(text: str, style: str) -> Text:
    return Text(text, style=style)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _share(part: int, whole: int) -> str:
    return _percent(part / whole) if whole else "-"


def _age(seconds: float) -> str:
    """Return how long something has lasted, in its two largest units."""
    whole = max(0, int(seconds))
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"
