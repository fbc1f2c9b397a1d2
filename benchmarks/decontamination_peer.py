"""One search of a file by one tool, in a process of its own: run by `benchmarks/decontamination.py`, for peers in an environment of theirs.

    python decontamination_peer.py TOOL FOLDER

FOLDER/rows/rows.jsonl has `text` per row, or `messages` for ours; FOLDER/items.jsonl the items' questions. Prints one line of JSON:
`found` (numbers of the rows that it would remove), `seconds` of CPU of this process from its start on, `searching` (of them between
reading and the last verdict; only of tools that can be asked for it) and `peak` (bytes of memory).
"""

import importlib.metadata
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


def lines(path: Path) -> list[dict[str, Any]]:
    with path.open() as stream:
        return [json.loads(line) for line in stream]


def ours(folder: Path, settings: dict[str, Any]) -> Answer:
    """One core, turns of all roles; without further settings those of a stage that says nothing: 8-grams, threshold 0.5."""
    from pedigree.configs.rows.overlap_criteria import Decontaminate
    from pedigree.data.contamination.decontamination import Comparison
    from pedigree.data.records.columns import ROWS_PER_GROUP

    rows = lines(folder / "rows" / "rows.jsonl")
    items = [{"id": str(number), "question": item["question"]} for number, item in enumerate(lines(folder / "items.jsonl"))]
    comparison = Comparison({"suite": items}, Decontaminate.model_validate(settings))
    if len(rows) > ROWS_PER_GROUP:
        comparison.compile()
    began, found = time.process_time(), []
    for start in range(0, len(rows), ROWS_PER_GROUP):
        overlaps = comparison.overlaps(rows[start : start + ROWS_PER_GROUP])
        found += [start + number for number, some in enumerate(overlaps) if any(not one.doubt for one in some)]
    return {"found": found, "searching": time.process_time() - began}


def decon(folder: Path) -> Answer:
    """AI2's, one thread; 0.5 of the questions, as ours, since its default of 0.8 with answers finds next to nothing in questions alone."""
    import decon as tool

    made, report = folder / "decon-items", folder / "decon-report"
    for place in (made, report):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    with (made / "items-1.jsonl").open("w") as stream:
        for number, item in enumerate(lines(folder / "items.jsonl")):
            row = {"eval_key": "items", "eval_instance_index": number, "split": "test", "question": item["question"], "answer": "",
                   "passage": "", "doc_id": number, "fingerprint": str(number), "is_correct": True}  # fmt: skip
            stream.write(json.dumps(row) + "\n")
    tool.detect(
        tool.Config(
            training_dir=str(folder / "rows"),
            evals_dir=str(made),
            report_output_dir=str(report),
            contamination_score_threshold=0.5,
            worker_threads=1,
        )
    )
    found = {row["training_line"] for path in report.rglob("*.jsonl") for row in lines(path)}
    return {"found": sorted(found)}


def datatrove(folder: Path, ngram: int) -> Answer:
    """One n-gram of a question removes a row; the index is made by its own hashes, since its indexer asks for lighteval's tasks."""
    import numpy as np
    from datatrove.data import Document
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer

    config, made = NGramsDecontConfig(n_grams=ngram, find_query_ngrams=True, find_overlap_ngrams=False), folder / "datatrove-items"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    NGramsDecontIndexer._requires_dependencies = []
    indexer = NGramsDecontIndexer(str(made), config=config)
    hashes = {one for item in lines(folder / "items.jsonl") for one in indexer.compute_hashes("", item["question"])}
    np.array(list(hashes), dtype=config.hash_config.np_descr).tofile(made / "items.index.hashes")
    chosen, found = NGramsDecontFilter(str(made), config=config), []
    for number, row in enumerate(lines(folder / "rows" / "rows.jsonl")):
        if chosen.filter(Document(text=row["text"], id=str(number))) is not True:
            found.append(number)
    return {"found": found}


STRICT = {"ngram": 4, "threshold": 0.9, "typos": True, "abstracted": {}, "cut_short": {"of_item": 0.5}}
"""Settings that the documentation recommends."""
EMBEDDED = {**STRICT, "embedded": {"remove": True}}
"""The same, plus removal of matches by vectors."""
TOOLS: dict[str, tuple[str | None, Callable[[Path], Answer]]] = {
    "ours": (None, lambda folder: ours(folder, {})),
    "ours, strict": (None, lambda folder: ours(folder, STRICT)),
    "ours, strict and embedded": (None, lambda folder: ours(folder, EMBEDDED)),
    "decon": ("decontaminate", decon),
    "datatrove 8": ("datatrove", lambda folder: datatrove(folder, 8)),
    "datatrove 13": ("datatrove", lambda folder: datatrove(folder, 13)),
}
"""Tool → its package, and the function that runs it."""


def main(tool: str, folder: str) -> None:
    package, search = TOOLS[tool]
    answer = search(Path(folder))
    used = resource.getrusage(resource.RUSAGE_SELF)
    status = Path("/proc/self/status").read_text()  # `ru_maxrss` is at least that of the process that started this one
    answer |= {"seconds": used.ru_utime + used.ru_stime, "peak": int(status.split("VmHWM:")[1].split()[0]) * 1024}
    answer |= {"version": importlib.metadata.version(package)} if package else {}
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
