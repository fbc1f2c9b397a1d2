"""The one door to servers that speak OpenAI's chat completions: conversations in, texts out.

A failure that may pass (no connection, silence, 408, 409, 425, 429, 5xx, an answer that is none) is tried again after a pause; a refusal of
one request (400, 413, 422) is final for it; one that would hold for all (401, 403, 404, a redirect) ends the stage. Nothing that failed
has an answer, so none can be taken for one.

The key comes from the environment (`configs.judging.asking.key_variable`), goes to that host alone, and is struck out of all that the
server says.
"""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from configs.judging.asking import ByEndpoint, key_variable
from configs.language.execution import Placement
from configs.methods.training import Sampling
from data.records.records import Message
from stages.job.job import StageError
from stages.sampling.sampler import SILENT_SHARE, EngineLost

PASSING = frozenset({408, 409, 425, 429})
"""Of these a server says that trying again may help; and of everything from 500 on."""
REFUSED = frozenset({400, 413, 422})
"""The request itself is at fault, e.g. too long, or stopped by the provider's filter."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
MOST_BYTES = 4 << 20
"""Of one reply."""
DOWN_AFTER = 3
"""So many requests that fail for good, with none answered in between, mean that the server is down."""
SHOWN = 300
"""Characters of what a server says of an error."""
KEPT_NAME = 200
"""Characters of a model's name."""


@dataclass(frozen=True)
class Reply:
    """What a model said."""

    text: str
    ended: bool
    """Whether it came to its end, rather than to its length limit or to a filter."""
    model: str | None = None
    """As the server reports it."""
    fingerprint: str | None = None
    """Of the server's set-up (`system_fingerprint`)."""


@dataclass(frozen=True)
class NoReply:
    """A request that has no reply, and why."""

    reason: str
    refused: bool
    """By the server, which would do so again; otherwise it did not answer, and may later."""


class Garbage(ValueError):
    """What came is no reply in the form of chat completions."""


@dataclass(frozen=True)
class _Failed:
    reason: str
    pause_s: float | None = None
    """What the server asks for."""


def request_body(by: ByEndpoint, sampling: Sampling, messages: Iterable[Message], seed: int) -> dict[str, Any]:
    """What is sent for one question. A seed has no part in greedy answers, and some servers refuse to get one.

    Args:
        by: the endpoint.
        sampling: how it draws its words.
        messages: the question.
        seed: of this question alone.
    """
    drawn = {"seed": seed} if sampling.temperature > 0 else {}
    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, by.length_field: sampling.max_tokens}
    return {"model": by.model, "messages": list(messages), **settings, **drawn}


def read_reply(raw: bytes) -> Reply:
    """A reply from the body of a response with status 200.

    Raises:
        Garbage: it has another form.
    """
    try:
        found = json.loads(raw)
        choice = found["choices"][0]
        text = choice["message"]["content"]
        finish = choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise Garbage("the body is no chat completion") from error
    if text is None:  # the model said nothing, or declined in a field of its own
        text = ""
    if not isinstance(text, str):
        raise Garbage("the message's content is no text")
    ended = finish not in ("length", "content_filter")
    return Reply(_encodable(text), ended, _name(found.get("model")), _name(found.get("system_fingerprint")))


def _name(value: Any) -> str | None:
    return _encodable(value)[:KEPT_NAME] if isinstance(value, str) else None


def _encodable(text: str) -> str:
    """Halves of surrogate pairs, which JSON can spell and no file can hold, become question marks."""
    return text.encode("utf-8", "replace").decode()


@contextmanager
def _signals_kept() -> Iterator["asyncio.Future[None]"]:
    """A future that is done when this process is asked to stop; the handler itself is called at the end of the block.

    One that raises might be called in a callback of the loop, which only logs what is raised there.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[None] = loop.create_future()
    heard: list[int] = []

    def note(number: int, _: Any) -> None:
        heard.append(number)
        loop.call_soon_threadsafe(lambda: None if asked.done() else asked.set_result(None))

    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    handlers = {number: handler for number, handler in found.items() if callable(handler) and not isinstance(handler, signal.Handlers)}
    if threading.current_thread() is not threading.main_thread():  # the only one that hears signals
        handlers = {}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        asked.cancel()
        for number in heard[:1]:
            handlers[signal.Signals(number)](number, None)


class ChatServer:
    """One endpoint, and how it is asked."""

    def __init__(self, by: ByEndpoint, placement: Placement, first_pause_s: float = FIRST_PAUSE_S) -> None:
        """Takes the key from the environment, where there is one.

        Raises:
            StageError: what stands there cannot be a key.
        """
        self.base_url = by.base_url
        self._variable = key_variable(by.base_url)
        self._key = os.environ.get(self._variable, "").strip()
        if not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            raise StageError(f"the environment variable {self._variable} holds characters that no key has: set it again")
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
        """Asks all questions, several at one time.

        Args:
            bodies: (number, request) of each, taken when its turn comes.
            arrived: called with each outcome as it comes, in any order; what it raises ends the asking.
            waiting: called when a request has failed and will be tried again.

        Raises:
            StageError: the server refuses the key, the model or the path.
            EngineLost: the server is down.
        """
        asyncio.run(self._ask(iter(bodies), arrived, waiting))

    async def _ask(self, bodies: Any, arrived: Callable[[int, Reply | NoReply], None], waiting: Callable[[], None]) -> None:
        import httpx

        failed_in_a_row = 0

        async def work(client: httpx.AsyncClient) -> None:
            nonlocal failed_in_a_row
            for number, body in bodies:  # shared by all workers: each is taken once
                outcome = await self._answer(client, body, waiting)
                arrived(number, outcome)
                lost = isinstance(outcome, NoReply) and not outcome.refused
                failed_in_a_row = failed_in_a_row + 1 if lost else 0
                if failed_in_a_row >= DOWN_AFTER:
                    raise EngineLost(f"lost engine: {self._lost(outcome)}")

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

    def _lost(self, outcome: Any) -> str:
        return (
            f"the model at {self.base_url} has left {DOWN_AFTER} requests in a row unanswered, after {self._tries} tries each (the last: "
            f"{outcome.reason}): look whether it runs; all answers that came are kept"
        )

    async def _answer(self, client: Any, body: dict[str, Any], waiting: Callable[[], None]) -> Reply | NoReply:
        pause_s, reason = self._first_pause_s, ""
        for number in range(1, self._tries + 1):
            outcome = await self._try(client, body)
            if not isinstance(outcome, _Failed):
                return outcome
            reason = outcome.reason
            if number < self._tries:
                waiting()
                await asyncio.sleep(min(LONGEST_PAUSE_S, max(pause_s, outcome.pause_s or 0.0)))
                pause_s *= 2
        return NoReply(reason, refused=False)

    async def _try(self, client: Any, body: dict[str, Any]) -> Reply | NoReply | _Failed:
        import httpx

        try:
            async with asyncio.timeout(self._timeout_s):  # of the whole exchange: a server may send one byte now and then for ever
                status, headers, raw = await self._post(client, body)
        except TimeoutError:
            return _Failed(f"no answer within {self._timeout_s:g} s")
        except httpx.RequestError as error:
            return _Failed(self._clean(f"{type(error).__name__}: {error}"))
        except Garbage as error:
            return _Failed(str(error))
        if status == 200:
            try:
                return read_reply(raw)
            except Garbage as error:
                return _Failed(str(error))
        said = f"status {status}: {self._clean(raw.decode(errors='replace'))}"
        if status in PASSING or status >= 500:
            return _Failed(said, _seconds(headers.get("retry-after")))
        if status in REFUSED:
            return NoReply(said, refused=True)
        key = f"the key in {self._variable}" if self._key else f"no key, since {self._variable} is not set"
        raise StageError(f"{self.base_url} refuses what it is asked ({said}), with {key}: look at base_url, model and key")

    async def _post(self, client: Any, body: dict[str, Any]) -> tuple[int, Any, bytes]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        async with client.stream("POST", f"{self.base_url}/chat/completions", json=body, headers=headers) as response:
            parts, size = [], 0
            async for part in response.aiter_bytes():
                size += len(part)
                if size > MOST_BYTES:
                    raise Garbage(f"the body has more than {MOST_BYTES} bytes")
                parts.append(part)
            return response.status_code, response.headers, self._without_key(b"".join(parts))

    def _without_key(self, raw: bytes) -> bytes:
        return raw.replace(self._key.encode(), b"***") if self._key else raw

    def _clean(self, text: str) -> str:
        """What a server or library says, on one line, without the key."""
        cleaned = text.replace(self._key, "***") if self._key else text
        return " ".join(cleaned.split())[:SHOWN]


def _seconds(value: str | None) -> float | None:
    """What `Retry-After` asks for, where it is a number of seconds; its other form, a date, is left to our own pauses."""
    try:
        return max(0.0, float(value)) if value else None
    except ValueError:
        return None
