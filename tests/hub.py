"""Fake hubs on 127.0.0.1: the parts of the interface that fetching and streaming datasets and a mirror need."""

import base64
import hashlib
import json
from urllib.parse import unquote

from tests.web import send

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_owner"
_LARGE = (".tar", ".parquet", ".zip")


def use_hub(monkeypatch, base):
    """Make the hub's client take `base` for its hub, as HF_ENDPOINT does when the client is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", base)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", base + "/{repo_id}/resolve/{revision}/{filename}")


class Hub:
    """Serves `files[repo][path]`; `stated` is the metadata it reports, so that tests can make the two differ."""

    def __init__(self, site, files):
        self.files = {repo: dict(some) for repo, some in files.items()}
        self.stated = {repo: dict(some) for repo, some in files.items()}
        self.asked: list[str] = []
        self.base = site.base
        site.fallback = self.answer

    def downloads(self):
        return sorted({path.split(COMMIT + "/")[1] for path in self.asked if "/resolve/" in path})

    def answer(self, handler):
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

    def _tree(self, repo, below, *, recursive):
        start = f"{below}/" if below else ""
        inside = {name: body for name, body in self.stated[repo].items() if name.startswith(start)}
        if recursive:
            return [_entry(name, body) for name, body in inside.items()]
        folders = sorted({name[len(start) :].split("/")[0] for name in inside if "/" in name[len(start) :]})
        listed: list[dict[str, object]] = [{"type": "directory", "path": start + f, "oid": "0" * 40} for f in folders]
        return listed + [_entry(name, body) for name, body in inside.items() if "/" not in name[len(start) :]]

    def _file(self, handler, repo, name):
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


def _json(handler, tree):
    send(handler, 200, json.dumps(tree).encode(), Content_Type="application/json")


def _entry(name, body):
    blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(body), "oid": blob}
    if name.endswith(_LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
    return entry


class ModelHub(Hub):
    """A model repository whose owner has TOKEN: commits, and large files by LFS, as the client uploads without Xet."""

    def __init__(self, site, repo):
        super().__init__(site, {})
        self.repo, self.stored = repo, dict[str, bytes]()
        self.files = self.stated = {repo: {}}
        self.commits: list[str] = []
        self.refuses = False

    def answer(self, handler):
        path, _, query = unquote(handler.path).partition("?")
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        api, files = f"/api/models/{self.repo}", self.files[self.repo]
        if path.startswith("/lfs/"):  # signed, so without a token
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
            self.stored[path.removeprefix("/lfs/")] = body
            send(handler, 200, b"")
        elif handler.headers.get("Authorization") != f"Bearer {TOKEN}" or self.repo not in path:
            send(handler, 401, b"{}", X_Error_Code="RepoNotFound")
        elif self.refuses and handler.command == "POST":
            send(handler, 403, b'{"error": "out of storage"}')
        elif path in (api, f"{api}/revision/main"):
            _json(handler, {"_id": "1", "id": self.repo, "sha": COMMIT, "siblings": [], "tags": []})
        elif path.startswith(f"{api}/tree/main"):
            below = path.removeprefix(f"{api}/tree/main").strip("/")
            entries = self._tree(self.repo, below, recursive="recursive=true" in query.lower())
            if entries:
                _json(handler, entries)
            else:
                send(handler, 404, b"{}", X_Error_Code="EntryNotFound")
        elif path.startswith(f"/{self.repo}/resolve/main/"):
            name = path.removeprefix(f"/{self.repo}/resolve/main/")
            if name in files:
                self._file(handler, self.repo, name)
            else:
                send(handler, 404, b"{}", X_Error_Code="EntryNotFound")
        elif path == f"{api}/preupload/main":
            asked = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in asked}
            shown = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            _json(handler, {"files": shown})
        elif path == f"/{self.repo}.git/info/lfs/objects/batch":
            objects = [
                {**entry, "actions": {"upload": {"href": f"{self.base}/lfs/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]
            ]
            _json(handler, {"transfer": "basic", "objects": objects})
        elif path == f"{api}/commit/main":
            self._commit([json.loads(line) for line in body.splitlines()])
            _json(handler, {"commitUrl": f"{self.base}/{self.repo}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            send(handler, 501, b"{}")

    def _commit(self, lines):
        files = self.files[self.repo]
        for kind, value in ((line["key"], line["value"]) for line in lines):
            match kind:
                case "header":
                    self.commits.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.stored[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case _:
                    raise ValueError(kind)
