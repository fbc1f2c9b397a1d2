"""The training benchmark compares equal work, and says what it measured."""

import json
from dataclasses import replace

import pytest

from benchmarks import report, table
from benchmarks.pacing import Laps, race
from benchmarks.training import prepare, readings_of, speed, tokens_per_step, workers
from benchmarks.workloads import WORKLOADS, Workload, drawn

FIRST = {"loss": 2.0, "grad_norm": 1.0}
TINY = Workload("sft", "llama-tiny", 256, 4, 3, 2, "tiny", 1.0)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [{}, {"task": "rlvr", "group": 4}, {"task": "preference_train", "max_length": 768}],
    ids=["sft", "rlvr", "preferences"],
)
def test_both_sides_do_the_same_work(tmp_path, changes):
    """Rows, order, masks, reduction and model: if one of them differed, so would the gradient of the first step."""
    workload = replace(TINY, tolerance=1e-3, **changes)
    prepare(workload, tmp_path)
    run = race(workers(workload, tmp_path), workload.steps)
    fast, documented, memory = readings_of(workload, tokens_per_step(workload, tmp_path), [run] * 3)
    assert fast.notes["apart"]["grad_norm"] < 5e-3 and min(*fast.ours, *fast.peer, *documented.peer) > 0
    assert 0.1 < min(*memory.ours, *memory.peer) and max(*memory.ours, *memory.peer) < 4
    units = json.loads((tmp_path / "units.json").read_text())
    assert fast.notes["useful_tokens"] == sum(len(doc["ids"]) for unit in units[4:] for doc in unit)


def laps(*seconds: float, peak_gib: int = 1, **first: float) -> Laps:
    return Laps(list(seconds), FIRST | first, peak_gib << 30)


def test_a_run_is_of_all_steps_after_warming_up():
    assert speed(laps(50, 2, 1, 1), [100, 300, 60, 40], warmup=1) == 400 / 4


def test_a_reading_is_of_several_runs_and_its_ratio_of_each_of_them():
    """Twice as fast on a quiet day, on a slow one, and four times when the peer alone was disturbed."""
    seconds = [(1.0, 2.0), (2.0, 4.0), (1.0, 4.0)]
    runs = [
        {"ours": laps(9, a, a, peak_gib=1), "tuned": laps(9, b, b, peak_gib=2), "documented": laps(9, 4 * b, 4 * b)} for a, b in seconds
    ]
    fast, documented, memory = readings_of(TINY, [7, 100, 100], runs)
    assert (list(fast.ours), list(fast.peer)) == ([100, 50, 100], [50, 25, 25])
    assert (fast.ratio.median, fast.ratio.low, fast.ratio.high) == (2, 2, 4)
    assert documented.ratio.low == 8 and memory.ratio == (2, 2, 2)


def test_fewer_runs_are_no_reading():
    with pytest.raises(ValueError, match="2 runs of ours and 2 of the peer: a reading is 3 of each"):
        report.Reading("fast", [1.0, 1.0], [1.0, 1.0], "s")
    with pytest.raises(ValueError, match="4 runs of ours and 3 of the peer"):
        report.Reading("fast", [1.0] * 4, [1.0] * 3, "s")


@pytest.mark.parametrize("side", ["ours", "tuned", "documented"])
@pytest.mark.parametrize("run", [0, 2])
def test_unequal_work_is_no_reading_in_whichever_run(side, run):
    runs = [{name: laps(1, 1, 1) for name in ("ours", "tuned", "documented")} for _ in range(3)]
    runs[run][side] = laps(1, 1, 1, loss=2.1)
    with pytest.raises(SystemExit, match="the sides do not train the same"):
        readings_of(TINY, [10] * 3, runs)


def test_rows_are_drawn_in_whole_batches_of_similar_length():
    lengths = [(37 * i) % 101 + 5 for i in range(200)]
    rows = drawn(200, 24, 8, lengths)
    assert len(set(rows)) == 24
    padded = sum(8 * max(lengths[row] for row in rows[k : k + 8]) for k in (0, 8, 16))
    assert padded < 1.3 * sum(lengths[row] for row in rows)  # 1.7 in random order
    assert len(set(drawn(50, 20, 4, None))) == 20


def test_every_workload_can_be_cut_evenly():
    for name, workload in WORKLOADS.items():
        assert workload.global_batch * workload.group % workload.peer_batch == 0 and workload.warmup < workload.steps, name
    assert len({workload.title for workload in WORKLOADS.values()}) == len(WORKLOADS)


def test_the_table_claims_what_the_worst_run_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    runs = [
        {"ours": laps(1, 2, 2, peak_gib=2), "tuned": laps(1, peer, peer, peak_gib=3), "documented": laps(1, 8, 8)} for peer in (3.1, 3, 4)
    ]
    machine = report.Watch().read() | {"matrix_gflops": [250, 240]}
    report.write("training-sft", readings_of(replace(TINY, goal=1.52), [300] * 3, runs), ("torch",), machine)
    assert "| tiny | 150 [150, 150] | 96.8 [75, 100] | useful tokens/s | **1.55** [1.50, 2.00] | 1.52, missed |" in table.page()
    assert "0.0% given to others, 250 and 240 GFLOP/s in matrices" in table.page().replace("1.0%", "0.0%")
    monkeypatch.setattr(table, "WHY_MISSED", {"tiny": "it is a test"})
    assert "useful tokens in 2 steps of each of 3 runs; " in table.page() and "; missed because it is a test." in table.page()
    assert table.readme_lines() == "- tiny: 1.5 × (4.0 × as documented), 0.67 × its peak memory"
    assert table.with_lines("a\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\nb").splitlines()[2] == table.readme_lines()


def test_every_reading_below_its_goal_says_why():
    missed = [row["name"] for row in table.rows() if table.missed(row)]
    assert set(missed) <= set(table.WHY_MISSED)


def test_a_watch_counts_what_the_host_gave_to_others(monkeypatch):
    ticks = iter([(1000, 10), (3000, 60)])
    monkeypatch.setattr(report, "cpu_ticks", lambda: next(ticks))
    assert report.Watch().read()["stolen"] == 0.025
