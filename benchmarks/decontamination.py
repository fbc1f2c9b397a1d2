"""Decontamination beside its peers: rows per CPU-second, copies found by disguise, clean rows lost, memory.

    python -m benchmarks.decontamination --decon PYTHON --datatrove PYTHON [--data FOLDER] [--only-found]

The peers are run by interpreters of environments of their own (`decontaminate` wants Python 3.12; `datatrove` wants spacy, regex and
xxhash below 4), and left out where none is given. FOLDER may hold `gsm8k_train.jsonl.gz` and `hh_harmless_test.jsonl.gz`: then a part of
the questions of the first are the items and the others clean rows, and rows of chat are made of sentences of the second. Otherwise
all are made of made words, which tokenizers of subwords take for two or three tokens each: peers that use one are slower on them.
What is found depends on nothing that else runs on a machine: with `--only-found` that is counted again, and rates stay as they are.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.disguises import DISGUISES, chat, planted, problems, prose, shuffled
from benchmarks.report import RESULTS, RUNS, Interval, Reading, Watch, described, write
from benchmarks.twins import twins

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / "benchmarks" / "decontamination_peer.py"
FOUND = RESULTS / "decontamination" / "found.json"
ITEMS, PLANTED, CLEAN = 1319, 30, 6000
"""Benchmark items, copies of each disguise, and clean problems in each draw."""
DRAWS = range(10, 15)
"""Seeds of the searched texts. The rules were made with others in view, those from 0 to 5."""
OURS = ("ours", "ours, strict", "ours, strict and embedded")
ROWS = dict.fromkeys(OURS, 50_000) | {"decon": 50_000, "datatrove 8": 2_000, "datatrove 13": 2_000}
"""Chat rows by speed of the tool; the time for `FEW` of them is its start."""
FEW = 200
CLEAN_ROWS, TWINS = "clean problems, lost", "an item with other people or numbers, by chance"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--decon", metavar="PYTHON", help="interpreter that has the package decontaminate")
    parser.add_argument("--datatrove", metavar="PYTHON", help="interpreter that has the package datatrove")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with gsm8k_train.jsonl.gz and hh_harmless_test.jsonl.gz")
    parser.add_argument("--only-found", action="store_true", help="count what is found, and keep what was recorded of other tools")
    given = parser.parse_args()
    tools = dict.fromkeys(OURS, sys.executable)
    tools |= {"decon": given.decon} if given.decon else {}
    tools |= {name: given.datatrove for name in ("datatrove 8", "datatrove 13")} if given.datatrove else {}
    print("left out:", ", ".join(sorted(ROWS.keys() - tools.keys())) or "nobody")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        (count if given.only_found else measure)(tools, Texts(given.data), Path(folder))


class Texts:
    """The texts from which rows and items are made."""

    def __init__(self, data: Path | None) -> None:
        self.source = "GSM8K" if data else "made problems"
        if data is None:
            self.problems = problems(ITEMS + CLEAN, 0)
            self._said: list[str] = []
        else:
            self.problems = [row["question"] for row in _rows(data / "gsm8k_train.jsonl.gz")]
            self._said = [text for row in _rows(data / "hh_harmless_test.jsonl.gz") for text in (row["chosen"], row["rejected"])]

    def chat(self, count: int, seed: int) -> list[dict[str, Any]]:
        texts = shuffled(self._said, count, seed) if self._said else prose(count, seed)
        return [chat(text[: len(text) // 3], text[len(text) // 3 :]) for text in texts]


def _rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as stream:
        return [json.loads(line) for line in stream]


def measure(tools: dict[str, str], texts: Texts, folder: Path) -> None:
    """Run all tools in turn, several times with other items, and write what they found and how fast they were."""
    watch, versions = Watch(), {}
    speeds: dict[str, list[Speed]] = {tool: [] for tool in tools}
    for run in range(RUNS):
        items, _ = drawn(texts, run)
        rows = texts.chat(max(ROWS.values()), run)
        for tool, python in tools.items():
            small, large = (search(tool, python, items, rows[:count], folder) for count in (FEW, ROWS[tool]))
            speeds[tool].append(Speed(small, large, ROWS[tool]))
            versions |= {tool.split()[0]: small["version"]} if "version" in small else {}
            print(tool, run, round(speeds[tool][-1].rate), "rows per CPU-second", flush=True)
    keep_speeds(texts.source, speeds, watch.read(), versions)
    count(tools, texts, folder)


def count(tools: dict[str, str], texts: Texts, folder: Path) -> None:
    """Let all tools search the copies and the clean problems, and add what they found to the recorded results of the same draws."""
    table = json.loads(FOUND.read_text())
    if table["source"] != texts.source:
        raise SystemExit(f"{FOUND.name} is of {table['source']}, not of {texts.source}: measure all, or give the same --data")
    draws = [drawn(texts, seed) for seed in DRAWS]
    table["of"] = counted([Counter(kind for kind, _ in cases) for _, cases in draws])
    for tool, python in tools.items():
        runs: list[Counter[str]] = []
        for items, cases in draws:
            answer = search(tool, python, items, [row for _, row in cases], folder)
            runs.append(Counter(cases[number][0] for number in answer["found"]))
        table["found"][tool] = counted(runs)
        print(tool, runs, flush=True)
    table["found"] = {tool: table["found"][tool] for tool in ROWS if tool in table["found"]}
    FOUND.write_text(json.dumps(table, indent=1) + "\n")


def drawn(texts: Texts, seed: int) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """The items of a draw, and (kind, row) of the copies and of the other problems."""
    every = random.Random(seed).sample(texts.problems, len(texts.problems))
    items, others = every[:ITEMS], every[ITEMS : ITEMS + CLEAN]
    kinds = [TWINS if twin else CLEAN_ROWS for twin in twins(items, others)]
    return items, [(kind, chat(text, "Well.")) for kind, text in zip(kinds, others, strict=True)] + planted(items, PLANTED, seed)


def counted(runs: Sequence[Counter[str]]) -> dict[str, list[int]]:
    """Kind of row → number of rows in each draw."""
    return {kind: [run[kind] for run in runs] for kind in (*DISGUISES, TWINS, CLEAN_ROWS)}


class Speed:
    """Cost of many rows, minus the cost of few."""

    def __init__(self, small: dict[str, Any], large: dict[str, Any], rows: int) -> None:
        self.rate = (rows - FEW) / (large["seconds"] - small["seconds"])
        """Rows per CPU-second from the file to the verdicts."""
        self.searching = rows / large["searching"] if "searching" in large else None
        """Rows per CPU-second from rows in memory."""
        self.start, self.peak = small["seconds"], large["peak"]


def search(tool: str, python: str, items: Sequence[str], rows: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Write items and rows, and let a tool search them."""
    (folder / "rows").mkdir(exist_ok=True)
    with (folder / "rows" / "rows.jsonl").open("w") as stream:
        for row in rows:
            text = "\n".join(message["content"] for message in row["messages"])
            stream.write(json.dumps(row if tool in OURS else {"text": text}, ensure_ascii=False) + "\n")
    with (folder / "items.jsonl").open("w") as stream:
        stream.writelines(json.dumps({"question": item}) + "\n" for item in items)
    path = {"PYTHONPATH": str(ROOT)} if tool in OURS else {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | path
    answer = subprocess.run([python, str(PEER), tool, str(folder)], env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"{tool} failed:\n{answer.stderr[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def keep_speeds(source: str, speeds: dict[str, list[Speed]], machine: dict[str, Any], versions: dict[str, str]) -> None:
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "source": source,
        "found": {},
        "start": {tool: described(Interval.of([run.start for run in runs])) for tool, runs in speeds.items()},
        "versions": versions,
    }
    FOUND.write_text(json.dumps(table, indent=1) + "\n")
    readings = []
    said = {"text": f"{ITEMS} items of {source}, rows of chat of about 1,300 characters, one core; the start is taken off"}
    for peer in [tool for tool in speeds if tool not in OURS]:
        every: list[tuple[str, str, Callable[[Speed], float], Callable[[Speed], float], float | None]] = [
            ("searching (the peer: and reading)", "rows/CPU-s", lambda run: run.searching or 0, lambda run: run.rate, 10),
            ("file to verdicts", "rows/CPU-s", lambda run: run.rate, lambda run: run.rate, None),
        ]
        for what, unit, mine, theirs, goal in every:
            name = f"decontamination against {peer}, {what}"
            readings.append(Reading(name, list(map(mine, speeds["ours"])), list(map(theirs, speeds[peer])), unit, True, goal, said))
        memory = [[run.peak / 2**20 for run in speeds[tool]] for tool in ("ours", peer)]
        counted = {"text": f"{ROWS['ours']} rows of ours, all in memory as Python objects, and {ROWS[peer]} of the peer"}
        readings.append(Reading(f"decontamination against {peer}, memory", *memory, "MiB", False, None, counted))
    if readings:
        write("decontamination", readings, ("numba", "numpy"), machine)


if __name__ == "__main__":
    main()
