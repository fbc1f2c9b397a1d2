"""The pages that show results: `docs/benchmarks.md` and the lines in the README, made from `benchmarks/results/*.json`.

python -m benchmarks.table
"""

import json
import re
from typing import Any

from benchmarks.report import RESULTS

ROOT = RESULTS.parents[1]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

HEAD = """# Benchmarks

Made by `python -m benchmarks.table` from `benchmarks/results`; `make bench` measures anew. Every ratio is of two things measured in
one run on one machine; above 1 is better here, also where less is better. What misses its goal stands here too.

The training benchmarks run our stages and [TRL](https://github.com/huggingface/trl) in processes of their own, which take their
optimizer steps in turn over the same documents in the same order. *Useful tokens* are those of prompts and answers without padding,
each counted once per document on both sides, whether it was computed once or several times; a rate is of all counted steps together,
and the ratio in the median step stands among the settings. Both sides compute in bf16 over fp32
weights with AdamW and without gradient checkpointing; loss and gradient norm of their first steps must agree, or nothing is written.
Memory is the most that the process ever held, from its first import on. TRL is configured as its documentation advises for a machine
without flash-attention: rows of similar length side by side. Its packing is meant for flash-attention, and is left out. Our
jobs also set how glibc keeps memory and how idle threads wait; a reading of its own lends TRL's process the same settings. A cached
reference is computed before the first step on both sides. A GRPO update trains on made answers, so that nobody's sampler is timed.

The start of a job is that of its process, up to the first forward pass of a tiny model, again with TRL and ours in turn. What a stage
costs besides its job is measured inside `pedigree run` on a chain of stages that do next to nothing.
"""

WHY_MISSED = {
    "Reward model, 20M Llama": "two pairs a pass are TRL's fastest setting here, and a reward model has no vocabulary to save work on",
    "SFT, 20M Llama": "TRL takes small passes of rows of one length almost without padding, and much of a step of so small a model is "
    "operations that both sides do alike",
    "SFT, SmolLM2-135M, peer with our allocator and threads": "TRL is nearly twice as fast with them (its other readings are without)",
}
"""Said beside the settings of a reading that misses its goal."""


def rows() -> list[dict[str, Any]]:
    """All readings, in the order of files and within them."""
    return [row for path in sorted(RESULTS.glob("*.json")) for row in json.loads(path.read_text())]


def number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


def verdict(row: dict[str, Any]) -> str:
    goal = row.get("goal")
    if goal is None:
        return ""
    return f"{goal:g}" if row["ratio"] >= goal else f"{goal:g}, missed"


def machine(row: dict[str, Any]) -> str:
    hardware, versions = row["hardware"], row["versions"]
    what = ", ".join(hardware.get("gpus", ())) or f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']:g} GiB"
    return f"{what}; {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}; {row['date']}"


def table(readings: list[dict[str, Any]]) -> str:
    lines = ["| reading | ours | peer | unit | ratio | goal |", "|---|---|---|---|---|---|"]
    for row in readings:
        cells = (row["name"], number(row["ours"]), number(row["peer"]), row["unit"], f"**{row['ratio']:.2f}**", verdict(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def details(readings: list[dict[str, Any]]) -> str:
    """Settings and agreement of each reading that says them, and where it was measured."""
    lines = []
    for row in readings:
        notes = row.get("notes", {})
        missed = row.get("goal") is not None and row["ratio"] < row["goal"]
        said = [notes["setting"]] if "setting" in notes else []
        if "apart" in notes:
            ours, theirs = notes["first_ours"], notes["first_peer"]
            said.append("first step " + ", ".join(f"{name.replace('_', ' ')} {ours[name]:.4f} and {theirs[name]:.4f}" for name in ours))
            said.append(f"{notes['useful_tokens']} useful tokens in {notes['steps']} steps")
            said.append(f"ratio of the median step {notes['median_ratio']:.2f}")
            said += [f"missed because {WHY_MISSED[row['name']]}"] if missed and row["name"] in WHY_MISSED else []
            lines.append(f"- {row['name']}: {'; '.join(said)}.")
        elif "text" in notes:
            lines.append(f"- {row['name']}: {notes['text']}.")
    places = dict.fromkeys(machine(row) for row in readings)
    return "\n".join(lines) + "\n\nMeasured on: " + "; and on: ".join(places) + ".\n"


def page() -> str:
    readings = rows()
    return f"{HEAD}\n## Results\n\n{table(readings)}\n## Settings\n\n{details(readings)}"


def readme_lines() -> str:
    """The ratios of speed and memory against the peer, one line a task."""
    readings = {row["name"]: row for row in rows()}
    lines = []
    for name, row in readings.items():
        memory = readings.get(f"{name}, peak memory")
        if memory is not None:
            times = f"{row['ratio']:.2f} × TRL's useful tokens per second"
            lines.append(f"- {name}: {times}, {memory['ours'] / memory['peer']:.2f} × its peak memory")
    return "\n".join(lines)


def with_lines(readme: str) -> str:
    """The README with today's lines between its marks."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{readme_lines()}\n{END}", readme, flags=re.DOTALL)


def main() -> None:
    PAGE.write_text(page())
    README.write_text(with_lines(README.read_text()))


if __name__ == "__main__":
    main()
