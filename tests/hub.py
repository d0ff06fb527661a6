"""A fake hub on 127.0.0.1 with the part of the interface that fetching and streaming datasets needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from tests.web import Site, send

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = (".tar", ".parquet", ".zip")


class Hub:
    """Serves `files[repo][path]`; `stated` is the metadata it reports, so that tests can make the two differ."""

    def __init__(self, site: Site, files: Mapping[str, Mapping[str, bytes]]) -> None:
        self.files = {repo: dict(some) for repo, some in files.items()}
        self.stated = {repo: dict(some) for repo, some in files.items()}
        self.asked: list[str] = []
        self.base = site.base
        site.fallback = self.answer

    def downloads(self) -> list[str]:
        return sorted({path.split(COMMIT + "/")[1] for path in self.asked if "/resolve/" in path})

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, _, query = unquote(handler.path).partition("?")
        self.asked.append(path)
        for repo in self.files:
            if path == f"/api/datasets/{repo}" or path.startswith(f"/api/datasets/{repo}/revision/"):
                siblings = [{"rfilename": name} for name in self.stated[repo]]
                _json(handler, {"_id": "1", "id": repo, "sha": COMMIT, "siblings": siblings, "tags": []})
                return
            if path.startswith(f"/api/datasets/{repo}/tree/{COMMIT}"):
                below = path.removeprefix(f"/api/datasets/{repo}/tree/{COMMIT}").strip("/")
                _json(handler, self._tree(repo, below, recursive="recursive=true" in query.lower()))
                return
            prefix = f"/datasets/{repo}/resolve/{COMMIT}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in self.files[repo]:
                self._file(handler, repo, path.removeprefix(prefix))
                return
        known = any(f"/{repo}/" in path for repo in self.files)
        send(handler, 404, b"{}", X_Error_Code="EntryNotFound" if known else "RepoNotFound")

    def _tree(self, repo: str, below: str, *, recursive: bool) -> list[dict[str, object]]:
        start = f"{below}/" if below else ""
        inside = {name: body for name, body in self.stated[repo].items() if name.startswith(start)}
        if recursive:
            return [_entry(name, body) for name, body in inside.items()]
        folders = sorted({name[len(start) :].split("/")[0] for name in inside if "/" in name[len(start) :]})
        listed: list[dict[str, object]] = [{"type": "directory", "path": start + f, "oid": "0" * 40} for f in folders]
        return listed + [_entry(name, body) for name, body in inside.items() if "/" not in name[len(start) :]]

    def _file(self, handler: BaseHTTPRequestHandler, repo: str, name: str) -> None:
        body = self.files[repo][name]
        headers = {"ETag": f'"{hashlib.sha256(self.stated[repo][name]).hexdigest()}"', "X_Repo_Commit": COMMIT}
        wanted = handler.headers.get("Range", "")
        if not wanted or handler.command == "HEAD":
            send(handler, 200, body, Accept_Ranges="bytes", **headers)
            return
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        last = min(int(end or len(body) - 1), len(body) - 1)
        part = body[int(start) : last + 1]
        send(handler, 206, part, Content_Range=f"bytes {start}-{last}/{len(body)}", **headers)


def _json(handler: BaseHTTPRequestHandler, tree: object) -> None:
    send(handler, 200, json.dumps(tree).encode(), Content_Type="application/json")


def _entry(name: str, body: bytes) -> dict[str, object]:
    blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(body), "oid": blob}
    if name.endswith(_LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
    return entry
