"""The part of Grafana's HTTP API that dashboards need, with its status codes and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from tests.deploy.openai.live import live_server

EDITOR, VIEWER = "glsa_editor", "glsa_viewer"


@dataclass(slots=True)
class Grafana:
    """What it holds, and what it was asked."""

    folders: dict[str, str] = field(default_factory=dict)
    """Titles by uid."""
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By uid: as they were stored, with id and version."""
    folder_of: dict[str, str] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    """Method and path of every request that changed something."""
    failure: int | None = None
    """Status of every answer, when it is broken."""

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.middleware("http")(self._guard)
        app.get("/api/folders")(self._list_folders)
        app.post("/api/folders")(self._create_folder)
        app.get("/api/dashboards/uid/{uid}")(self._dashboard)
        app.post("/api/dashboards/db")(self._save)
        return app

    async def _guard(self, request: Request, follow: Any) -> Response:
        if self.failure is not None:
            return JSONResponse({"message": "database is locked"}, self.failure)
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (EDITOR, VIEWER):
            return JSONResponse({"message": "Invalid API key"}, 401)
        if request.method != "GET":
            if token == VIEWER:
                return JSONResponse({"message": "You'll need additional permissions"}, 403)
            self.writes.append(f"{request.method} {request.url.path}")
        answer: Response = await follow(request)
        return answer

    async def _list_folders(self) -> list[dict[str, Any]]:
        return [{"uid": uid, "title": title} for uid, title in self.folders.items()]

    async def _create_folder(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        if body["uid"] in self.folders:
            raise HTTPException(409, "a folder with this uid exists")
        self.folders[body["uid"]] = body["title"]
        return body

    async def _dashboard(self, uid: str) -> Any:
        if uid not in self.dashboards:
            return JSONResponse({"message": "Dashboard not found"}, 404)
        return {"dashboard": self.dashboards[uid], "meta": {"folderUid": self.folder_of[uid]}}

    async def _save(self, request: Request) -> Any:
        body = await request.json()
        dashboard, folder = body["dashboard"], body["folderUid"]
        uid = dashboard["uid"]
        if folder not in self.folders:
            return JSONResponse({"message": "folder not found"}, 400)
        namesakes = [
            other
            for other, stored in self.dashboards.items()
            if other != uid and self.folder_of[other] == folder and stored["title"] == dashboard["title"]
        ]
        if namesakes:
            return JSONResponse({"message": "same name in folder", "status": "name-exists"}, 412)
        before = self.dashboards.get(uid)
        if before is not None and not body.get("overwrite"):
            return JSONResponse({"message": "changed by someone else"}, 412)
        version = 1 if before is None else before["version"] + 1
        self.dashboards[uid] = {**dashboard, "id": len(self.dashboards) + 1, "version": version}
        self.folder_of[uid] = folder
        return {"uid": uid, "version": version, "status": "success"}


@contextmanager
def serving(grafana: Grafana) -> Iterator[str]:
    """Serve it; yield its URL."""
    with live_server(grafana.app()) as url:
        yield url
