"""The door to chat servers, against real ones on loopback that fail in every way that servers do."""

import asyncio
import signal
import socket
import threading
import time

import pytest
from chat_lab import Chats, chat_server, completion_of, say, send
from waiting import deadline

from pedigree.configs.language.execution import Placement
from pedigree.configs.methods.language_model import ByEndpoint, key_variable
from pedigree.configs.methods.rubrics import Rating
from pedigree.configs.methods.training import Sampling
from pedigree.data.records.records import Message
from pedigree.stages.job.failures import EngineLost, Preempted, StageError
from pedigree.stages.sampling.endpoint import (
    MOST_BYTES,
    PLAIN,
    ChatServer,
    MalformedReply,
    NoReply,
    Reply,
    _seconds,
    as_sent,
    read_reply,
    request_body,
)

KEY = "sk-of-nobody-0123456789abcdef"


def judge_at(base_url):
    return ByEndpoint.model_validate({"type": "endpoint", "base_url": base_url, "model": "judge"})


def ask(base_url, count, first_pause_s=0.01, arrived=None, **placement):
    """No request is given up for want of time, and asked again, however slow this machine is: only where a test says so."""
    untimed = {"endpoint_timeout_s": 3600.0, "heartbeat_timeout_s": 36_000.0}
    settings = {**untimed, "endpoint_retries": 2, "endpoint_concurrency": 4, **placement}
    server = ChatServer(judge_at(base_url), Placement.model_validate(settings), first_pause_s)
    found: dict[int, Reply | NoReply] = {}

    def take(number, outcome):
        assert number not in found
        found[number] = outcome
        if arrived is not None:
            arrived(number, outcome)

    bodies = ((number, {"model": "judge", "messages": [{"role": "user", "content": str(number)}]}) for number in range(count))
    server.ask(bodies, take)
    return found


def texts(found):
    return {number: outcome.text for number, outcome in found.items()}


def echo(chats, handler, body):
    say(handler, f"you said {chats.text(body)}")


def test_every_question_has_its_own_answer_however_they_come_back():
    barrier = threading.Barrier(4)

    def late_first(chats, handler, body):
        barrier.wait()  # four are open at one time, and end in an order that nobody knows
        echo(chats, handler, body)

    with chat_server(late_first) as chats:
        found = ask(chats.base_url, 16)
    assert texts(found) == {number: f"you said {number}" for number in range(16)}
    assert chats.most_open == 4 and len(chats.bodies) == 16
    assert {header[":path"] for header in chats.headers} == {"/v1/chat/completions"}
    assert found[0] == Reply("you said 0", True, "judge-2024-08-06", "fp_1")


@pytest.mark.proves("placement.endpoint_concurrency")
@pytest.mark.parametrize("most", [1, 3])
def test_no_more_requests_are_open_than_the_profile_allows(most):
    with chat_server(echo) as chats:
        assert len(ask(chats.base_url, 12, endpoint_concurrency=most)) == 12
    assert 1 <= chats.most_open <= most


def failing(times, fail):
    """Fails so often for each question, then answers."""
    seen: dict[str, int] = {}

    def act(chats: Chats, handler, body):
        text = chats.text(body)
        with chats.lock:
            seen[text] = seen.get(text, 0) + 1
            now = seen[text]
        if now <= times:
            fail(chats, handler)
        else:
            echo(chats, handler, body)

    return act


def drop(chats, handler):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def half(chats, handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    drop(chats, handler)


def hang(chats, handler):
    chats.ended.wait()


def drip(chats, handler):
    """One byte now and then, so that no pause is long: only the whole takes for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    while not chats.ended.wait(0.05):
        handler.wfile.write(b" ")


PASSES = {
    "500": lambda chats, handler: send(handler, 500, b"oops"),
    "503": lambda chats, handler: send(handler, 503, b"{}", Retry_After="0"),
    "429": lambda chats, handler: send(handler, 429, b'{"error": "slow down"}', Retry_After="0.01"),
    "408": lambda chats, handler: send(handler, 408, b""),
    "connection dropped": drop,
    "half a body": half,
    "no json": lambda chats, handler: send(handler, 200, b"<html>busy</html>"),
    "other json": lambda chats, handler: send(handler, 200, b'{"error": {"message": "overloaded"}}'),
    "no choices": lambda chats, handler: send(handler, 200, b'{"choices": []}'),
    "a list": lambda chats, handler: send(handler, 200, b"[1, 2]"),
    "nested without end": lambda chats, handler: send(handler, 200, b"[" * 200_000),
    "too large": lambda chats, handler: send(handler, 200, b" " * (MOST_BYTES + 1)),
    "no text": lambda chats, handler: send(handler, 200, b'{"choices": [{"message": {"content": [1]}}]}'),
    "failed in the middle": lambda chats, handler: say(handler, "The answer is good bec", finish_reason="error"),
    "aborted": lambda chats, handler: say(handler, "The answer is good bec", finish_reason="abort"),
    "not gzip": lambda chats, handler: send(handler, 200, b"abc", Content_Encoding="gzip"),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_may_pass_is_asked_again_and_then_has_its_answer(name):
    with chat_server(failing(2, PASSES[name])) as chats:
        assert texts(ask(chats.base_url, 3)) == {number: f"you said {number}" for number in range(3)}
    assert len(chats.bodies) == 9


@pytest.mark.proves("placement.endpoint_timeout_s")
@pytest.mark.parametrize("silence", [hang, drip])
def test_a_server_that_hangs_or_drips_is_given_up_after_the_timeout(silence):
    with chat_server(failing(1, silence)) as chats:
        began, timeout = time.monotonic(), deadline(1)  # also of the answer that comes, which a slow machine asks for again
        found = ask(chats.base_url, 2, 0.0001, endpoint_timeout_s=timeout, endpoint_retries=12)
        assert texts(found) == {0: "you said 0", 1: "you said 1"}
        assert time.monotonic() - began >= timeout
    assert len(chats.bodies) >= 4


def test_a_timeout_ends_before_the_job_would_count_as_hung():
    with chat_server(failing(1, hang)) as chats:
        assert len(ask(chats.base_url, 1, endpoint_timeout_s=3600.0, heartbeat_timeout_s=deadline(0.4))) == 1


def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_try():
    """The first try's answer is sent after the second's: it reaches nobody."""
    second = threading.Event()
    tries = []

    def act(chats, handler, body):
        tries.append(chats.text(body))
        if len(tries) == 1:
            second.wait()
            say(handler, "too late")
        else:
            say(handler, "in time")
            second.set()

    with chat_server(act) as chats:
        found = ask(chats.base_url, 1, 0.0001, endpoint_timeout_s=deadline(1), endpoint_retries=12)
        assert texts(found) == {0: "in time"}
    assert len(tries) >= 2 and set(tries) == {"0"}  # more where this machine is too slow for the second answer


@pytest.mark.proves("placement.endpoint_retries")
@pytest.mark.parametrize("retries", [0, 3])
def test_after_so_many_tries_a_request_has_no_answer_and_the_others_have(retries):
    def poison(chats, handler, body):
        if chats.text(body) == "1":
            send(handler, 500, b"out of memory")
        else:
            echo(chats, handler, body)

    with chat_server(poison) as chats:
        found = ask(chats.base_url, 6, endpoint_retries=retries)
    assert found.pop(1) == NoReply("status 500: out of memory", refused=False)
    assert texts(found) == {number: f"you said {number}" for number in (0, 2, 3, 4, 5)}
    assert sum(chats.text(body) == "1" for body in chats.bodies) == 1 + retries


def test_a_request_that_the_server_refuses_is_not_asked_again():
    def filtered(chats, handler, body):
        if chats.text(body) == "2":
            send(handler, 400, b'{"error": {"code": "content_filter"}}')
        else:
            echo(chats, handler, body)

    with chat_server(filtered) as chats:
        found = ask(chats.base_url, 4)
    assert found[2] == NoReply('status 400: {"error": {"code": "content_filter"}}', refused=True) and len(chats.bodies) == 4


def test_a_server_that_is_down_ends_the_asking_after_a_few_requests():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        came: list[int] = []
        said = r"3 consecutive requests and a plain question unanswered, after 2 tries each \(the last: ConnectError"
        with pytest.raises(EngineLost, match=said):
            ask(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", 1000, endpoint_retries=1, arrived=lambda number, _: came.append(number))
    assert len(came) <= 12


@pytest.mark.parametrize(
    "fail", [PASSES["500"], PASSES["503"], PASSES["no json"], drop, None], ids=["500", "503", "no json", "drop", "hang"]
)
def test_a_server_that_answers_others_is_not_down_however_many_requests_in_a_row_it_fails(monkeypatch, fail):
    """As after a restart, when only those are left. In time it answers the plain question however slow this machine is: one clock of all
    requests could not tell it from those that hang."""

    def act(chats, handler, body):
        if chats.text(body).isdecimal():
            fail(chats, handler)
        else:
            say(handler, "Hello!")

    async def late(server, client, body):
        if body["messages"] is not PLAIN:
            raise TimeoutError
        return await post(server, client, body)

    post = ChatServer._post
    with chat_server(act) as chats:
        if fail is None:
            monkeypatch.setattr(ChatServer, "_post", late)
        found = ask(chats.base_url, 7, endpoint_retries=0)
    assert len(found) == 7 and not any(isinstance(outcome, Reply) or outcome.refused for outcome in found.values())


def test_what_came_before_the_server_went_down_is_handed_over():
    def dies(chats, handler, body):
        if chats.text(body) in map(str, range(5)):
            echo(chats, handler, body)
        else:
            send(handler, 502, b"")

    came = {}
    with chat_server(dies) as chats, pytest.raises(EngineLost):
        ask(chats.base_url, 1000, endpoint_concurrency=1, arrived=came.__setitem__)
    assert [number for number, outcome in came.items() if isinstance(outcome, Reply)] == [0, 1, 2, 3, 4]
    assert len(chats.bodies) == 5 + 3 * 3 + 3


@pytest.mark.parametrize(("status", "headers"), [(401, {}), (403, {}), (404, {}), (307, {"Location": "http://127.0.0.1:1/elsewhere"})])
def test_a_refusal_that_holds_for_all_ends_the_stage_and_is_no_redirect(status, headers):
    with chat_server(lambda chats, handler, body: send(handler, status, b"no such thing", **headers)) as chats:
        with pytest.raises(StageError, match=rf"status {status}: no such thing.*no key, since PEDIGREE_127_0_0_1_KEY is not set"):
            ask(chats.base_url, 100, endpoint_concurrency=2)
    assert len(chats.bodies) <= 5


@pytest.mark.parametrize("status", [403, 451])
def test_what_a_providers_filter_forbids_is_refused_alone(status):
    slowed: list[str] = []

    def filtered(chats, handler, body):
        if chats.text(body) == "2":
            send(handler, status, b"your input was flagged")
        elif not chats.text(body).isdecimal() and not slowed:
            slowed.append("once")
            send(handler, 429, b"", Retry_After="0.01")
        else:
            echo(chats, handler, body)

    with chat_server(filtered) as chats:
        found = ask(chats.base_url, 4)
    assert found.pop(2) == NoReply(f"status {status}: your input was flagged", refused=True)
    assert texts(found) == {number: f"you said {number}" for number in (0, 1, 3)}


def test_a_limit_of_requests_is_waited_for_longer_than_other_failures():
    def limited(chats, handler):
        send(handler, 429, b"slow down")

    with chat_server(failing(2, limited)) as chats:
        began = time.monotonic()
        assert len(ask(chats.base_url, 1)) == 1
    assert time.monotonic() - began >= 2 * 0.16


def test_a_pause_that_the_server_asks_for_is_kept():
    def busy(chats, handler):
        send(handler, 429, b"", Retry_After="0.5")

    with chat_server(failing(1, busy)) as chats:
        began = time.monotonic()
        ask(chats.base_url, 1)
    assert time.monotonic() - began >= 0.5


def test_what_is_no_number_of_seconds_is_no_pause():
    values = ("1.5", "0", "", "soon", "Wed, 21 Oct 2026 07:28:00 GMT", "-4")
    assert [_seconds(value) for value in values] == [1.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [_seconds(value, 16.0) for value in values] == [1.5, 0.0, 16.0, 16.0, 16.0, 0.0]


def test_the_key_of_the_host_is_sent_and_no_other(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-somebody-elses-0123456789")
    with chat_server(echo) as chats:
        ask(chats.base_url, 1)
        assert "Authorization" not in chats.headers[-1]
        monkeypatch.setenv(key_variable(chats.base_url), f" {KEY}\n")
        ask(chats.base_url, 1)
        assert chats.headers[-1]["Authorization"] == f"Bearer {KEY}"
        assert "sk-somebody" not in str(chats.headers)


def test_the_key_is_struck_out_of_whatever_the_server_says(monkeypatch):
    monkeypatch.setenv("PEDIGREE_127_0_0_1_KEY", KEY)
    replies = {
        "0": lambda handler: say(handler, f"your key is {KEY}"),
        "1": lambda handler: send(handler, 400, f"bad key {KEY}".encode()),
        "2": lambda handler: send(handler, 500, f"oops {KEY}".encode()),
    }
    with chat_server(lambda chats, handler, body: replies[chats.text(body)](handler)) as chats:
        found = ask(chats.base_url, 3, endpoint_retries=0)
    assert found[0] == Reply("your key is ***", True, "judge-2024-08-06", "fp_1")
    assert [found[1], found[2]] == [NoReply("status 400: bad key ***", refused=True), NoReply("status 500: oops ***", refused=False)]
    with chat_server(lambda chats, handler, body: send(handler, 401, f"wrong: {KEY}".encode())) as chats:
        with pytest.raises(StageError, match=r"wrong: \*\*\*\), with the key in PEDIGREE_127_0_0_1_KEY") as raised:
            ask(chats.base_url, 1)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel", "\x07bell"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_repeated(monkeypatch, key):
    monkeypatch.setenv("PEDIGREE_JUDGE_EXAMPLE_KEY", key)
    with pytest.raises(StageError, match="PEDIGREE_JUDGE_EXAMPLE_KEY contains characters that are invalid in a key") as raised:
        ChatServer(judge_at("https://judge.example/v1"), Placement())
    assert key not in str(raised.value)


def test_an_error_of_whoever_takes_the_answers_ends_the_asking_at_once():
    def full(number, outcome):
        raise StageError("the disk is full")

    def slow(chats, handler, body):
        if chats.text(body) == "0":
            echo(chats, handler, body)
        else:
            hang(chats, handler)

    with chat_server(slow) as chats:
        with pytest.raises(StageError, match="the disk is full"):
            ask(chats.base_url, 10, arrived=full, endpoint_timeout_s=3600.0, heartbeat_timeout_s=3600.0)  # the others would take as long


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_polite_stop_is_heard_wherever_the_loop_is(number):
    """A handler that raises in one of the loop's callbacks is only logged."""
    hanging = threading.Event()

    def stop(number, frame):
        raise Preempted("asked to stop")

    def hang(chats, handler, body):
        hanging.wait()

    def bodies():
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        yield 0, {"model": "judge", "messages": [{"role": "user", "content": "0"}]}

    before = signal.signal(number, stop)
    try:
        with chat_server(hang) as chats:
            try:
                server = ChatServer(judge_at(chats.base_url), Placement(endpoint_timeout_s=3600.0, endpoint_retries=0))
                with pytest.raises(Preempted):
                    server.ask(bodies(), lambda *_: None)
            finally:
                hanging.set()
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)


PARTIAL = b'{"choices": [{"message": {"content": "It is bec"}, "finish_reason": null, "error": {"code": 502}}]}'


def test_a_reply_is_read_with_all_that_says_what_it_is():
    assert read_reply(completion_of("x", finish_reason="length")) == Reply("x", False, "judge-2024-08-06", "fp_1")
    assert not read_reply(completion_of("x", finish_reason="content_filter")).ended
    assert read_reply(completion_of(None)).text == ""
    assert read_reply(completion_of("a\ud800b")).text == "a?b"  # half a surrogate pair can be in no file
    assert read_reply(completion_of("x", model=7, system_fingerprint=None)) == Reply("x", True, None, None)
    for raw in (b"", b"null", b'{"choices": [{}]}', b'{"choices": {"0": 1}}', b'{"choices": [{"message": null}]}', b"\xff", PARTIAL):
        with pytest.raises(MalformedReply):
            read_reply(raw)


def test_a_greedy_question_has_no_seed_and_the_length_goes_by_the_servers_name_for_it():
    """The log knows a reply by the whole body, of which some models reject a part: that is not sent."""
    by = {"type": "endpoint", "base_url": "https://judge.example/v1", "model": "m"}
    asked: list[Message] = [{"role": "user", "content": "?"}]
    greedy = Rating.model_validate({"rubrics": ["honesty"], "by": by}).sampling
    body = request_body(ByEndpoint.model_validate(by), greedy, asked, 7)
    assert body == {"model": "m", "messages": asked, "temperature": 0.0, "top_p": 1.0, "max_tokens": 512}
    assert as_sent(ByEndpoint.model_validate(by), body) == {"model": "m", "messages": asked, "temperature": 0.0, "max_tokens": 512}
    by |= {"length_field": "max_completion_tokens"}
    body = request_body(ByEndpoint.model_validate(by), Sampling(temperature=1.0, max_tokens=9), asked, 7)
    assert body == {"model": "m", "messages": asked, "temperature": 1.0, "top_p": 1.0, "max_completion_tokens": 9, "seed": 7}
    assert as_sent(ByEndpoint.model_validate(by), body) == body  # vLLM would take the defaults of the model's generation config
    omitting = ByEndpoint.model_validate(by | {"omit_defaults": True})
    assert as_sent(omitting, body) == {"model": "m", "messages": asked, "max_completion_tokens": 9, "seed": 7}
    body = request_body(omitting, Sampling(temperature=0.7, max_tokens=9), asked, 7)
    assert as_sent(omitting, body).keys() == body.keys() - {"top_p"}
    body = request_body(omitting, Sampling(temperature=1.0, top_p=0.9, max_tokens=9), asked, 7)
    assert as_sent(omitting, body).keys() == body.keys() - {"temperature"}
