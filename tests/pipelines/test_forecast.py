"""How long a run takes on this machine: from the measured rate of its cores, before and while it runs."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handmade import made_at, project_at, ran_here

from pedigree.configs.language.execution import Execution, Machine, Numerics
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.methods.language_model import asks_endpoint
from pedigree.configs.rows.source_models import HubModel
from pedigree.data.host.machine import settled
from pedigree.pipelines.cli import plan as planning
from pedigree.pipelines.cli.progress import StatusLine, measured_by
from pedigree.pipelines.estimate import flops, rates
from pedigree.pipelines.estimate.amounts import packaged_rows
from pedigree.pipelines.estimate.estimates import CPU_START_S, MEASURED, Estimates, Time, document_of
from pedigree.pipelines.estimate.machines import hardware_of
from pedigree.pipelines.estimate.rates import Rates
from pedigree.pipelines.estimate.schedule import Forecast, Task, TimeLeft, makespan, outlook
from pedigree.pipelines.estimate.shapes import KNOWN
from pedigree.pipelines.run.opening import load_execution

MADE = Rates(fp32=50e9, bf16=5e9, bandwidth=1e10)
STARTERS = Path(__file__).resolve().parents[2] / "configs" / "starters"
SMOLLM = KNOWN["HuggingFaceTB/SmolLM2-135M"]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "cache" / "rates.json"
    monkeypatch.setattr(rates, "_place", lambda: path)
    return path


# --- the machine -------------------------------------------------------------------------------------------------------


def test_products_of_bf16_are_as_fast_as_the_way_they_are_computed():
    assert MADE.of("fp32", "fp32") == MADE.of("fp32", "units") == MADE.of("bf16", "fp32") == 50e9
    assert MADE.of("bf16", "units") == 5e9  # what a profile asks for, though it is slow here


def test_a_limit_of_onednn_is_measured_for_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    free = rates._place()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert free is not None and rates._place() != free


def test_threads_are_a_little_less_than_so_many_times_as_fast():
    # Amdahl's law with 0.06 of a step in one thread: 1 / (0.06 + 0.94 / 8) = 5.63
    assert flops.speedup(1) == 1 and flops.speedup(8) == pytest.approx(1 / (0.06 + 0.94 / 8))
    eight, numerics = replace(hardware_of("cpu", Machine()), cores=8), Numerics(threads=8, bf16_products="fp32")
    hardware = eight.at(MADE, "bf16", numerics)
    assert hardware.peak == pytest.approx(5.634 * 50e9, rel=1e-3) and hardware.utilization == flops.CPU_UTILIZATION
    assert hardware.bandwidth_utilization == 1
    for cores, ranks, working in ((2, 1, 2), (8, 2, 4), (1, 1, 1), (2, 4, 1)):  # as many threads as there are cores for
        shared = replace(eight, cores=cores).at(MADE, "bf16", numerics, ranks)
        assert shared.peak == pytest.approx(flops.speedup(working) * 50e9)
    said = hardware_of("cpu", Machine(utilization=0.25, bandwidth_utilization=0.5)).at(MADE, "bf16", Numerics())
    assert (said.utilization, said.bandwidth_utilization) == (0.25, 0.5)


def test_answers_are_computed_no_faster_than_their_operations():
    # 256 requests that run together, 10 tokens each of 2 · 134,515,008 operations, on 10¹¹ a second of which half is reached; reading the
    # weights ten times at 10¹² bytes a second would take no 3 ms
    told = {"requests": 256, "together": 256, "prompt": 0, "computed": 0, "answer": 10, "size": 2, "ranks": 1}
    told |= {"peak": 1e11, "utilization": 0.5}
    found = flops.generation(SMOLLM, **told, bandwidth=1e12)
    assert found == pytest.approx(2560 * 2 * SMOLLM.multiplied / 5e10, rel=0.01)


def test_rates_are_measured_once_in_a_process_of_their_own(place, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('what lies in the folder where somebody plans is not imported')")
    monkeypatch.chdir(tmp_path)
    assert rates.known() is None
    found = rates.measured()
    assert found is not None and 1e8 < found.fp32 < 1e13 and 1e7 < found.bf16 < 1e13 and 1e8 < found.bandwidth < 1e13
    assert rates.known() == found
    place.write_text(MADE.model_dump_json())
    assert rates.measured() == MADE


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fp32": 1e9}', '{"fp32": 0, "bf16": 1e9, "bandwidth": 1e9}'])
def test_a_damaged_measurement_is_none(place, text):
    place.parent.mkdir()
    place.write_text(text)
    assert rates.known() is None


def test_without_torch_nothing_is_known(place, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert rates.measured() is None and not place.exists()


# --- side by side ------------------------------------------------------------------------------------------------------


def test_stages_run_side_by_side_while_their_slots_fit():
    tasks = {"a": Task(10), "b": Task(4), "c": Task(3, parents=["b"]), "d": Task(5, slots=2, parents=["a", "c"])}
    assert makespan(tasks, 2) == 15  # a beside b and c, then d alone
    assert makespan(tasks, 1) == 22  # one after another, and d takes what there is
    assert makespan({}, 2) == 0


def test_a_stage_waits_for_what_it_is_made_from_though_slots_are_free():
    assert makespan({"b": Task(4), "c": Task(3, parents=["b"])}, 2) == 7


def test_a_stage_waits_for_slots_that_another_one_holds():
    tasks = {"large": Task(10, slots=2), "small": Task(1), "next": Task(1)}
    assert makespan(tasks, 3) == 10  # one beside the large one, and then the other
    assert makespan(tasks, 2) == 11


# --- a recipe ----------------------------------------------------------------------------------------------------------


def demo(folder: Path) -> Estimates:
    project = project_at(folder)
    graph, execution = load_recipe(project.recipes, "demo"), load_execution(project, "cpu")
    numerics = execution.numerics.model_copy(update={"bf16_products": "fp32"})  # otherwise the processor decides
    return Estimates(project, graph, execution.model_copy(update={"numerics": numerics}), lambda: MADE)


def profiled(execution: Execution) -> dict[str, Any]:
    """The numerics of a profile as runs record them."""
    return settled(execution.of("", "")[0]).model_dump(mode="json")


def test_every_stage_of_the_demo_has_a_time_before_anything_has_run(tmp_path):
    estimates = demo(tmp_path)
    for node in estimates.graph.nodes.values():
        time = estimates.of(node).time
        assert time is not None and time.seconds >= CPU_START_S["none"], node.name
    sft = estimates.of(estimates.graph.find("sft"))
    assert sft.amounts.tokens and sft.time and sft.facts and sft.time.how == MEASURED
    operations = flops.training(sft.facts.policy, sft.amounts.document.value, checkpointing=False) * sft.amounts.tokens.value  # pyright: ignore[reportOptionalMemberAccess]
    # half of the bound of its rows, on two threads
    assert sft.time.seconds == pytest.approx(CPU_START_S["deepspeed"] + operations / 2 / (0.6 * 2 / 1.06 * 50e9))


def test_a_machine_twice_as_fast_computes_in_half_the_time(tmp_path):
    estimates = demo(tmp_path)
    faster = Estimates(estimates.project, estimates.graph, estimates.execution, lambda: Rates(fp32=100e9, bf16=5e9, bandwidth=2e10))
    for name in ("sft", "sample_0", "dpo_1", "rlvr", "scores"):
        node = estimates.graph.find(name)
        slow, fast = (found.of(node).time.seconds - CPU_START_S[node.declaration.engine] for found in (estimates, faster))  # pyright: ignore[reportOptionalMemberAccess]
        assert slow == pytest.approx(2 * fast), name


def test_without_rates_times_of_stages_with_models_are_unknown(tmp_path):
    estimates = demo(tmp_path)
    estimates.rates = lambda: None
    times = {address: estimates.of(node).time for address, node in estimates.graph.nodes.items()}
    found = outlook(estimates.graph, estimates.execution, times)
    assert found.unknown > 5 and found.seconds > 0
    assert planning.time_text(found, "cpu").endswith(f", plus {found.unknown} stages with no time estimate")


def test_a_measurement_that_fails_is_not_begun_again(tmp_path):
    begun = []
    estimates = demo(tmp_path)
    estimates.rates = lambda: begun.append("measured")
    assert all(estimates.of(estimates.graph.find(name)).time is None for name in ("sft", "dpo_1", "rlvr")) and begun == ["measured"]


def test_how_bf16_is_multiplied_decides_the_time(tmp_path):
    estimates = demo(tmp_path)
    for name in ("sft", "sample_0"):
        node = estimates.graph.find(name)
        numerics, placement = estimates.execution.of(node.kind, node.name)
        units, through = (
            estimates.under(node, numerics.model_copy(update={"bf16_products": way}), placement).time.seconds  # pyright: ignore[reportOptionalMemberAccess]
            for way in ("units", "fp32")
        )
        assert units > 3 * through, name


def test_an_engine_reads_weights_of_four_bytes_where_bf16_goes_through_fp32(tmp_path):
    estimates = demo(tmp_path)
    estimates.rates = lambda: Rates(fp32=1e18, bf16=1e18, bandwidth=1e6)
    node = estimates.graph.find("sample_0")
    numerics, placement = estimates.execution.of(node.kind, node.name)
    start = CPU_START_S["vllm"]
    units, through = (estimates.under(node, numerics.model_copy(update={"bf16_products": way}), placement) for way in ("units", "fp32"))
    assert units.time and through.time and through.time.seconds - start == pytest.approx(2 * (units.time.seconds - start))
    narrow, wide = (document_of(found)["memory"]["engine"] for found in (units, through))
    for term in ("weights", "kv_cache", "least_kv_cache", "room_for_kv_cache"):
        assert wide[term] == 2 * narrow[term], term


def test_what_nobody_knows_the_speed_of_has_no_time(tmp_path):
    """Servers, downloads, and data whose rows are not known."""
    project = project_at(tmp_path)
    graph, execution = load_recipe(project.recipes, "tulu3_data"), load_execution(project, "cpu")
    estimates = Estimates(project, graph, execution, lambda: MADE)
    for node in graph.nodes.values():
        time, rows = estimates.of(node).time, estimates.of(node).amounts.rows
        known = rows is not None and not asks_endpoint(node.config)
        assert (time is not None) == known, node.name
    assert sum(asks_endpoint(node.config) for node in graph.nodes.values()) >= 3


def test_how_long_a_download_takes_nobody_knows(tmp_path):
    estimates = demo(tmp_path)
    base = next(node for node in estimates.graph.nodes.values() if node.kind == "source_model")
    source = HubModel(type="hub", repo="meta-llama/Llama-3.1-8B", revision="0" * 40)
    there = replace(base, config=base.config.model_copy(update={"source": source}))
    assert estimates.of(base).time == Time(CPU_START_S["torch"], "the startup time")
    assert estimates.under(replace(there, name="other"), *estimates.execution.of("source_model", "other")).time is None


def test_rows_of_a_packaged_file_are_counted_as_far_as_filters_let_them_pass(tmp_path):
    project = project_at(tmp_path)
    (project.recipes / "dpo.yaml").write_text(STARTERS.joinpath("dpo.yaml").read_text())
    estimates = Estimates(project, load_recipe(project.recipes, "dpo"), load_execution(project, "cpu"), lambda: MADE)
    short = sum(len(text) <= 600 for text in packaged_rows("dpo-en-demo"))
    assert 0 < short < 200
    amounts = estimates.of(estimates.graph.find("preferences")).amounts
    assert amounts.rows is not None and amounts.rows.value == 100 + short


def test_a_reward_model_computes_a_prompt_once_for_all_its_answers(tmp_path):
    estimates = demo(tmp_path)
    sampled, judged = (estimates.of(estimates.graph.find(name)).amounts for name in ("sample_1", "judge_1"))
    assert judged.rows and judged.document and judged.tokens and sampled.prompt
    alone = judged.document.value - sampled.prompt.value
    assert judged.rows.value == 4 * 176  # four answers to each of 176 prompts
    assert judged.tokens.value == pytest.approx(176 * sampled.prompt.value + 704 * alone)


def test_what_has_ended_tells_how_long_the_rest_takes(tmp_path, monkeypatch, place):
    project, graph = made_at(tmp_path)
    execution = load_execution(project, "cpu")
    due = {node.address for node in graph.nodes.values() if node.kind == "preference_train"}
    forecast = Forecast(project, graph, execution)
    assert forecast.left(frozenset(), due, lambda address, whole: None).unknown == len(due)  # they ran on another machine
    ran_here(project, profiled(execution), monkeypatch)
    assert forecast.left(frozenset(), due, lambda address, whole: None).unknown == len(due)  # nothing has ended since
    found = forecast.left(frozenset({"x"}), due, lambda address, whole: None)
    assert found == TimeLeft(125.0 * len(due), 0, "its last run")
    assert forecast.left(frozenset({"x"}), due, lambda address, whole: 5.0).seconds == 5.0 * len(due)


def test_what_has_run_on_such_a_machine_tells_the_time_of_what_will_run(tmp_path, monkeypatch, place):
    project, graph = made_at(tmp_path)
    execution = load_execution(project, "cpu")
    dpo = graph.find("dpo_1")
    assert Estimates(project, graph, execution).of(dpo).time is None  # they ran on another machine
    ran_here(project, profiled(execution), monkeypatch)
    estimates = Estimates(project, graph, execution)
    assert estimates.of(dpo).time == Time(125, "its last run")
    other = estimates.from_scratch(dpo).time
    assert other is not None and other.how == "finished preference_train stages on the same hardware"
    # dpo_2, from which the speed is, has rows of its own: time goes with the tokens
    tokens = [amount.value for name in ("dpo_1", "dpo_2") if (amount := estimates.of(graph.find(name)).amounts.tokens)]
    assert other.seconds == pytest.approx(125 * tokens[0] / tokens[1], rel=0.05)


def test_a_speed_is_another_ones_only_under_the_same_settings(tmp_path, monkeypatch, place):
    project, graph = made_at(tmp_path)
    execution = load_execution(project, "cpu")
    dpo, (numerics, placement) = graph.find("dpo_1"), execution.of("preference_train", "dpo_1")
    ran_here(project, profiled(execution), monkeypatch)
    estimates = Estimates(project, graph, execution)
    assert estimates.under(dpo, numerics, placement).time is not None
    other_way = "fp32" if settled(numerics).bf16_products == "units" else "units"
    changes = {"tensor_parallel": 2, "offload_optimizer": True, "deterministic": not numerics.deterministic, "bf16_products": other_way}
    for field, value in (changes | {"threads": 1}).items():
        assert estimates.under(dpo, numerics.model_copy(update={field: value}), placement).time is None, field
    ran_here(project, numerics.model_dump(mode="json", exclude={"bf16_products"}), monkeypatch)
    estimates = Estimates(project, graph, execution)  # of runs before there was a choice, which multiplied bf16 by units
    for way, known in (("units", True), ("fp32", False)):
        assert (estimates.under(dpo, numerics.model_copy(update={"bf16_products": way}), placement).time is not None) == known, way


def test_engines_of_the_profile_are_no_matter_where_none_is_opened(tmp_path, monkeypatch, place):
    """A profile may say for all stages how many there are."""
    project, graph = made_at(tmp_path)
    execution = load_execution(project, "cpu")
    ran_here(project, profiled(execution), monkeypatch)
    estimates = Estimates(project, graph, execution)
    numerics, placement = execution.of("", "")
    several = placement.model_copy(update={"engines": 4, "slots": 8})
    drawn = next(node for node in graph.nodes.values() if node.kind == "sample")
    for node, known in ((graph.find("dpo_1"), True), (drawn, False)):
        assert estimates.under(node, numerics, placement).time is not None
        assert (estimates.under(node, numerics, several).time is not None) == known


def test_rows_that_a_judge_without_a_model_read_say_nothing_of_one_with_a_model(tmp_path, monkeypatch):
    project, graph = made_at(tmp_path, "demo")
    execution = load_execution(project, "cpu")
    ran_here(project, profiled(execution), monkeypatch)
    estimates = Estimates(project, graph, execution)
    found = estimates.from_scratch(graph.find("judge_1")).time
    assert found is not None and found.how == "finished judge stages on the same hardware"
    assert found.seconds == pytest.approx(125.0, rel=0.2)  # nearly as judge_2


# --- in words ----------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_it_takes_of_the_machine_and_how_long(tmp_path, monkeypatch):
    estimates = demo(tmp_path)
    monkeypatch.setattr(planning, "this_cpu", lambda: ("A processor", 2))
    monkeypatch.setattr(planning, "this_memory", lambda: int(22.9 * 2**30))
    assert planning.machine_text(estimates.execution) == "2 cores, 22.9 GiB: 2 slots, 2 threads per job"
    found = TimeLeft(840.0, how=MEASURED)
    assert planning.time_text(found, "cpu") == f"about 14 minutes on this machine, estimated from {MEASURED}"
    assert not planning.slow_text(found, "cpu")
    assert "`pedigree run tiny`" in planning.slow_text(replace(found, seconds=4000.0), "cpu")
    assert not planning.slow_text(replace(found, seconds=4000.0), "cuda")


def test_whoever_has_to_measure_says_so(place, monkeypatch):
    told = []

    class Listening(StatusLine):
        def __call__(self, words: str) -> None:
            told.append(words)

    place.parent.mkdir()
    place.write_text(MADE.model_dump_json())
    assert measured_by(Listening())() == MADE and not told
    place.unlink()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    measured_by(Listening())()
    assert "measuring this machine's matmul speed" in told[0]


def test_the_order_of_a_recipe_is_kept(tmp_path):
    estimates = demo(tmp_path)
    graph, execution = estimates.graph, estimates.execution
    times = {address: estimates.of(node).time for address, node in graph.nodes.items()}
    found = outlook(graph, execution, times)
    whole = sum(time.seconds for time in times.values() if time)
    longest = max(time.seconds for time in times.values() if time)
    assert longest < found.seconds < whole  # stages that read rows run two at a time
