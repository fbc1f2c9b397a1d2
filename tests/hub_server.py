"""A Hugging Face hub on loopback: what `huggingface_hub` asks of it (repository info, trees, files by commit), from bytes in memory."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".parquet", ".safetensors", ".gz")
"""Suffixes of files that the hub keeps in LFS: known by their sha256, all others by git's hash."""


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """One repository: its commits, each with all its files, the last one being `main`."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    forbids: str = ""
    """Where it is gated: what it says, without a code, to tokens that may not read gated repositories at all."""
    moved_to: str | None = None

    @property
    def head(self) -> str:
        return list(self.commits)[-1]


@dataclass
class Hub:
    """The repositories, by `datasets/OWNER/NAME` and `models/OWNER/NAME`, and the paths that were asked for."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    broken: bool = False
    """Answers everything by 503."""

    def commit(self, repo: str, files: dict[str, bytes] | Path) -> str:
        """Adds a commit with these files, or with those of a folder; returns its hash."""
        if isinstance(files, Path):
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file()}
        found = self.repos.setdefault(repo, Repo())
        commit = hashlib.sha1(repr((repo, len(found.commits), sorted(files.items()))).encode()).hexdigest()
        found.commits[commit] = files
        return commit


class _Answer(Exception):
    def __init__(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.status, self.body = status, body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


API = re.compile(r"/api/(datasets|models)/((?:[^/]+/)?[^/]+?)(?:/(revision|tree|paths-info|auth-check)(?:/([^/]+))?(?:/(.*))?)?")
FILE = re.compile(r"/(datasets/)?((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)")


def _answer(hub: Hub, path: str, asked: list[str], recursive: bool) -> _Answer:
    hub.requests.append(path)
    if hub.broken:
        return _Answer(503)
    if found := API.fullmatch(path):
        kind, name, what, revision, folder = found.groups()
        repo = _repo(hub, f"{kind}/{name}", path)
        if what == "auth-check":
            return _refused(repo) or _Answer(200)
        commit = _commit(repo, revision or "main")
        if what == "tree":
            return _tree(repo.commits[commit], folder or "", recursive)
        if what == "paths-info":
            return _json([_entry(name, content) for name, content in repo.commits[commit].items() if name in asked])
        return _json({"id": name, "sha": commit, "private": False, "gated": "manual" if repo.gated else False, "siblings": []})
    if found := FILE.fullmatch(path):
        kind, name, revision, file = found.groups()
        repo = _repo(hub, f"{kind or 'models/'}{name}", path)
        if refused := _refused(repo):
            return refused
        commit = _commit(repo, revision)
        if file not in repo.commits[commit]:
            return _Answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = repo.commits[commit][file]
        etag = hashlib.sha256(content).hexdigest() if file.endswith(LARGE) else git_sha1(content)
        return _Answer(200, content, ETag=f'"{etag}"', X_Repo_Commit=commit)
    return _Answer(404)


def _repo(hub: Hub, name: str, path: str) -> Repo:
    repo = hub.repos.get(name)
    if repo is None:
        raise _Answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
    if repo.moved_to:
        raise _Answer(307, Location=path.replace(name.partition("/")[2], repo.moved_to))  # its query is added by who sends it
    return repo


def _refused(repo: Repo) -> _Answer | None:
    if repo.forbids:
        return _Answer(403, X_Error_Message=repo.forbids)
    message = "Access to this repository is restricted and you are not in the authorized list."
    return _Answer(403, X_Error_Code="GatedRepo", X_Error_Message=message) if repo.gated else None


def _commit(repo: Repo, revision: str) -> str:
    revision = repo.head if revision == "main" else revision
    if revision not in repo.commits:
        raise _Answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
    return revision


def _entry(name: str, content: bytes) -> dict[str, object]:
    large = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}} if name.endswith(LARGE) else {}
    return {"type": "file", "path": name, "size": len(content), "oid": git_sha1(content), **large}


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> _Answer:
    """The files below a folder, or those in it and its folders."""
    below = {name: content for name, content in files.items() if name.startswith(f"{folder}/" if folder else "")}
    if folder and not below:
        return _Answer(404, X_Error_Code="EntryNotFound")
    deep = len(folder.split("/")) if folder else 0
    here = {name: content for name, content in below.items() if recursive or name.count("/") == deep}
    folders = sorted({"/".join(name.split("/")[: deep + 1]) for name in below.keys() - here.keys()})
    directories = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
    return _json(directories + [_entry(*file) for file in here.items()])


def _json(value: object) -> _Answer:
    return _Answer(200, json.dumps(value).encode(), Content_Type="application/json")


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub that serves what is put into its `repos`, for as long as the block lasts."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            sent = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
            url = urlsplit(self.path)
            recursive = parse_qs(url.query).get("recursive", [""])[0].lower() == "true"
            try:
                answer = _answer(hub, unquote(url.path), sent.get("paths", []), recursive)
            except _Answer as refusal:
                answer = refusal
                if "Location" in answer.headers and url.query:
                    answer.headers["Location"] += f"?{url.query}"
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
