"""Remove training rows that rephrase a benchmark item, as judged by a language model.

    payload/rows-*.parquet     the remaining rows, unchanged and in order
    evidence/manifest.jsonl    one line per row and item that match, with the verdict: removed, waived, or only reported
    evidence/rephrased.jsonl   one line per row and item in a question: cosine, full reply, and verdict
    evidence/report.json       rows read, kept and removed; questions; per benchmark: items, items found, rows removed, pairs judged

Embeddings retrieve the nearest items of each row. The model judges each turn and item above the threshold, duplicates once. A row without
a clear verdict is kept and reported with the reason: a verdict is never taken from text that the judge may have quoted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from string import Template
from typing import Any, NamedTuple

from pedigree.configs.base.frozen import canonical_json
from pedigree.configs.judging.rephrased import FRAME, SAME, FindRephrased
from pedigree.configs.methods.training import Sampling
from pedigree.configs.rows.overlap_criteria import Waiver
from pedigree.data.artifacts.artifacts import Artifact, write_json, write_rows
from pedigree.data.contamination.coverage import Benchmarks, Overlap, ordered, searched
from pedigree.data.contamination.paraphrases import SHOWN, VectorIndex, VectorMatch, question
from pedigree.data.records import records
from pedigree.data.records.records import Message
from pedigree.data.records.scattered import Scattered, search
from pedigree.stages.core.overlaps import TOLD, Hit, hit_of, lines, refuse_contaminated, refuse_unknown, staying, summary, waiver_summary
from pedigree.stages.core.rating import stated_line, unused_mark
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.sampling.asking import Bound, ask, mark_models, reported
from pedigree.stages.sampling.endpoint import Reply
from pedigree.stages.sampling.sampler import seed_of

OTHER = "another task"
"""The verdict on a row and an item that are different tasks."""
STATED = re.compile(rf"{SAME}\s*[:=]", re.IGNORECASE)
EXACT = re.compile(f"{SAME}: *(yes|no)")


class Suspect(NamedTuple):
    """A row, and a benchmark question that it may rephrase."""

    place: int
    """Place of the row."""
    id: str
    source: str
    turn: str
    """Hash of the text of its nearest turn."""
    like: VectorMatch


class Judged(NamedTuple):
    """A suspect with the model's reply."""

    suspect: Suspect
    reply: Reply | str
    """Reply, or why there is none."""
    verdict: bool | str
    """Whether it is the same task, or why that is unknown."""


class Suites:
    """Benchmark items, grouped by equal questions."""

    def __init__(self, benchmarks: Benchmarks) -> None:
        self.labels = list(benchmarks)
        self._by_text: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for label, items in benchmarks.items():
            for item in items:
                self._by_text.setdefault(question(item), []).append((label, item))
        self.texts = list(self._by_text)

    def items(self, text: int) -> list[tuple[str, dict[str, Any]]]:
        """(benchmark label, item) of all items with question number `text`."""
        return self._by_text[self.texts[text]]

    def waived(self, waivers: Sequence[Waiver]) -> list[bool]:
        """For each question, whether all its items are waived."""
        every = self._by_text.values()
        return [all(any(waiver.covers(label, item["id"]) for waiver in waivers) for label, item in items) for items in every]


class SameTaskQuestions:
    """One question for each distinct pair of turn and benchmark question."""

    def __init__(self, config: FindRephrased, rows: Sequence[dict[str, Any]], texts: Sequence[str], suspects: Sequence[Suspect]) -> None:
        self._config, self._rows, self._texts = config, rows, texts
        self._first: list[Suspect] = []
        """The first suspect of each question."""
        self.of: list[int] = []
        """The question number of each suspect."""
        numbers: dict[tuple[str, int], int] = {}
        for suspect in suspects:
            number = numbers.setdefault((suspect.turn, suspect.like.text), len(numbers))
            self._first += [suspect] if number == len(self._first) else []
            self.of.append(number)

    @property
    def sampling(self) -> Sampling:
        return self._config.sampling

    def __len__(self) -> int:
        return len(self._first)

    def messages(self, number: int) -> list[Message]:
        suspect = self._first[number]
        return same_task_question(turn_of(self._rows[suspect.place], suspect, self._config), self._texts[suspect.like.text])

    def seed(self, number: int) -> int:
        suspect = self._first[number]
        return seed_of(self._config.seed, "rephrased", suspect.turn, self._texts[suspect.like.text])

    def about(self, number: int) -> str:
        return str(number)


def run(config: FindRephrased, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Remove every row that rephrases an item.

    Raises:
        StageError: a waiver matches nothing, too many questions have no verdict, the contaminated share of a benchmark exceeds
            `max_contaminated_share`, or no row is left.
        EngineLost: the language model is down; its replies are kept.
        PedigreeError: the embedder is not on this machine.
    """
    data = only(inputs, "data")
    with job.busy("reading benchmarks"):
        benchmarks = {label: records.load(suite) for label, suite in inputs["benchmarks"].items()}
        refuse_unknown(config.waivers, benchmarks)
        suites = Suites(benchmarks)
    suspects, by_position = find_suspects(config, data, suites, job)
    rows = records.opened(data)
    questions = SameTaskQuestions(config, rows, suites.texts, suspects)
    bound = Bound(config.max_unanswered_share, len(questions), "no verdict on {} of {} questions", "max_unanswered_share")
    replies = ask(config.by, only_or_none(inputs, "judge"), questions, job, bound) if len(questions) else []  # starts no engine for nothing
    verdicts = [reply if isinstance(reply, str) else parse_same(reply.text, ended=reply.ended) for reply in replies]
    judged = [Judged(suspect, replies[number], verdicts[number]) for suspect, number in zip(suspects, questions.of, strict=True)]
    with job.busy("writing evidence"):
        hits = list(rephrased_rows(config, suites, rows, judged))
        write_evidence(suites, judged, hits, job)
    counts, models = counted(suites, judged), reported(replies)
    kept = staying(len(by_position.sizes), hits)
    gone = {hit.place for hit in hits if hit.removed}
    metrics = {
        "rows": len(kept),
        "removed": len(gone),
        "turns": list(config.turns),
        "benchmarks": {label: summary(label, items, hits) | counts[label] for label, items in benchmarks.items()},
        "pairs": len(suspects),
        "questions": len(questions),
        "unanswered": reasons(replies, verdicts),
        "rows_unanswered": len({one.suspect.place for one in judged if isinstance(one.verdict, str)} - gone),
        **({"waivers": [waiver_summary(one, hits) for one in config.waivers]} if config.waivers else {}),
        **({"reported": models} if models else {}),
    }
    write_json(job.evidence / "report.json", {"read": len(by_position.sizes), **metrics})
    refuse(config, metrics, len(by_position.sizes))
    mark_models("compared", replies, job)
    for done in by_position.write(job.out / "payload", kept, job.numerics.threads):
        job.doing("writing rows", done, len(kept), "rows")
    return metrics


def find_suspects(config: FindRephrased, data: Artifact, suites: Suites, job: Job) -> tuple[list[Suspect], Scattered]:
    """Suspects by row, nearest items first; and the rows' locations."""
    likeness, turns = VectorIndex(suites.texts, suites.waived(config.waivers), config.threshold, config.neighbours), frozenset(config.turns)

    def look(place: int, rows: Sequence[dict[str, Any]]) -> list[Suspect]:
        texts = [searched(row, turns) for row in rows]
        return [
            Suspect(place + at, row["id"], row["source"], hash_of(texts[at][like.turn]), like)
            for at, (row, some) in enumerate(zip(rows, likeness.of(texts), strict=True))
            for like in some
        ]

    groups, by_position = search(data, look, job.numerics.threads, lambda done, total: job.doing("comparing rows", done, total, "rows"))
    return [suspect for group in groups for suspect in group], by_position


def hash_of(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def turn_of(row: dict[str, Any], suspect: Suspect, config: FindRephrased) -> str:
    """The turn of a row that is nearest to the benchmark question."""
    return searched(row, frozenset(config.turns))[suspect.like.turn]


def same_task_question(turn: str, item: str) -> list[Message]:
    """The judge's question about a row's turn and an item's question: a single user turn, to support templates without a system turn."""
    content = Template(FRAME).substitute(mark=unused_mark(turn, item), first=turn, second=item)
    return [{"role": "user", "content": content}]


def parse_same(text: str, *, ended: bool = True) -> bool | str:
    """Parse whether both are the same task, or return why there is no verdict: the last line must be `Same: yes` or `Same: no`, and the
    only one that begins with that label."""
    found = stated_line(text, "verdict", STATED, EXACT, ended=ended, otherwise="is neither yes nor no")
    return found if isinstance(found, str) else found[1] == "yes"


def rephrased_rows(config: FindRephrased, suites: Suites, rows: Sequence[dict[str, Any]], judged: Sequence[Judged]) -> Iterator[Hit]:
    """The rows judged to rephrase items, in row order."""
    same, doubt = (one.suspect for one in judged if one.verdict is True), "" if config.remove else TOLD
    for place, suspects in groupby(same, lambda suspect: suspect.place):
        row = rows[place]
        overlaps = [
            Overlap(label, item, suspect.like.cosine, turn_of(row, suspect, config)[:SHOWN], "rephrased", doubt=doubt)
            for suspect in suspects
            for label, item in suites.items(suspect.like.text)
        ]
        yield hit_of(place, row, ordered(overlaps), config.waivers)


def write_evidence(suites: Suites, judged: Sequence[Judged], hits: Sequence[Hit], job: Job) -> None:
    """Write the matches and all questions with their verdicts."""
    write_rows(job.evidence / "manifest.jsonl", [line for hit in hits for line in lines(hit)])
    followed = {
        (hit.place, overlap.benchmark, overlap.item["id"]): verdict
        for hit in hits
        for overlap, verdict in zip(hit.overlaps, hit.verdicts, strict=True)
    }
    with (job.evidence / "rephrased.jsonl").open("w", encoding="utf-8") as stream:
        for suspect, reply, verdict in judged:
            words = {"reply": reply.text} if isinstance(reply, Reply) else {}
            for label, item in suites.items(suspect.like.text):
                outcome = followed.get((suspect.place, label, item["id"]), OTHER)
                judgment = {"failure": verdict} if isinstance(verdict, str) else {"verdict": outcome}
                about = {"id": suspect.id, "source": suspect.source, "benchmark": label, "task": item["task"], "item": item["id"]}
                stream.write(canonical_json(about | {"score": round(suspect.like.cosine, 4)} | words | judgment) + "\n")


def counted(suites: Suites, judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """Benchmark label → number of pairs in questions, and of those without a verdict."""
    every, unanswered = Counter[str](), Counter[str]()
    for suspect, _, verdict in judged:
        labels = [label for label, _ in suites.items(suspect.like.text)]
        every.update(labels)
        unanswered.update(labels if isinstance(verdict, str) else ())
    return {label: {"pairs": every[label], "unanswered": unanswered[label]} for label in suites.labels}


def reasons(replies: Sequence[Reply | str], verdicts: Sequence[bool | str]) -> dict[str, int]:
    """Reason → number of questions without a verdict."""
    lacking = [(reply, verdict) for reply, verdict in zip(replies, verdicts, strict=True) if isinstance(verdict, str)]
    return dict(sorted(Counter("no reply" if isinstance(reply, str) else verdict for reply, verdict in lacking).items()))


def refuse(config: FindRephrased, metrics: dict[str, Any], read: int) -> None:
    """Raise StageError if too many questions have no verdict, too many items are contaminated, or no row is left."""
    unanswered, questions = sum(metrics["unanswered"].values()), metrics["questions"]
    if unanswered > config.max_unanswered_share * questions:
        raise StageError(
            f"{unanswered} of {questions} questions have no verdict, more than {config.max_unanswered_share:.0%} "
            f"({metrics['unanswered']}): see evidence/rephrased.jsonl; use a model that follows the reply format, raise "
            "sampling.max_tokens, or raise max_unanswered_share"
        )
    refuse_contaminated(metrics["benchmarks"], config.max_contaminated_share)
    if not metrics["rows"]:
        raise StageError(f"the model judged all {read} rows to rephrase benchmark items; no training data is left")
