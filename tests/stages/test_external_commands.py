"""A command of other software as a stage: what it gets, what becomes of what it writes, and how it fails."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from data_lab import publish, rows_of, run_stage
from models import a_job, alive, config_of, tiny_policy
from waiting import until

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.methods.external import search_path
from pedigree.data.artifacts.artifacts import write_text
from pedigree.stages.external import run as external
from pedigree.stages.external.commands import packages
from pedigree.stages.job.failures import Preempted, StageError

PAIR = {
    "id": "a", "source": "s", "messages": [{"role": "user", "content": "Q"}], "strength": 0.75, "template_arguments": {"thinking": True},
    "answers": [{"text": "good", "score": 1.0}, {"text": "bad", "score": 0.5, "finish_reason": "length"}],
}  # fmt: skip
RANKED = {
    **PAIR,
    "id": "b",
    "strength": None,
    "answers": [{"text": text, "score": score} for text, score in (("x", 3.0), ("y", 2.0), ("z", 0.0))],
}
SINGLE = {**PAIR, "id": "c", "strength": None, "answers": [{"text": "fine", "score": 1.0}]}
TURNS = [
    {"role": "user", "content": "What is 1 + 1?"}, {"role": "call", "content": '{"name": "add", "arguments": {"a": 1}}'},
    {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2", "train": True},
]  # fmt: skip
TOOLS = '[{"type": "function", "function": {"name": "add"}}]'
CHAT = {"id": "d", "source": "s", "messages": TURNS, "template_arguments": {"tools": TOOLS}}
PROMPT = {"id": "e", "source": "s", "messages": TURNS[:1], "verifier": {"name": "exact_match", "answer": ["2", "two"]}}
RESUMES = """
trap 'echo 1 > {output}/step; exit 0' TERM
sleep 1000 & echo $! > {output}/child
if [ -e {output}/step ]; then echo "{\\"resumed\\": $0}" > {output}/metrics.json; exit; fi
touch {output}/begun
wait
"""
COPY = ["cp", "{it}/rows.jsonl", "{output}/rows.jsonl"]


def command(*words: str, **more):
    return {"command": ["bash", "-c", *words], "output": "conversation", **more}


@pytest.mark.parametrize(("record", "rows"), [("preference", [PAIR, RANKED, SINGLE]), ("conversation", [CHAT]), ("prompt", [PROMPT])])
def test_rows_that_a_command_only_copies_come_back_as_they_were(tmp_path, record, rows):
    given = publish(tmp_path / "given", record, rows)
    made = run_stage(tmp_path / "made", "external", {"command": COPY, "output": record}, data=given)
    assert [{**row, "id": ""} for row in rows_of(made)] == [{**row, "id": ""} for row in rows_of(given)]
    assert made.record.metrics == {"rows": len(rows)} and made.type == record


def test_a_pair_is_in_the_columns_of_trl(tmp_path):
    given = publish(tmp_path / "given", "preference", [PAIR])
    job = a_job(tmp_path / "job")
    external.run(config_of("external", command=COPY, output="preference"), {"data": {"it": given}}, job)
    (row,) = map(json.loads, (tmp_path / "job/given/it/rows.jsonl").read_text().splitlines())
    assert row == {
        "id": "a", "source": "s", "prompt": [{"role": "user", "content": "Q"}], "chosen": [{"role": "assistant", "content": "good"}],
        "rejected": [{"role": "assistant", "content": "bad", "finish_reason": "length"}], "score_chosen": 1.0, "score_rejected": 0.5,
        "strength": 0.75, "chat_template_kwargs": {"thinking": True},
    }  # fmt: skip


def test_it_runs_beside_copies_of_its_files_alone_and_cannot_change_its_inputs(tmp_path):
    policy, script, extra = tiny_policy(tmp_path / "policy"), tmp_path / "project/make.sh", tmp_path / "project/more"
    write_text(script, 'ls -R . > {0}/seen; echo \'{"deep": {"n": 1.5}, "m": 2}\' > $2/metrics.json; rm $1/config.json; echo x > more/a\n')
    write_text(extra / "a", "kept")
    before = policy.record.content
    made = run_stage(
        tmp_path / "made", "external",
        {"command": ["bash", "scripts/make.sh", "{it}", "{output}"], "files": ["scripts/make.sh", "more"], "output": "report"},
        {"scripts/make.sh": script, "more": extra}, models=policy,
    )  # fmt: skip
    assert rows_of(made) == [{"metric": "deep.n", "value": 1.5}, {"metric": "m", "value": 2}]
    assert made.record.metrics["measured"] == {"deep.n": 1.5, "m": 2}
    assert (policy.payload / "config.json").exists() and before == policy.record.content and (extra / "a").read_text() == "kept"
    assert made.record.marks == ("made by an external command (scripts/make.sh), of which only the form of its output was checked",)


@pytest.mark.parametrize("program", [b"#!/bin/sh\ncp $1 $2\n", Path(shutil.which("cp") or "").read_bytes()], ids=["script", "compiled"])
def test_a_program_among_its_files_starts_though_it_was_fetched_without_its_mode(tmp_path, program):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/take").write_bytes(program)
    write_text(tmp_path / "numbers", '{"n": 8}')
    config = {"command": ["./tools/take", "numbers", "{output}/metrics.json"], "files": ["tools", "numbers"], "output": "report"}
    made = run_stage(tmp_path / "made", "external", config, {name: tmp_path / name for name in config["files"]})
    assert made.record.metrics["measured"] == {"n": 8}


def test_a_model_is_imported_and_the_rest_of_its_folder_left_out(tmp_path):
    policy = tiny_policy(tmp_path / "policy")
    copy = "cp {it}/* {output}; mkdir {output}/checkpoint-1; cp {it}/model.safetensors {output}/checkpoint-1; touch {output}/args.bin"
    made = run_stage(tmp_path / "made", "external", command(copy, output="policy"), models=policy)
    names = {entry.path for entry in made.record.files}
    assert names == {entry.path for entry in policy.record.files}
    assert (made.payload / "model.safetensors").read_bytes() == (policy.payload / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (command("echo first; echo why >&2; exit 3; : {output}"), r"bash ended with exit code 3; the end of its output:\nfirst\nwhy"),
        (command(": {output}"), r"ended without an error, but wrote nothing to \{output\}"),
        (command("echo '{\"a\": 1}' > {output}/rows.jsonl"), "1 malformed rows of 1"),
        (command("touch {output}/rows.jsonl"), "empty, without any row"),
        (command("touch {output}/model.bin", output="policy"), "config.json is missing; it has model.bin"),
        (command("echo {} > {output}/config.json", output="policy"), "has no weights in safetensors"),
        (command("echo '{\"a\": \"x\"}' > {output}/metrics.json", output="report"), "a 'x', which is not a finite number"),
        (command("echo '{\"a\": NaN}' > {output}/metrics.json", output="report"), "metrics.json"),
        (command("echo '{\"a\": 1'$(printf '%0400d')'}' > {output}/metrics.json", output="report"), "a 10*, which is not a finite number"),
        (command("echo '{\"a.b\": 1, \"a\": {\"b\": 2}}' > {output}/metrics.json", output="report"), "two numbers have one name"),
        (command("touch {output}/a", output="report"), "no metrics.json that can be read"),
        ({"command": ["no-such-program", "{output}"], "output": "report"}, "no-such-program is neither in the environment of Pedigree"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_command_is_told(tmp_path, config, message):
    with pytest.raises(PedigreeError, match=message):
        run_stage(tmp_path, "external", config)
    assert not (tmp_path / "out/payload/model.safetensors").exists()


def test_a_broken_folder_of_a_package_is_not_among_the_packages(tmp_path):
    """As an installation that was ended leaves it: without name and version."""
    (tmp_path / "gone-1.0.dist-info").mkdir()
    noisy = tmp_path / "sitecustomize.py"
    noisy.write_text("print('hello')\n")
    found = packages({**os.environ, "PYTHONPATH": str(tmp_path), "PATH": search_path(None)})
    assert found and "torch" in found["libraries"] and all(isinstance(one, str) for one in found["libraries"].values())
    assert not {"None", "null"} & found["libraries"].keys()


@pytest.mark.proves("placement.environment")
def test_another_environment_is_first_on_the_path_and_its_packages_are_recorded(tmp_path):
    program = tmp_path / "venv/bin/python"
    write_text(program, '#!/bin/sh\necho \'{"python": "3.9.1", "libraries": {"other": "1.0"}}\'\n')
    write_text(tmp_path / "venv/bin/measure", '#!/bin/sh\necho "{\\"n\\": 1}" > $1/metrics.json; test -z "$PYTHONSAFEPATH"\n')
    for file in program.parent.iterdir():
        file.chmod(0o755)
    job = a_job(tmp_path / "job", environment=str(tmp_path / "venv"))
    external.run(config_of("external", command=["measure", "{output}"], output="report"), {}, job)
    assert job.command_environment == {"python": "3.9.1", "libraries": {"other": "1.0"}}


def test_a_command_that_is_stopped_may_finish_its_checkpoint_and_resumes_from_it(tmp_path):
    """It gets one SIGTERM, and its process group is gone afterwards."""
    config = config_of("external", command=["bash", "-c", RESUMES], output="report", resume=["7"])
    output, main = tmp_path / "output", threading.get_ident()

    def stop() -> None:
        until(lambda: (output / "begun").exists())
        signal.pthread_kill(main, signal.SIGTERM)

    def preempted(*_):
        raise Preempted("asked to stop")

    before = signal.signal(signal.SIGTERM, preempted)
    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        with pytest.raises(Preempted):
            external.run(config, {}, a_job(tmp_path))
    finally:
        stopping.join()
        signal.signal(signal.SIGTERM, before)
    assert (output / "step").exists()
    until(lambda: not alive(int((output / "child").read_text())))
    job = a_job(tmp_path)
    assert external.run(config, {}, job)["measured"] == {"resumed": 7}
    assert job.resumed_from == "output of an earlier attempt"


def test_the_newest_complete_checkpoint_of_a_trainer_is_named(tmp_path):
    words = ["bash", "-c", "echo '{\"step\": '${0##*-}'}' > {output}/metrics.json"]
    config = config_of("external", command=words, output="report", resume=["{checkpoint}"])
    for number, name in ((9, "trainer_state.json"), (10, "trainer_state.json"), (11, "model.safetensors")):
        write_text(tmp_path / f"output/checkpoint-{number}/{name}", "{}")
    job = a_job(tmp_path)
    assert external.run(config, {}, job)["measured"] == {"step": 10}
    assert job.resumed_from == "output/checkpoint-10 of an earlier attempt"


def test_without_resume_each_attempt_begins_with_an_empty_folder(tmp_path):
    for words in (
        "touch {output}/rest; exit 1",
        "ls {output} | wc -l | sed 's/.*/{\"n\": &}/' > {output}/../n; mv {output}/../n {output}/metrics.json",
    ):
        config = config_of("external", **command(words, output="report"))
        try:
            found = external.run(config, {}, a_job(tmp_path))
        except StageError:
            continue
    assert found["measured"] == {"n": 0}


def test_a_command_that_has_ended_is_not_run_again_to_import_its_output(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    config = config_of("external", **command("echo >> {output}/../runs; echo '{\"n\": 1}' > {output}/metrics.json", output="report"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(external, "fault_point", interrupted)
        external.run(config, {}, a_job(tmp_path))
    job = a_job(tmp_path)
    assert external.run(config, {}, job)["measured"] == {"n": 1}
    assert (tmp_path / "runs").read_text() == "\n"
    assert job.command_environment and job.resumed_from == "output of an earlier attempt"


def test_a_command_whose_output_was_refused_runs_again(tmp_path):
    words = "echo >> {output}/../runs; n=$(wc -l < {output}/../runs); touch {output}/a; "
    words += "[ $n = 1 ] || echo '{\"n\": '$n'}' > {output}/metrics.json"
    config = config_of("external", **command(words, output="report"))
    with pytest.raises(StageError, match=r"no metrics\.json"):
        external.run(config, {}, a_job(tmp_path))
    assert external.run(config, {}, a_job(tmp_path))["measured"] == {"n": 2}


def test_braces_of_the_command_itself_are_left_alone(tmp_path):
    words = "echo '7 8' | awk '{print}' | awk '{print $2}' | sed 's/.*/{\"n\": &}/' > {output}/metrics.json"
    assert external.run(config_of("external", **command(words, output="report")), {}, a_job(tmp_path))["measured"] == {"n": 8}


def test_a_command_that_a_signal_ends_may_be_tried_again(tmp_path):
    with pytest.raises(RuntimeError, match="bash was ended by SIGKILL"):  # which a job reports as `crashed`
        run_stage(tmp_path, "external", command("kill -9 $$; : {output}"))


@pytest.mark.parametrize("started", ["{}", "setsid -w bash -c '{}'; :"], ids=["itself", "a worker in a session of its own"])
def test_a_silent_command_is_alive_while_it_computes(tmp_path, started):
    progress = tmp_path / "progress.json"

    def end() -> None:
        until(lambda: progress.exists() and "running the command" in progress.read_text())
        (tmp_path / "seen").touch()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(StageError, match="wrote nothing"):
        external.run(config_of("external", **command(started.format("while [ ! -e {output}/../seen ]; do :; done"))), {}, a_job(tmp_path))
    ending.join()
