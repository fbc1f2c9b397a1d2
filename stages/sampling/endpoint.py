"""Client for servers with OpenAI's chat completions API: conversations in, texts out.

Transient failures (no connection, timeout, 408, 409, 425, 429, 5xx, a malformed response) are retried after a pause. A rejected request
(400, 413, 422) is final for that request; errors that affect all requests (401, 404, a redirect) end the stage. Where a failure may have
either reach (403, 451, several requests in a row without an answer), a plain question shows which it is. A failed request has no answer, so
an error can never be mistaken for one.

The key comes from the environment (`configs.methods.language_model.key_variable`), is sent only to that host, and is redacted
from everything that the server returns.
"""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pedigree.configs.base.texts import encodable
from pedigree.configs.language.execution import Placement
from pedigree.configs.methods.language_model import ByEndpoint, key_variable
from pedigree.configs.methods.training import Sampling
from pedigree.data.records.records import Message
from pedigree.stages.job.failures import EngineLost, StageError
from pedigree.stages.sampling.sampler import SILENT_SHARE

PASSING = frozenset({408, 409, 425, 429})
"""Status codes that may succeed on a retry, in addition to 500 and above."""
REFUSED = frozenset({400, 413, 422})
"""Status codes for an invalid request, e.g. too long or blocked by the provider's filter."""
FORBIDDEN = frozenset({403, 451})
"""Status codes for an invalid key, and also for a request that the provider's filter blocked."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
LIMITED_PAUSES = 16.0
"""Shortest pause after a 429 without `Retry-After`, in first pauses: five of them are longer than the window of a limit per minute."""
MOST_BYTES = 4 << 20
"""Size limit of a response body."""
DOWN_AFTER = 3
"""Number of consecutive requests without an answer, after all retries, that mean that the server is down, unless it answers `PLAIN`."""
PLAIN: list[Message] = [{"role": "user", "content": "Hello."}]
"""A question that any server can answer."""
BROKEN = ("error", "abort")
"""Finish reasons of a generation that failed on the server."""
SHOWN = 300
"""Characters of a server's error message to keep."""
KEPT_NAME = 200
"""Characters of a model's name to keep."""


@dataclass(frozen=True)
class Reply:
    """A model's reply."""

    text: str
    ended: bool
    """Whether it is complete, rather than cut off by the length limit or a filter."""
    model: str | None = None
    """Model name reported by the server."""
    fingerprint: str | None = None
    """Server fingerprint (`system_fingerprint`)."""


@dataclass(frozen=True)
class NoReply:
    """A request without a reply, and why."""

    reason: str
    refused: bool
    """True: the server rejected it and would do so again. False: it did not answer, and may later."""


class MalformedReply(ValueError):
    """The response is not a chat completion."""


class _Failed(NamedTuple):
    reason: str
    pause_s: float = 0.0
    """The pause that the server requested."""


def request_body(by: ByEndpoint, sampling: Sampling, messages: Iterable[Message], seed: int) -> dict[str, Any]:
    """One question in full, which names its reply in the log; `as_sent` is what the server gets. Greedy requests have no seed, because it
    has no effect and some servers reject it."""
    drawn = {"seed": seed} if sampling.temperature > 0 else {}
    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, by.length_field: sampling.max_tokens}
    return {"model": by.model, "messages": list(messages), **settings, **drawn}


def as_sent(by: ByEndpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """A question without settings that some models reject: `top_p` of greedy requests, where it has no effect, and `omit_defaults`."""
    idle = ["top_p"] if body["temperature"] == 0 else [name for name in ("temperature", "top_p") if by.omit_defaults and body[name] == 1]
    return {name: value for name, value in body.items() if name not in idle}


def read_reply(raw: bytes) -> Reply:
    """Parse the body of a response with status 200.

    Raises:
        MalformedReply: the body is not a chat completion, or one that failed.
    """
    try:
        found = json.loads(raw)
        choice = found["choices"][0]
        text = choice["message"]["content"]
        finish, error = choice.get("finish_reason"), choice.get("error")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as problem:
        raise MalformedReply("the body is no chat completion") from problem
    if finish in BROKEN or error:
        raise MalformedReply(f"the reply ended with finish_reason {finish!r}, error {error!r}")
    if text is None:  # an empty reply, or a refusal in a separate field
        text = ""
    if not isinstance(text, str):
        raise MalformedReply("the message's content is no text")
    ended = finish not in ("length", "content_filter")
    return Reply(encodable(text), ended, _name(found.get("model")), _name(found.get("system_fingerprint")))


def _name(value: Any) -> str | None:
    return encodable(value)[:KEPT_NAME] if isinstance(value, str) else None


@contextmanager
def _signals_kept() -> Iterator["asyncio.Future[None]"]:
    """A future that completes when this process receives a stop signal; the original handler runs at the end of the block.

    A handler that raises could otherwise run in a callback of the event loop, which only logs exceptions.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[None] = loop.create_future()
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        loop.call_soon_threadsafe(lambda: None if asked.done() else asked.set_result(None))

    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    handlers = {number: handler for number, handler in found.items() if callable(handler) and not isinstance(handler, signal.Handlers)}
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        handlers = {}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        asked.cancel()
        for number in received[:1]:
            handlers[signal.Signals(number)](number, None)


class ChatServer:
    """Client of one endpoint."""

    def __init__(self, by: ByEndpoint, placement: Placement, first_pause_s: float = FIRST_PAUSE_S) -> None:
        """Read the key from the environment, if set.

        Raises:
            StageError: the value cannot be a key.
        """
        self.base_url = by.base_url
        self._variable = key_variable(by.base_url)
        self._key = os.environ.get(self._variable, "").strip()
        if not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            raise StageError(f"the environment variable {self._variable} contains characters that are invalid in a key: set it again")
        self._concurrency = placement.endpoint_concurrency
        self._timeout_s = min(placement.endpoint_timeout_s, SILENT_SHARE * placement.heartbeat_timeout_s)
        self._tries = 1 + placement.endpoint_retries
        self._first_pause_s = first_pause_s

    def ask(
        self,
        bodies: Iterable[tuple[int, dict[str, Any]]],
        arrived: Callable[[int, Reply | NoReply], None],
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Send all requests, several concurrently.

        Args:
            bodies: (number, request body), consumed on demand.
            arrived: called with each outcome as it arrives, in any order; an exception stops all requests.
            waiting: called before a failed request is retried.

        Raises:
            StageError: the server rejects the key, the model or the path.
            EngineLost: the server is down: it answers neither several requests in a row nor a plain question.
        """
        asyncio.run(self._ask(iter(bodies), arrived, waiting))

    async def _ask(self, bodies: Any, arrived: Callable[[int, Reply | NoReply], None], waiting: Callable[[], None]) -> None:
        import httpx

        failed_in_a_row = answered = 0

        async def work(client: httpx.AsyncClient) -> None:
            nonlocal failed_in_a_row, answered
            for number, body in bodies:  # shared by all workers
                outcome = await self._answer(client, body, waiting)
                arrived(number, outcome)
                if not isinstance(outcome, NoReply) or outcome.refused:
                    failed_in_a_row, answered = 0, answered + 1
                    continue
                failed_in_a_row += 1
                if failed_in_a_row < DOWN_AFTER:
                    continue
                failed_in_a_row, before = 0, answered
                plain = await self._answer(client, {**body, "messages": PLAIN}, waiting)
                if isinstance(plain, NoReply) and not plain.refused and answered == before:
                    raise EngineLost(
                        f"lost engine: the model at {self.base_url} left {DOWN_AFTER} consecutive requests and a plain question "
                        f"unanswered, after {self._tries} tries each (the last: {plain.reason}): check that it is running; all answers "
                        "received so far are kept"
                    )

        limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        client = httpx.AsyncClient(limits=limits, timeout=self._timeout_s, follow_redirects=False)
        with _signals_kept() as asked_to_stop:
            async with client:
                workers = [asyncio.create_task(work(client)) for _ in range(self._concurrency)]
                everything = asyncio.gather(*workers)
                try:
                    await asyncio.wait([everything, asked_to_stop], return_when=asyncio.FIRST_COMPLETED)
                    if not asked_to_stop.done():
                        await everything
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(everything, *workers, return_exceptions=True)

    async def _answer(self, client: Any, body: dict[str, Any], waiting: Callable[[], None]) -> Reply | NoReply:
        pause_s, reason = self._first_pause_s, ""
        for number in range(1, self._tries + 1):
            outcome = await self._try(client, body)
            if not isinstance(outcome, _Failed):
                return outcome
            reason = outcome.reason
            if number < self._tries:
                waiting()
                await asyncio.sleep(min(LONGEST_PAUSE_S, max(pause_s, outcome.pause_s)))
                pause_s *= 2
        return NoReply(reason, refused=False)

    async def _try(self, client: Any, body: dict[str, Any]) -> Reply | NoReply | _Failed:
        import httpx

        try:
            async with asyncio.timeout(self._timeout_s):  # for the whole exchange: a server may keep sending single bytes
                status, headers, raw = await self._post(client, body)
            if status == 200:
                return read_reply(raw)
        except TimeoutError:
            return _Failed(f"no answer within {self._timeout_s:g} s")
        except httpx.RequestError as error:
            return _Failed(self._clean(f"{type(error).__name__}: {error}"))
        except MalformedReply as error:
            return _Failed(self._clean(str(error)))
        problem = f"status {status}: {self._clean(raw.decode(errors='replace'))}"
        if status in PASSING or status >= 500:
            least = LIMITED_PAUSES * self._first_pause_s if status == 429 else 0.0
            return _Failed(problem, _seconds(headers.get("retry-after", ""), least))
        if status in FORBIDDEN and body["messages"] is not PLAIN:
            plain = await self._try(client, {**body, "messages": PLAIN})
            return plain if isinstance(plain, _Failed) else NoReply(problem, refused=True)
        if status in REFUSED:
            return NoReply(problem, refused=True)
        key = f"the key in {self._variable}" if self._key else f"no key, since {self._variable} is not set"
        raise StageError(f"{self.base_url} rejects requests ({problem}), with {key}: check base_url, model and key")

    async def _post(self, client: Any, body: dict[str, Any]) -> tuple[int, Any, bytes]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        async with client.stream("POST", f"{self.base_url}/chat/completions", json=body, headers=headers) as response:
            parts, size = [], 0
            async for part in response.aiter_bytes():
                size += len(part)
                if size > MOST_BYTES:
                    raise MalformedReply(f"the body has more than {MOST_BYTES} bytes")
                parts.append(part)
            raw = b"".join(parts)
            return response.status_code, response.headers, raw.replace(self._key.encode(), b"***") if self._key else raw

    def _clean(self, text: str) -> str:
        """A server's or library's message on one line, with the key redacted."""
        cleaned = text.replace(self._key, "***") if self._key else text
        return " ".join(cleaned.split())[:SHOWN]


def _seconds(value: str, otherwise: float = 0.0) -> float:
    """Value of `Retry-After` if it is a number of seconds. The date form is ignored in favor of our own pauses."""
    try:
        return max(0.0, float(value))
    except ValueError:
        return otherwise
