"""The pages that show results: `docs/benchmarks.md` and the lines in the README, made from `benchmarks/results/*.json`.

python -m benchmarks.table
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

from benchmarks import growth, label_noise
from benchmarks.decontamination import FOUND
from benchmarks.report import RESULTS
from benchmarks.training import AS_DOCUMENTED, MEMORY

ROOT = RESULTS.parents[1]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

HEAD = """# Benchmarks

Made by `python -m benchmarks.table` from `benchmarks/results`; `make bench` measures anew. Every reading is of two things measured in
turn on one machine, at least three times, and given as median [lowest, highest]. A ratio is the median of the runs' own ratios; above
1 is better here, also where less is better. A goal is held when the lowest ratio holds it. What misses its goal stands here too.

The training benchmarks run our stages and [TRL](https://github.com/huggingface/trl) in processes of their own, which take their
optimizer steps in turn over the same documents in the same order. *Useful tokens* are those of prompts and answers without padding,
each counted once per document on all sides, whether it was computed once or several times; a rate is of all counted steps together.
All sides compute in bf16 over fp32 weights with AdamW and without gradient checkpointing; loss and gradient norm of their first steps
must agree, or nothing is written. Memory is the most that the process ever held, from its first import on. TRL takes rows of similar
length side by side, as its documentation advises for a machine without flash-attention, and as many at once as are fastest. Its
packing is meant for flash-attention, and is left out. Our jobs set how glibc keeps memory and how idle threads wait; TRL's process is
given the same, and a second TRL, *as documented*, is not. A cached reference is computed before the first step on all sides. A GRPO
update trains on made answers, so that nobody's sampler is timed.

`sample` answers beside vLLM's own `LLM.generate`, with equal requests, settings and threads, all of the peer's at once, and stops the
clock when every answer is on the disk and read back; the peer keeps none. As documented, vLLM runs its engine in a process of its own,
which takes turns with the caller's on two cores; the other peer runs it in the caller's process, as our engine process does.

The state of the machine is that while a file's readings were taken: its load before, the share of its cores' time that the host gave
to others, and, for training, what it makes of products of bf16 matrices, before and after.
"""

ABOUT_STARTS = """
The start of a job is that of its process, up to the first forward pass of a tiny model, again with TRL and ours in turn. What a stage
costs besides its job is measured inside `pedigree run` on a chain of stages that do next to nothing.
"""
"""Said where `make bench` has measured them."""

ABOUT_DECONTAMINATION = """
## Decontamination

Rows that each tool would remove, in five draws that nobody had looked at while the rules were written: median [lowest, highest]. The items
are 1,319 questions of {}, and the clean problems others of the same source; those that are an item with other people or numbers, and one
other word in ten at most, are counted apart. Each copy stands in a row of its own, with a short reply; *in other words* is made by rules
for words and sentences. Ours has its defaults: 8-grams, more than half of an item's tokens, all turns, letters that look alike; strict, it
has 4-grams and more than 0.9, `typos`, `abstracted` and `cut_short` ([recipes.md](recipes.md#copies-in-disguise)); embedded, it removes
besides what is alike by vectors, which is only told unless a recipe says so. AI2's `decon` has its defaults but for 0.5 of the questions
without answers, and `datatrove` removes what shares one n-gram of 8 or 13 words; both are given all turns as one text.
"""

ABOUT_GROWTH = """
## Rows and their cost

Whole jobs by two processes, from start to end: median [lowest, highest]. Chat rows of about 1,300 characters, one in two hundred twice and
one nearly, are read from JSONL, put into records, filtered, freed of exact and near duplicates, validated, shuffled and written
(`prepare_data`); then compared with forty benchmarks of 500 made problems each (`decontaminate`). Answers, four to a prompt, are verified
(`judge`); the best of each prompt becomes a conversation (`best_answers`), and prompts with both right and wrong answers are kept
(`select_prompts`, among as many prompts as there are answers). As many prompts get constraints (`constrain`), and as many judged answers
become pairs (`pair`). These take one process. Memory is the most that all processes held together, pages of files apart. The largest data
are made a second time, by one process after a try by three that was killed: the bytes are the same.
"""

ABOUT_NOISE = """
## Wrong labels

What it costs to exchange the answers of a share ε of the pairs, and what wins some of it back. Measured is the share of clean, held-out
pairs that a policy orders rightly, over {} seeds: median [lowest, highest]. Sums of two digits are judged by the verifier, paired with
`label_noise`, and learnt by a model of random weights. `cdpo` and `robust` are told ε, and are DPO where it is 0. *Suspects left out* is
DPO once more without the share ε of the pairs that the first policy contradicts most; the last row is the probability that an exchanged
pair has a smaller margin under that policy than one that is not (a coin: 0.5). A small task and a small model: it says in which direction
things go, and not how far.
"""

ALIKE = "products of matrices, which both sides compute alike, are about 60 % of a step of our SFT"
"""Measured with torch's profiler: two steps on an idle machine."""
PADDED = ALIKE + ", and rows of one length beside each other leave TRL {} of its tokens to padding"
SHARED = ALIKE + ", and sharing prompts saves {} of the tokens"
"""Counted in the documents of the workload."""
WHY_MISSED = {
    "tokenising, against each row alone": "cutting texts into words and rendering the template are a fifth each of what is left",
    "SFT, SmolLM2-135M": PADDED.format("4 %"),
    "SFT, 20M Llama": PADDED.format("2 %"),
    "SFT in bf16 through fp32 over dtype fp32": "the machine fell to 60 % of its speed during one of the three runs; the median meets it",
    "Reward model, SmolLM2-135M": SHARED.format("18 %"),
    "Reward model, 20M Llama": SHARED.format("18 %"),
    "DPO, SmolLM2-135M": SHARED.format("14 %"),
    "DPO, 20M Llama": SHARED.format("18 %"),
    "GRPO update, SmolLM2-135M": SHARED.format("31 %"),
    "GRPO update, 20M Llama": SHARED.format("22 %"),
}
"""Said beside the settings of a reading that misses its goal."""


def rows() -> list[dict[str, Any]]:
    """All readings, in the order of files and within them."""
    return [row for path in sorted(RESULTS.glob("*.json")) for row in json.loads(path.read_text())]


def number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


def interval(values: dict[str, float], form: Callable[[float], str]) -> str:
    return f"{form(values['median'])} [{form(values['low'])}, {form(values['high'])}]"


def missed(row: dict[str, Any]) -> bool:
    """Whether the worst run is below the goal."""
    return row["goal"] is not None and row["ratio"]["low"] < row["goal"]


def verdict(row: dict[str, Any]) -> str:
    if row["goal"] is None:
        return ""
    return f"{row['goal']:g}, missed" if missed(row) else f"{row['goal']:g}"


def machine(row: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(row["versions"].items()))
    return f"{processors(row['hardware'])}; {versions}; {row['date']}"


def processors(hardware: dict[str, Any]) -> str:
    return ", ".join(hardware.get("gpus", ())) or f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']:g} GiB"


def table(readings: list[dict[str, Any]]) -> str:
    lines = ["| reading | ours | peer | unit | ratio | goal |", "|---|---|---|---|---|---|"]
    for row in readings:
        ratio = row["ratio"]
        times = f"**{ratio['median']:.2f}** [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        cells = (row["name"], interval(row["ours"], number), interval(row["peer"], number), row["unit"], times, verdict(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def details(readings: list[dict[str, Any]]) -> str:
    """Settings and agreement of each reading that says them, and where it was measured."""
    lines = []
    for row in readings:
        notes = row["notes"]
        said = [notes["setting"]] if "setting" in notes else []
        if "apart" in notes:
            ours, theirs = notes["first_ours"], notes["first_peer"]
            said.append("first step " + ", ".join(f"{name.replace('_', ' ')} {ours[name]:.4f} and {theirs[name]:.4f}" for name in ours))
            said.append(f"{notes['useful_tokens']} useful tokens in {notes['steps']} steps of each of {len(row['runs']['ours'])} runs")
            said.append(state(row["machine"]))
            said += [f"missed because {WHY_MISSED[row['name']]}"] if missed(row) and row["name"] in WHY_MISSED else []
            lines.append(f"- {row['name']}: {'; '.join(said)}.")
        elif "text" in notes:
            why = f"; missed because {WHY_MISSED[row['name']]}" if missed(row) and row["name"] in WHY_MISSED else ""
            lines.append(f"- {row['name']}: {notes['text']}; {state(row['machine'])}{why}.")
    places = dict.fromkeys(machine(row) for row in readings)
    return "\n".join(lines) + "\n\nMeasured on: " + "; and on: ".join(places) + ".\n"


def state(machine: dict[str, Any]) -> str:
    before, after = machine.get("matrix_gflops", (None, None))
    matrices = f", {before} and {after} GFLOP/s in matrices" if before else ""
    return f"load {machine['load_before']:g} before, {machine['stolen']:.1%} given to others{matrices}"


def page() -> str:
    readings = rows()
    starts = ABOUT_STARTS if any(row["name"].startswith("start of") for row in readings) else ""
    studies = decontamination() + growing() + wrong_labels()
    return f"{HEAD}{starts}\n## Results\n\n{table(readings)}\n## Settings\n\n{details(readings)}{studies}"


def decontamination() -> str:
    """What each tool finds of copies in each disguise, and loses of what is clean; nothing where it was not measured."""
    if not FOUND.exists():
        return ""
    seen = json.loads(FOUND.read_text())
    tools = list(seen["found"])
    lines = ["| disguise | of | " + " | ".join(tools) + " |", "|---|---|" + "---|" * len(tools)]
    for kind, of in seen["of"].items():
        cells = [_ranged(counts) for counts in (of, *(seen["found"][tool][kind] for tool in tools))]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    starts = ", ".join(f"{tool} {interval(took, number)}" for tool, took in seen["start"].items())
    return ABOUT_DECONTAMINATION.format(seen["source"]) + "\n" + "\n".join(lines) + f"\n\nCPU-seconds of the start: {starts}.\n"


def _ranged(counts: Sequence[int]) -> str:
    """Median [lowest, highest]; one number where all are the same."""
    low, middle, high = min(counts), median_low(counts), max(counts)
    return str(low) if low == high else f"{middle} [{low}, {high}]"


def growing() -> str:
    """What the stages of data take as rows grow in number; nothing where it was not measured."""
    if not growth.FOUND.exists():
        return ""
    seen = json.loads(growth.FOUND.read_text())
    lines = ["| stage | rows | seconds | CPU-seconds | rows per CPU-second | MiB |", "|---|---|---|---|---|---|"]
    for stage, sized in seen["stages"].items():
        for size, costs in sorted(sized.items(), key=lambda one: int(one[0])):
            cells = (interval(costs[name], number) for name in ("seconds", "cpu_seconds", "rows_per_cpu_second", "mib"))
            lines.append(f"| `{stage}` | {number(int(size))} | " + " | ".join(cells) + " |")
    places: dict[str, list[str]] = {}
    for stage, told in seen["measured"].items():
        places.setdefault(f"{processors(told['hardware'])}, {state(told['machine'])}, {told['date']}", []).append(f"`{stage}`")
    where = "; ".join(f"{', '.join(stages)} on {place}" for place, stages in places.items())
    return ABOUT_GROWTH + "\n" + "\n".join(lines) + f"\n\nMeasured: {where}.\n"


def wrong_labels() -> str:
    """What each loss makes of wrong labels; nothing where it was not measured."""
    if not label_noise.FOUND.exists():
        return ""
    seen = json.loads(label_noise.FOUND.read_text())
    shares = list(seen["found"])
    lines = ["| | " + " | ".join(f"ε = {share}" for share in shares) + " |", "|---|" + "---|" * len(shares)]
    names = dict.fromkeys(name for share in reversed(shares) for name in seen["found"][share])  # the last ones have all of them
    for name in sorted(names, key=lambda name: name == label_noise.TOLD_APART):  # which is of another kind
        cells = (seen["found"][share].get(name) for share in shares)
        lines.append(f"| {name} | " + " | ".join(interval(cell, number) if cell else "" for cell in cells) + " |")
    where = f"{processors(seen['hardware'])}, {state(seen['machine'])}"
    return ABOUT_NOISE.format(seen["seeds"]) + "\n" + "\n".join(lines) + f"\n\nMeasured on {where}.\n"


def readme_lines() -> str:
    """What every run of a task held, of speed and memory, one line a task."""
    readings = {row["name"]: row for row in rows()}
    lines = []
    for name in readings:
        documented, memory = readings.get(f"{name}, {AS_DOCUMENTED}"), readings.get(f"{name}, {MEMORY}")
        if documented and memory:
            tuned, as_documented = (down(row["ratio"]["low"]) for row in (readings[name], documented))
            share = math.ceil(100 / memory["ratio"]["low"]) / 100
            lines.append(f"- {name}: {tuned} × ({as_documented} × as documented), {share:.2f} × its peak memory")
    return "\n".join(lines)


def down(ratio: float) -> str:
    """Rounded to what is held."""
    return f"{math.floor(10 * ratio) / 10:.1f}"


def with_lines(readme: str) -> str:
    """The README with today's lines between its marks."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{readme_lines()}\n{END}", readme, flags=re.DOTALL)


def main() -> None:
    PAGE.write_text(page())
    README.write_text(with_lines(README.read_text()))


if __name__ == "__main__":
    main()
