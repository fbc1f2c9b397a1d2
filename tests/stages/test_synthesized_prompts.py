"""`synthesize` with a language model behind an endpoint, a real server on loopback."""

import json
import re
import signal
import threading

import pytest
from chat_lab import Gate, chat_server, say, send
from models import a_job, config_of, dataset, run
from row_reading import read_rows

from pedigree.configs.language.execution import Numerics
from pedigree.data.records import parents, records
from pedigree.stages.job.failures import StageError
from pedigree.stages.synthesize import run as synthesize

ONE_THREAD = Numerics(threads=1)
PLACED = {"endpoint_timeout_s": 3600.0, "endpoint_retries": 0, "endpoint_concurrency": 4}
PERSONA = {"type": "persona", "task": "math"}


def people(count):
    name = [f"hub-{number:016x}" for number in range(count)]
    return [
        {"id": name[number], "source": "hub", "messages": [{"role": "user", "content": f"person {number}"}], "verifier": None}
        for number in range(count)
    ]


def config(base_url, **more):
    return {"method": PERSONA, "by": {"type": "endpoint", "base_url": base_url, "model": "writer"}, **more}


def written(folder, base_url, rows, placed=None, **more):
    job = a_job(folder / "job", ONE_THREAD, **{**PLACED, **(placed or {})})
    inputs = {"prompts": {"p": dataset(folder / "prompts", "prompt", rows)}}
    metrics = synthesize.run(config_of("synthesize", **config(base_url, **more)), inputs, job)
    return metrics, list(records.stream(job.out / "payload")), job


def shown(body):
    """The numbers of the persons, prompts or examples in a question."""
    return [int(number) for number in re.findall(r"-\w+>\nperson (\d+)\n</", body["messages"][0]["content"])]


def by_person(chats, handler, body):
    (number,) = shown(body)
    say(handler, f"<prompt>\nCount to {number}!\n</prompt>")


def test_each_persona_has_its_prompts_and_they_name_it(tmp_path):
    def two(chats, handler, body):
        (number,) = shown(body)
        say(handler, f"<prompt>\nCount to {number}!\n</prompt>\n<prompt>Count from {number}!</prompt>")

    with chat_server(two) as chats:
        metrics, rows, job = written(tmp_path, chats.base_url, people(5), method={**PERSONA, "prompts": 2}, seed=3)
    expected = [(number, side, f"Count {way} {number}!") for number in range(5) for side, way in ((0, "to"), (1, "from"))]
    assert [(row["id"], row["messages"]) for row in rows] == [
        (f"hub-{number:016x}/persona-math/{side}", [{"role": "user", "content": text}]) for number, side, text in expected
    ]
    assert {(row["source"], row["verifier"]) for row in rows} == {("persona/math", None)}
    assert [of for _, of in parents.read(job.evidence)] == [[f"hub-{number:016x}"] for number, *_ in expected]
    assert (metrics["rows"], metrics["requests"], metrics["unusable"], metrics["dropped"]) == (10, 5, {}, {})
    assert metrics["reported"]["model"] == {"judge-2024-08-06": 5} and len(chats.bodies) == 5
    lines = read_rows(job.evidence / "requests.jsonl")
    assert lines[4]["shown"] == [f"hub-{4:016x}"] and lines[4]["prompts"] == [{"id": rows[8]["id"]}, {"id": rows[9]["id"]}]
    assert "person 4" in lines[4]["question"] and lines[4]["reply"].startswith("<prompt>\nCount to 4!")
    assert len({body["seed"] for body in chats.bodies}) == 5 and {body["temperature"] for body in chats.bodies} == {1.0}


def test_evidence_is_written_while_replies_are_read(tmp_path, monkeypatch):
    read, written_at = [], []
    own = synthesize.Harvest.take

    def taken(harvest, text, *given):
        read.append(text)
        return own(harvest, text, *given)

    def lines(path, rows):
        for _ in rows:
            written_at.append(len(read))

    monkeypatch.setattr(synthesize.Harvest, "take", taken)
    monkeypatch.setattr(synthesize, "write_rows", lines)
    with chat_server(by_person) as chats:
        written(tmp_path, chats.base_url, people(5))
    assert written_at == [1, 2, 3, 4, 5]


def test_what_cannot_be_read_and_what_was_said_before_is_left_out_and_counted(tmp_path):
    def odd(chats, handler, body):
        (number,) = shown(body)
        if number == 1:
            send(handler, 400, b"content_filter")
        elif number == 2:
            say(handler, "Count to 2!")
        elif number == 3:
            say(handler, "<prompt>Count to 3!</prompt>", finish_reason="length")
        else:
            say(handler, f"<prompt>{ {4: 'person 4', 5: 'Count to 6!'}.get(number, f'Count to {number}!') }</prompt>")

    with chat_server(odd) as chats:
        metrics, rows, job = written(tmp_path, chats.base_url, people(12), max_unusable_share=0.25)
        assert [row["messages"][0]["content"] for row in rows] == [f"Count to {number}!" for number in (0, 6, 7, 8, 9, 10, 11)]
        assert [row["id"] for row in rows[:2]] == [f"hub-{0:016x}/persona-math/0", f"hub-{5:016x}/persona-math/0"]
        assert metrics["unusable"] == {"no prompt stands between marks": 1, "no reply": 1, "the writer's words were cut off": 1}
        assert metrics["dropped"] == {"it repeats another one": 2}
        lines = read_rows(job.evidence / "requests.jsonl")
        assert lines[1]["failure"] == "status 400: content_filter" and "reply" not in lines[1]
        assert lines[4]["prompts"] == [{"dropped": "it repeats another one", "like": f"hub-{4:016x}", "text": "person 4"}]
        assert lines[6]["prompts"][0]["like"] == rows[1]["id"]
        counts = json.loads((job.evidence / "counts.json").read_text())
        assert (counts["read"], counts["kept"], counts["requests"]) == (9, 7, 12)
        with pytest.raises(
            StageError, match=r"3 of 12 replies contain no prompts, more than 24% .*; the first: 'status 400: con.*follows the format"
        ):
            written(tmp_path / "b", chats.base_url, people(12), max_unusable_share=0.24)
        with pytest.raises(StageError, match=r"7 prompts < min_rows 8 from 12 replies"):
            written(tmp_path / "c", chats.base_url, people(12), max_unusable_share=0.25, min_rows=8)


def test_self_instruct_shows_examples_that_are_drawn_and_keeps_what_is_new(tmp_path):
    """Of each request one prompt is new, one is a seed with a word changed, and one resembles what another request has got."""
    seeds = [row | {"messages": [{"role": "user", "content": f"person {number}"}]} for number, row in enumerate(people(9))]
    seeds[0]["messages"] = [{"role": "user", "content": "Name all the rivers of the south in order of length"}]

    def act(chats, handler, body):
        number = 1 + sum(shown(body)) % 1000
        resembling = "Name all the rivers of the north in order of length"
        texts = [f"w{number}a w{number}b w{number}c", resembling, "one and the same thing for all"]
        say(handler, "".join(f"<prompt>{text}</prompt>" for text in texts))

    method = {"type": "self_instruct", "requests": 6, "shots": 3, "prompts": 3}
    with chat_server(act) as chats:
        metrics, rows, job = written(tmp_path / "a", chats.base_url, seeds, method=method)
        _, again, _ = written(tmp_path / "b", chats.base_url, seeds[::-1], {"endpoint_concurrency": 1}, method=method)
        with pytest.raises(StageError, match="shots is 10, but there are only 9 prompts: lower it"):
            written(tmp_path / "c", chats.base_url, seeds, method=method | {"shots": 10})
    lines = read_rows(job.evidence / "requests.jsonl")
    assert len(lines) == 6 and all(len(set(line["shown"])) == 3 for line in lines) and len({tuple(line["shown"]) for line in lines}) > 3
    assert all(row["id"].startswith("self_instruct/instructions-") and row["source"] == "self_instruct/instructions" for row in rows)
    (like,) = {line["prompts"][1]["like"] for line in lines}
    assert like == seeds[0]["id"] and lines[0]["prompts"][1]["rouge_l"] == 10 / 11  # of 11 words one differs
    assert lines[0]["prompts"][2]["id"] == rows[1]["id"] and lines[1]["prompts"][2]["dropped"] == "it repeats another one"
    assert len(rows) == 1 + len({line["prompts"][0].get("id") for line in lines} - {None})
    assert metrics["rows"] == len(rows) and len({row["id"] for row in rows}) == len(rows) and again == rows
    shown_for = {one["id"]: line["shown"] for line in lines for one in line["prompts"] if "id" in one}
    assert dict(parents.read(job.evidence)) == shown_for


def test_a_rewrite_is_of_the_users_last_turn_and_an_unchanged_one_is_none(tmp_path):
    rows = people(3)
    called = [{"role": "call", "content": '{"name": "age", "arguments": {}}'}, {"role": "tool", "content": "She is 40."}]
    rows[2]["messages"] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}, *rows[2]["messages"], *called]

    def act(chats, handler, body):
        (number,) = shown(body)
        say(handler, f"<prompt>person {number}{'' if number == 1 else ' in verse'}</prompt>")

    with chat_server(act) as chats:
        metrics, found, _ = written(tmp_path, chats.base_url, rows, method={"type": "rewrite", "task": "constraints"})
    assert [(row["id"], row["messages"]) for row in found] == [
        (f"{rows[number]['id']}/rewrite-constraints/0", [{"role": "user", "content": f"person {number} in verse"}]) for number in (0, 2)
    ]
    assert metrics["dropped"] == {"it repeats another one": 1}


def test_neither_concurrency_nor_the_order_of_replies_changes_a_byte(tmp_path):
    turn = threading.Barrier(4)

    def shuffled(chats, handler, body):
        turn.wait()
        by_person(chats, handler, body)

    with chat_server(by_person) as chats, chat_server(shuffled) as other:
        _, _, one = written(tmp_path / "a", chats.base_url, people(8), {"endpoint_concurrency": 1})
        _, _, four = written(tmp_path / "b", other.base_url, people(8))
    names = ("payload/rows-00000.parquet", "evidence/requests.jsonl", "evidence/counts.json")
    for name in names:
        assert (one.out / name).read_bytes() == (four.out / name).read_bytes()


@pytest.mark.nightly  # `test_rated_answers` kills a job that asks by the same code
def test_a_job_that_was_killed_asks_nothing_twice_and_ends_in_the_same_bytes(tmp_path):
    gate = Gate(12, by_person)
    with chat_server(gate) as chats:
        args = ("synthesize", config(chats.base_url), {"prompts": {"p": dataset(tmp_path / "prompts", "prompt", people(30))}}, ONE_THREAD)
        gate.end_job(chats, signal.SIGKILL, tmp_path / "job", *args, **PLACED)
        before = len(chats.bodies)
        assert run(tmp_path / "job", *args, **PLACED)["ok"]
        assert len(chats.bodies) - before == 30 - 12
        assert run(tmp_path / "whole", *args, **PLACED)["ok"]
    one, other = ((tmp_path / name / "out" / "payload" / "rows-00000.parquet").read_bytes() for name in ("job", "whole"))
    assert one == other
