"""What counts as reproduced: numbers worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from handmade import made_at

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import params_file
from pedigree.configs.language.execution import Execution, engines_problem
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.artifacts import (
    Artifact,
    FileEntry,
    Input,
    Record,
    Run,
    content_hash,
    open_artifact,
    read_lineage,
    read_run,
    stage_key,
    write_json,
    write_rows,
)
from pedigree.data.artifacts.run_record import Hardware
from pedigree.pipelines.reproduce.rebuild import MOST_PROCESSES, RECIPE, data_only, identity_differences, members_of, profile, recipe
from pedigree.pipelines.reproduce.verdicts import Finding, Original, conditions, first_divergence, judge, passes, score_differences

RUN = {
    "schema_version": 1,
    "numerics": {"threads": 1},
    "hardware": {"cpu": "A"},
    "environment": {"python": "3.11.7", "libraries": {"torch": "1"}},
    "fingerprint": {"files": {"stages/sft/run.py": "1" * 64}},
}


TOLD = Run.model_validate(RUN)


def record(kind: str, text: str, inputs: tuple[Input, ...] = (), **metrics: float) -> Record:
    files = (FileEntry(path="rows.jsonl", size=1, sha256=digest(text)),)
    config = {"resamples": 1000, "seed": 0} if kind == "evaluate" else {}
    inputs = (Input(port="policies", label="p", content="c" * 64, producer="d" * 64),) if kind == "evaluate" else inputs
    return Record(
        kind=kind, version=1, type="scores" if kind == "evaluate" else "policy", config=config, inputs=inputs,
        key=stage_key(kind, 1, {}, [], {}), content=content_hash(files), files=files, metrics=metrics,
    )  # fmt: skip


def made(folder: Path, new: Record, run: dict | None = None) -> Artifact:
    write_json(folder / "run.json", run or RUN)
    return Artifact(folder, new)


def test_equal_content_is_identical_whatever_the_machine(tmp_path):
    other = RUN | {"hardware": {"cpu": "B"}}
    verdict, detail, _, found = judge(record("sft", "x"), TOLD, made(tmp_path, record("sft", "x"), other), None, None)
    assert (verdict, detail, found) == ("identical", "despite cpu A -> B", ("cpu A -> B",))


def test_training_may_drift_on_another_processor_but_not_on_the_same(tmp_path):
    same = judge(record("sft", "x"), TOLD, made(tmp_path / "a", record("sft", "y")), None, None)
    other = judge(record("sft", "x"), TOLD, made(tmp_path / "b", record("sft", "y"), RUN | {"hardware": {"cpu": "B"}}), None, None)
    assert same[:2] == ("different", "rows.jsonl differs")
    assert other[:2] == ("drifted", "rows.jsonl differs; cpu A -> B")


def test_no_processor_excuses_a_data_stage(tmp_path):
    new = made(tmp_path, record("prepare_data", "y"), RUN | {"hardware": {"cpu": "B"}})
    assert judge(record("prepare_data", "x"), TOLD, new, None, None)[0] == "different"


def test_other_conditions_are_named():
    now = {
        "schema_version": 1,
        "numerics": {"threads": 2},
        "hardware": {"cpu": "A", "gpus": ["H"]},
        "environment": {"python": "3.11.7", "libraries": {"torch": "2", "vllm": "1"}},
        "fingerprint": {"files": {"stages/sft/run.py": "2" * 64}},
    }
    assert conditions(TOLD, Run.model_validate(now)) == [
        "numerics threads 1 -> 2", "gpus None -> ['H']", "torch 1 -> 2", "vllm none -> 1", "code differs in stages/sft/run.py",
    ]  # fmt: skip


def test_packages_of_an_external_command_are_conditions(tmp_path):
    then, now = (
        {**RUN, "command_environment": {"python": python, "libraries": {"trl": trl}}}
        for python, trl in (("3.11", "1.10"), ("3.12", "1.16"))
    )
    new = made(tmp_path, record("external", "y"), now)
    verdict, detail, *_ = judge(record("external", "x"), Run.model_validate(then), new, None, None)
    assert (verdict, detail) == ("drifted", "rows.jsonl differs; command python 3.11 -> 3.12; command trl 1.10 -> 1.16")


@pytest.mark.parametrize(("kind", "numerics", "verdict"), [
    ("sft", {"device": "cuda", "deterministic": False}, "drifted"),
    ("sft", {"device": "cuda", "deterministic": True}, "different"),
    ("sft", {"device": "cpu", "deterministic": False}, "different"),
    ("prepare_data", {"device": "cuda", "deterministic": False}, "different"),
])  # fmt: skip
def test_gpus_need_not_repeat_bits_unless_the_profile_demands_it(tmp_path, kind, numerics, verdict):
    run = {**RUN, "numerics": numerics}
    found = judge(record(kind, "x"), Run.model_validate(run), made(tmp_path, record(kind, "y"), run), None, None)
    because = "; GPUs need not repeat bits without `numerics: {deterministic: true}`" if verdict == "drifted" else ""
    assert found[:2] == (verdict, f"rows.jsonl differs{because}")


HERE = {"cpu": "AMD EPYC", "cpu_model": "family 25, model 17, stepping 1", "instruction_sets": ["avx2", "avx512f", "avx512_bf16"]}


def drift(folder: Path, there: dict, here: dict) -> tuple[str, str]:
    """Verdict and sentence of two trainings with other bytes, on one machine and on another."""
    before, now = ({**RUN, "hardware": {"kernel_settings": {}} | hardware} for hardware in (there, here))
    return judge(record("sft", "x"), Run.model_validate(before), made(folder, record("sft", "y"), now), None, None)[:2]


def test_a_difference_is_explained_by_what_decides_bits_in_machines_of_one_name(tmp_path):
    older = {"cpu": "AMD EPYC", "cpu_model": "family 25, model 1, stepping 1", "instruction_sets": ["avx2"]}
    assert drift(tmp_path / "a", older, HERE) == (
        "drifted",
        "rows.jsonl differs; cpu_model family 25, model 1, stepping 1 -> family 25, model 17, stepping 1; "
        "instruction_sets: avx512f, avx512_bf16 only here",
    )
    limited = HERE | {"kernel_settings": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}
    assert drift(tmp_path / "b", HERE, limited) == ("drifted", "rows.jsonl differs; ONEDNN_MAX_CPU_ISA none -> AVX2")


def test_what_an_older_record_does_not_name_of_its_machine_is_said_and_excuses_nothing(tmp_path):
    lacks = "the record does not name the processor's model, its instruction sets and settings of kernels, which decide bits"
    assert drift(tmp_path / "a", HERE, HERE) == ("different", "rows.jsonl differs")
    now = made(tmp_path / "b", record("sft", "y"), {**RUN, "hardware": HERE | {"kernel_settings": {}}})
    run = Run.model_validate({**RUN, "hardware": {"cpu": "AMD EPYC"}})
    assert judge(record("sft", "x"), run, now, None, None)[:2] == ("different", f"rows.jsonl differs; {lacks}")


@pytest.mark.parametrize(("now", "named"), [("units", []), ("auto", []), ("fp32", ["numerics bf16_products units -> fp32"])])
def test_older_records_were_made_with_torchs_own_products_of_bf16(now, named):
    assert conditions(TOLD, Run.model_validate({**RUN, "numerics": {"threads": 1, "bf16_products": now}})) == named


def test_the_first_step_at_which_curves_part_is_found_and_the_clock_does_not_count(tmp_path):
    before, after = tmp_path / "before.csv", tmp_path / "after.csv"
    before.write_text("step,loss,tokens_per_second,trainer_idle,slowdown\n1,3.0,10,0.1,1\n2,2.5,11,0.2,1\n3,2.0,12,0.3,1\n")
    after.write_text("step,loss,tokens_per_second,trainer_idle,slowdown\n1,3.0,99,0.9,2\n2,2.5,98,0.8,2\n3,2.1,97,0.7,2\n")
    assert first_divergence(before, after) == "curves diverge at step 3: loss 2.0 -> 2.1"
    after.write_text("step,loss,tokens_per_second,trainer_idle\n1,3.0,99,0.9\n2,2.5,98,0.8\n")
    assert first_divergence(before, after) == "curves agree for 2 steps but differ in length: 3 -> 2 steps"
    after.write_text(before.read_text())
    assert first_divergence(before, after) is None and first_divergence(before, tmp_path / "none") is None


@pytest.mark.parametrize(("bad", "why"), [(b"step,loss\n1," + b"3" * 200_000, "field larger"), (b"step,loss\n1,\xff\n", "utf-8")])
def test_a_curve_that_cannot_be_read_is_said_and_ends_nothing(tmp_path, bad, why):
    before, after = tmp_path / "before.csv", tmp_path / "after.csv"
    before.write_bytes(bad)
    after.write_text("step,loss\n1,3.0\n")
    said = first_divergence(before, after)
    assert said is not None and said.startswith("curves cannot be compared: ") and why in said


def scored(folder: Path, scores: list[float | None], categories: str = "") -> Path:
    """Scores of items; each in the category of its letter."""
    rows: list[dict] = [{"policy": "p", "task": "t", "id": f"i{i}", "score": s} for i, s in enumerate(scores)]
    rows = [row | {"category": name} for row, name in zip(rows, categories, strict=True)] if categories else rows
    write_rows(folder / "payload" / "rows.jsonl", rows)
    return folder / "payload"


def test_scores_are_compared_item_by_item_against_the_tolerance(tmp_path):
    # differences 0, 0, -1, 0: a resample draws the -1 four times with probability 1/256, three times or more with 13/256, never with 81/256
    original = Original(scored(tmp_path / "old", [1, 0, 1, 1]), None)
    scored(tmp_path / "new", [1, 0, 0, 1])
    new = made(tmp_path / "new", record("evaluate", "y"))
    (row,) = score_differences(record("evaluate", "x"), TOLD, new, original)
    assert row == {"of": "p/t", "difference": -0.25, "low": -0.75, "high": 0, "n": 4}
    within = judge(record("evaluate", "x"), TOLD, new, original, 0.25)
    assert within[0] == "within tolerance" and "-0.250 [-0.750, +0.000] n=4 (p/t), tolerance 0.25" in within[1]
    assert judge(record("evaluate", "x"), TOLD, new, original, 0.24)[0] == "different"


def test_items_without_a_score_on_either_side_are_left_out(tmp_path):
    original = Original(scored(tmp_path / "old", [1, None, 0, 1]), None)
    scored(tmp_path / "new", [1, 1, 1, None])
    (row,) = score_differences(record("evaluate", "x"), TOLD, made(tmp_path / "new", record("evaluate", "y")), original)
    assert (row["difference"], row["n"]) == (0.5, 2)


def test_a_mean_over_categories_is_compared_as_one(tmp_path):
    """a: -1, 0, whose resamples average -1 to 0, each with probability ¼. b: 0, 0, 0, 0. Half of a's."""
    original = Original(scored(tmp_path / "old", [1, 1, 1, 1, 0, 0], "aabbbb"), None)
    scored(tmp_path / "new", [0, 1, 1, 1, 0, 0], "aabbbb")
    new = made(tmp_path / "new", record("evaluate", "y"))
    (row,) = score_differences(record("evaluate", "x"), TOLD, new, original)
    assert row == {"of": "p/t", "difference": -0.25, "low": -0.5, "high": 0, "n": 6}
    assert judge(record("evaluate", "x"), TOLD, new, original, 0.2)[0] == "different"  # over all items it would be 0.167


def test_without_the_old_answers_the_recorded_means_are_compared(tmp_path):
    old, new = record("evaluate", "x", **{"p/t": 0.5, "p/mean": 0.5}), record("evaluate", "y", **{"p/t": 0.75, "p/mean": 0.75})
    assert score_differences(old, TOLD, made(tmp_path, new), None) == [{"of": "p/t", "difference": 0.25, "n": None}]


@pytest.mark.parametrize(
    ("verdicts", "passed"),
    [
        (("identical", "restored"), True),
        (("identical", "drifted"), False),  # nobody vouches for it
        (("identical", "drifted", "within tolerance"), True),
        (("different", "within tolerance"), False),
        (("identical", "not run"), False),
        (("identical", "failed"), False),
        ((), False),
    ],
)
def test_what_counts_as_reproduced(verdicts, passed):
    assert passes([Finding("a/b", "", "", "", verdict) for verdict in verdicts]) is passed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Members of the whole chain's last artifact, the graph they came from, and the original records."""
    project, graph = made_at(tmp_path_factory.mktemp("tiny"))
    folder = project.artifact("tiny/unseen")
    run, lineage = read_run(folder / "run.json"), read_lineage(folder / "lineage.json")
    return members_of(open_artifact(folder).record, run, lineage, {}), graph


def test_the_recipe_of_a_whole_chain_is_rebuilt_from_records_alone(tiny, tmp_path):
    members, graph = tiny
    (tmp_path / "reproduction.yaml").write_text(json.dumps(recipe(members)))
    rebuilt = load_recipe(tmp_path, "reproduction")
    wanted = {graph.nodes[address].spec for address in graph.ancestors(["tiny/unseen"])}
    assert {node.spec for node in rebuilt.nodes.values()} == wanted and len(rebuilt.nodes) == len(members)


def test_data_stages_are_those_above_which_no_model_stands(tiny):
    members, _ = tiny
    kinds = sorted(member.record.kind for member in members.values() if member.id in data_only(members))
    assert set(kinds) == {"prepare_data", "decontaminate"} and "pair" in {member.record.kind for member in members.values()}


def test_another_type_of_an_equal_number_is_a_difference(tiny, tmp_path):
    """Its JSON is another, and so is the stage's key."""
    member = next(one for one in tiny[0].values() if one.record.kind == "prepare_data")
    config = {"rate": 1.0, "rates": [1, {}], "on": True, "same": 0.5}
    member = replace(member, record=member.record.model_copy(update={"config": config, "inputs": ()}))
    compiled = {"kind": "prepare_data", "version": member.record.version, "inputs": {}}
    compiled["config"] = {"rate": 1, "rates": [1, []], "on": 1, "same": 0.5}
    params = tmp_path / params_file(RECIPE)
    params.parent.mkdir(parents=True)
    params.write_text(yaml.safe_dump({member.name: compiled}))
    differences = identity_differences(Project(tmp_path), member)
    assert differences == ["on: true -> 1", "rate: 1.0 -> 1", "rates[1]: {} -> []"]


def placed(member, **placement):
    return replace(member, run=member.run.model_copy(update={"placement": placement}))


def test_recorded_numerics_become_the_profile_and_fit_this_machine(tiny, monkeypatch):
    members, _ = tiny
    monkeypatch.setattr(provenance, "hardware", lambda: {"cores": 1})
    written = profile(members)
    assert written["slots"] == 1
    assert all(stage["numerics"]["threads"] == 2 and stage["placement"]["slots"] == 1 for stage in written["stages"].values())


def test_products_of_bf16_are_not_imitated_on_a_machine_of_the_same_name_without_their_units(tiny, monkeypatch):
    monkeypatch.setattr(provenance, "hardware", lambda: {"cores": 2, "cpu": "that", "instruction_sets": ["avx2"]})
    made = {
        "numerics": {"device": "cpu", "bf16_products": "units"},
        "hardware": Hardware(cpu="that", instruction_sets=("avx2", "amx_bf16")),
    }
    members = {address: replace(member, run=member.run.model_copy(update=made)) for address, member in tiny[0].items()}
    assert {stage["numerics"]["bf16_products"] for stage in profile(members)["stages"].values()} == {"auto"}


@pytest.mark.parametrize(
    ("recorded", "cpu", "here", "asked"),
    [
        ("units", "that", False, "units"),  # it made them so then, with units or without
        ("units", "another", False, "auto"),
        ("fp32", "another", False, "fp32"),
        (None, "that", True, "units"),  # of code before the setting
        (None, "another", True, "auto"),
        (None, "that", False, None),  # which would refuse the setting
    ],
)
def test_products_of_bf16_are_computed_as_recorded_where_this_is_that_cpu(tiny, monkeypatch, recorded, cpu, here, asked):
    monkeypatch.setattr(provenance, "hardware", lambda: {"cores": 2, "cpu": cpu})
    numerics = {"device": "cpu", "threads": 1} | ({"bf16_products": recorded} if recorded else {})
    made = {"numerics": numerics, "hardware": Hardware(cpu="that")}
    members = {address: replace(member, run=member.run.model_copy(update=made)) for address, member in tiny[0].items()}
    assert {stage["numerics"].get("bf16_products") for stage in profile(members, here=here)["stages"].values()} == {asked}


def test_engines_get_the_slots_that_they_had_though_cores_are_fewer(tiny, monkeypatch):
    """A record made on hyper-threads, or before only whole cores were counted."""
    monkeypatch.setattr(provenance, "hardware", lambda: {"cores": 2})
    members = {address: placed(member, engines=2, slots=4) for address, member in tiny[0].items()}
    written = Execution.model_validate(profile(members))
    assert written.slots == 4
    for name in written.stages:
        assert engines_problem(*written.of(name, name)) is None
    hostile = {address: placed(member, slots=10**12) for address, member in tiny[0].items()}
    assert profile(hostile)["slots"] == MOST_PROCESSES


def test_a_lineage_with_a_hole_is_refused(tiny):
    members, _ = tiny
    *parents, root = members.values()
    left = {member.id: (member.record, member.run) for member in parents[1:]}
    with pytest.raises(UsageProblem, match="it lacks "):
        members_of(root.record, root.run, left, {})
