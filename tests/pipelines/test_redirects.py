"""A key is for the server that its variable names: where that redirects, no other one gets it."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Placement
from pedigree.configs.methods.language_model import ByEndpoint
from pedigree.pipelines.lineage import openlineage
from pedigree.pipelines.run.checks import _unanswering
from pedigree.stages.job.failures import StageError
from pedigree.stages.sampling.endpoint import ChatServer

pytestmark = pytest.mark.unit
KEY = "sk-of-nobody-0123456789abcdef"
CODES = (301, 302, 303, 307, 308)


class Servers:
    """`url` redirects everything to a second server, which accepts everything; `got`: what each was sent."""

    def __init__(self) -> None:
        self.code, self.got = 302, {"first": [], "other": []}
        servers = self

        class First(BaseHTTPRequestHandler):
            name = "first"

            def do_POST(self) -> None:
                servers.got[self.name].append((self.command, self.headers["Authorization"]))
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                self.send_response(servers.code if self.name == "first" else 200)
                self.send_header("Location", servers.elsewhere)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Other(First):
            name = "other"

        self.running = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (First, Other)]
        self.url, other = (f"http://127.0.0.1:{server.server_port}" for server in self.running)
        self.elsewhere = f"{other.replace('127.0.0.1', 'localhost')}/taken"
        for server in self.running:
            threading.Thread(target=server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def both() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    for server in servers.running:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=CODES)
def servers(both: Servers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Servers:
    monkeypatch.setenv("PEDIGREE_127_0_0_1_KEY", KEY)
    both.code, both.got = request.param, {"first": [], "other": []}
    return both


def keys(servers: Servers, name: str) -> set[str | None]:
    return {key for _, key in servers.got[name]}


def test_a_lineage_server_that_redirects_has_accepted_nothing_and_no_other_gets_the_key(servers):
    environment = {"OPENLINEAGE_URL": servers.url, "OPENLINEAGE_API_KEY": KEY}
    with pytest.raises(PedigreeError, match=rf"returned {servers.code} .*after accepting 0 of 1 events: check OPENLINEAGE_URL"):
        openlineage.send([{}], environment)
    assert keys(servers, "first") == {f"Bearer {KEY}"} and servers.got["other"] == []


def test_a_chat_server_that_redirects_ends_the_stage_and_no_other_gets_the_key(servers):
    by = ByEndpoint.model_validate({"type": "endpoint", "base_url": f"{servers.url}/v1", "model": "judge"})
    chat = ChatServer(by, Placement(endpoint_retries=0), 0.01)
    with pytest.raises(StageError, match=rf"rejects requests \(status {servers.code}"):
        chat.ask([(0, {"model": "judge", "messages": []})], lambda number, outcome: None)
    assert keys(servers, "first") == {f"Bearer {KEY}"} and servers.got["other"] == []


def test_the_check_of_a_server_before_a_run_gives_no_other_the_key(servers):
    assert _unanswering(f"{servers.url}/v1") is None
    assert keys(servers, "first") == {f"Bearer {KEY}"} and keys(servers, "other") == {None}
