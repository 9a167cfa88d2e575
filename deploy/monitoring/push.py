"""Dashboards into a Grafana, through `grafana-client` (extra `grafana`).

Pushing twice changes nothing: dashboards are known by uid, the folder by its uid, which its title gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from grafana_client import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, GrafanaTimeoutError
from niquests.exceptions import SSLError

from deploy.loopback import is_loopback
from specdec.core.errors import DrafthouseError, UserError

Change = Literal["created", "updated", "unchanged"]
DEFAULT_FOLDER = "Drafthouse"
_TIMEOUT_S = 10.0
_MESSAGE = "drafthouse dashboards push"
_GIVEN_BY_GRAFANA = frozenset({"id", "version", "schemaVersion"})
"""Keys that a stored dashboard has whatever was pushed."""


class GrafanaUnavailable(DrafthouseError):
    """A Grafana is there and does not do now what it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What has become of one dashboard."""

    title: str
    change: Change
    url: str
    """Where a browser finds it."""


def push_dashboards(
    dashboards: Sequence[Mapping[str, Any]],
    *,
    url: str,
    token: str,
    folder: str = DEFAULT_FOLDER,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Pushed]:
    """Make a Grafana's folder hold these dashboards; others are left alone.

    Args:
        dashboards: Grafana's JSON, with uids.
        url: where Grafana is, with its path prefix where it has one.
        token: of a service account that may write dashboards and folders.
        folder: title of the folder, which is made where there is none.
        progress: is told what happens now.

    Raises:
        UserError: the URL, the token, or what the token may do is not right, or nothing answers.
        GrafanaUnavailable: Grafana failed, or did not answer in time.
    """
    base = _checked_url(url)
    api = GrafanaApi.from_url(base, credential=token, timeout=_TIMEOUT_S)
    api.client.url = f"{base}/api"  # it would glue its own to a path, and take the brackets off an address
    if is_loopback(urlsplit(base).hostname or ""):
        api.client.s.trust_env = False  # a proxy of the environment would look for it on its own machine
    with closing(api.client.s):
        progress(f"looking for folder {folder}")
        with _readable(base, f"use folder {folder!r}"):
            folder_uid = _folder_uid(api, folder)
        pushed = []
        for number, dashboard in enumerate(dashboards, 1):
            title = dashboard["title"]
            progress(f"dashboard {number} of {len(dashboards)}: {title}")
            with _readable(base, f"write dashboard {title!r}"):
                change = _put(api, dashboard, folder_uid)
            pushed.append(Pushed(title=title, change=change, url=f"{base}/d/{dashboard['uid']}"))
    return pushed


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise UserError(f"that is not a URL of Grafana ({error}): write http://HOST:PORT") from error
    if parts.username or parts.query:
        raise UserError("the URL of Grafana must not hold a user or a query: the token is all that is used")
    if not is_complete:
        raise UserError(f"{url} is not a URL of Grafana: write http://HOST:PORT, or https://HOST/PATH")
    return url.rstrip("/")


def _folder_uid(api: GrafanaApi, title: str) -> str:
    """Return the uid of the folder of this title; make the folder where there is none."""
    for folder in _object_list(api.folder.get_all_folders()):
        if folder.get("title") == title:
            return str(folder["uid"])
    uid = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40]
    return str(_object(api.folder.create_folder(title, uid or None))["uid"])


def _put(api: GrafanaApi, dashboard: Mapping[str, Any], folder_uid: str) -> Change:
    stored = _stored(api, dashboard["uid"])
    if (
        stored is not None
        and stored["meta"].get("folderUid") == folder_uid
        and _content(stored["dashboard"]) == _content(dashboard)
    ):
        return "unchanged"
    _object(
        api.dashboard.update_dashboard(
            {
                "dashboard": {**dashboard, "id": None},
                "folderUid": folder_uid,
                "overwrite": True,
                "message": _MESSAGE,
            }
        )
    )
    return "created" if stored is None else "updated"


def _stored(api: GrafanaApi, uid: str) -> dict[str, Any] | None:
    try:
        return _object(api.dashboard.get_dashboard(uid))
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise


def _content(dashboard: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in dashboard.items() if key not in _GIVEN_BY_GRAFANA}
    return json.dumps(kept, sort_keys=True)


class _NotGrafana(Exception):
    """What answers does not speak Grafana's API."""


def _object(answer: object) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise _NotGrafana
    return answer


def _object_list(answer: object) -> Iterator[dict[str, Any]]:
    if not isinstance(answer, list):
        raise _NotGrafana
    return map(_object, answer)


@contextmanager
def _readable(url: str, purpose: str) -> Iterator[None]:
    """Turn what grafana-client raises into what its user can do about it."""
    try:
        yield
    except GrafanaTimeoutError as error:
        raise GrafanaUnavailable(f"{url} did not answer within {_TIMEOUT_S:g} s; try again") from error
    except GrafanaClientError as error:
        raise UserError(_refusal(url, purpose, error)) from error
    except GrafanaException as error:
        raise GrafanaUnavailable(f"could not {purpose}: {url} says: {error.message}") from error
    except (_NotGrafana, ValueError) as error:
        raise UserError(
            f"what answers at {url} is not Grafana's API: give the URL under which a browser shows Grafana, "
            "with its path, and not that of a login page in front of it"
        ) from error
    except SSLError as error:
        raise UserError(
            f"what answers at {url} shows a certificate that is not trusted here, or speaks no TLS "
            f"({_reason(error)}): have this machine trust its authority, or give the right URL"
        ) from error
    except OSError as error:
        raise UserError(
            f"nothing answers at {url} ({_reason(error)}): is Grafana running there, and can this machine "
            "reach it?"
        ) from error


def _refusal(url: str, purpose: str, error: GrafanaClientError) -> str:
    taken = (
        f"cannot {purpose}: something there has this title or uid already ({error.message}); rename or "
        "remove it, or give another --folder"
    )
    advice = {
        401: "does not accept the token: make one under Administration, Service accounts (role Editor) of "
        "the organisation that the dashboards are for, and write it to the token file",
        403: f"does not let the token {purpose}: its service account needs the role Editor, or the "
        "permissions folders:create, folders:read, dashboards:create, dashboards:read and dashboards:write",
        404: "is not there (status 404): give the URL under which a browser shows Grafana, with its path",
        409: taken,  # folders
        412: taken,
    }
    return f"Grafana at {url} " + advice.get(error.status_code, f"cannot {purpose}: {error.message}")


def _reason(error: OSError) -> str:
    """Return the operating system's words, without those of the layers above it."""
    found = re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error))
    return found[1] if found else type(error).__name__
