"""Ancestries of hundreds of artifacts with records as real as a year of work makes them, written by hand and by no job.

Every model has some dozen files, every stage runs twice under a changed working tree, and environment, processor and code move on
every hundred stages. `python tests/pipelines/long_chain.py 400` measures what docs/lineage.md says of their size.
"""

import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pedigree.data.artifacts.artifacts import LINEAGE_SCHEMA, FileEntry, Input, Record, content_hash, stage_key, write_json
from pedigree.data.artifacts.lineage import folded
from pedigree.pipelines.lineage.ancestry import parents_first, read_pedigree
from pedigree.pipelines.lineage.inheritance import lineage_of, split_run

KINDS = ("sft", "sample", "judge", "pair", "preference_train", "rlvr")
PATCH = "".join(f"diff --git a/stages/sft.py b/stages/sft.py\n+line {number} of a change that nobody committed\n" for number in range(400))
"""About 30 KB, as a day of work leaves."""


def sha(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def record_of(number: int, parents: Sequence[Record], files: int, kinds: Sequence[str] = KINDS) -> Record:
    kind = kinds[number % len(kinds)]
    config = {
        "seed": number, "global_batch": 128, "max_length": 2048, "loss": {"type": "dpo", "beta": 0.1, "f_divergence": "reverse_kl"},
        "optimizer": {"learning_rate": 5e-7, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0, "warmup_share": 0.1},
        "epochs": 1.0, "dtype": "bf16", "lora": None, "lists": "best_worst", "prompts": {"count": 4096, "index": number},
    }  # fmt: skip
    inputs = tuple(Input(port=f"in_{at}", label=f"s{at}", content=parent.content, producer=parent.id) for at, parent in enumerate(parents))
    names = [f"model-{index:05d}-of-{files:05d}.safetensors" for index in range(1, files - 4)]
    names += ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    entries = tuple(FileEntry(path=name, size=0, sha256=sha(number, name)) for name in sorted(names))
    key = stage_key(kind, 1, config, [(given.port, given.label, given.content) for given in inputs], {})
    metrics = {"steps": 100, "tokens": 10**8 + number, "loss": 0.5, "reward/mean": 0.25, "kl": 0.01}
    return Record(
        kind=kind, version=1, type="policy", config=config, inputs=inputs, key=key,
        content=content_hash(entries), files=entries, metrics=metrics,
    )  # fmt: skip


def run_of(number: int, record: Record) -> dict[str, Any]:
    """As a stage's scratch folder tells it: the patch stands in every attempt."""
    era = number // 100
    modules = {f"stages/core/module_{index}.py": sha(era if index % 5 == 0 else 0, record.kind, index) for index in range(40)}
    code = {"commit": sha("commit", era)[:40], "dirty": True, "patch_sha256": hashlib.sha256(PATCH.encode()).hexdigest(), "patch": PATCH}
    times = {"started_at": "2026-01-02T03:04:05+00:00", "ended_at": "2026-01-02T03:06:10+00:00", "resumed_from": None}
    machine = {"machine": "x86_64", "kernel": "6.8.0", "cpu": "A processor", "cores": 96, "memory_gib": 1024.0, "gpus": ["A GPU"] * 8}
    return {
        "address": f"long/s{number}",
        "numerics": {"device": "cuda", "threads": 8, "world_size": 8, "zero_stage": 3, "micro_batch": 4, "kernels": "liger"},
        "placement": {"launcher": "local", "slots": 8, "retries": 3, "checkpoint_every_s": 300, "keep_checkpoints": 2, "timeout_s": None},
        "attempts": [{**times, "cause": "preempted", "code": dict(code)}, {**times, "cause": "succeeded", "code": dict(code)}],
        "fingerprint": {"sha256": sha("print", era, record.kind), "files": modules},
        "environment": {
            "python": "3.11.7",
            "libraries": {f"library-{index}": f"2.{era}.{index}" for index in range(14)},
            "locks": {name: sha(name, era) for name in ("cpu.txt", "gpu.txt", "dev.txt")},
        },
        "hardware": machine,
    }


def shape(count: int, width: int = 1) -> list[list[int]]:
    """Parents of every stage by number: a chain, or layers of `width` stages that each read the whole layer above."""
    return [list(range((at // width - 1) * width, (at // width) * width)) if at >= width else [] for at in range(count)]


def written(folder: Path, parents: list[list[int]], files: tuple[int, int] = (10, 50)) -> tuple[list[Path], list[float]]:
    """Artifact folders, each with the lineage that its inputs' folders give it; and the seconds each took to write."""
    records: list[Record] = []
    folders, took = [], []
    for number, above in enumerate(parents):
        record = record_of(number, [records[at] for at in above], files[0] + number % (files[1] - files[0] + 1))
        records.append(record)
        place = folder / f"s{number}"
        (place / "payload").mkdir(parents=True)
        for entry in record.files:
            (place / "payload" / entry.path).touch()
        began = time.perf_counter()
        run, patches = split_run(run_of(number, record))
        write_json(place / "run.json", run)
        write_json(place / "lineage.json", lineage_of([folders[at] for at in above], patches))
        took.append(time.perf_counter() - began)
        write_json(place / "record.json", record.model_dump(mode="json"))
        folders.append(place)
    return folders, took


def two_latest(folder: Path, parents: list[list[int]], files: tuple[int, int] = (10, 50), kinds: Sequence[str] = KINDS) -> list[Path]:
    """The same of the last stage and of those that it reads, without the folders of all that came before."""
    records: list[Record] = []
    for number, above in enumerate(parents):
        records.append(record_of(number, [records[at] for at in above], files[0] + number % (files[1] - files[0] + 1), kinds))
    runs = [split_run(run_of(number, record)) for number, record in enumerate(records)]
    patches = {sha256: text for _, texts in runs for sha256, text in texts.items()}
    entries = {record.id: {"record": record.model_dump(mode="json"), "run": run} for record, (run, _) in zip(records, runs, strict=True)}
    folders: list[Path] = []
    for number in [*parents[-1], len(parents) - 1]:
        record, place = records[number], folder / f"s{number}"
        (place / "payload").mkdir(parents=True)
        for entry in record.files:
            (place / "payload" / entry.path).touch()
        if number == len(parents) - 1:
            lineage = lineage_of(folders, patches)
        else:
            above = parents_first(record.id, {found.id: found for found in records})[:-1]
            lineage = {"schema_version": LINEAGE_SCHEMA, **folded({given: entries[given] for given in above}, patches)}
        for name, value in (("run.json", runs[number][0]), ("lineage.json", lineage), ("record.json", record.model_dump(mode="json"))):
            write_json(place / name, value)
        folders.append(place)
    return folders


def main() -> None:
    count = int(sys.argv[1])
    for name, parents in (("chain", shape(count)), ("layers of 4", shape(count, 4))):
        with tempfile.TemporaryDirectory() as folder:
            folders, took = written(Path(folder), parents)
            sizes = [(place / "lineage.json").stat().st_size for place in folders]
            began = time.perf_counter()
            pedigree = read_pedigree(folders[-1])
            opened = time.perf_counter() - began
            assert len(parents_first(pedigree.id, {key: entry[0] for key, entry in pedigree.entries.items()})) == len(pedigree.entries)
            print(f"{name} of {count}: last {sizes[-1] / 2**20:.2f} MiB, all {sum(sizes) / 2**20:.0f} MiB; "
                  f"last written in {took[-1]:.2f} s, all in {sum(took):.1f} s; opened in {opened:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
