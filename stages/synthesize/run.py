"""Generate prompts with a language model: from personas, from examples, or by rewriting other prompts.

payload/rows-*.parquet    prompts in the order of the requests. A prompt derived from a persona or a prompt has its id plus
                          `/METHOD-TASK/NUMBER`; a prompt derived from examples has a new id
evidence/requests.jsonl   each request with its material, the full reply, and the outcome of each prompt in it
evidence/parents.parquet  the persona, prompt, or examples from which each prompt was derived
evidence/counts.json      requests, prompts parsed and kept, and why the others were dropped
evidence/validation.json
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.judging.synthesis import SelfInstruct, Synthesize
from pedigree.configs.methods.training import Sampling
from pedigree.data.artifacts.artifacts import write_json, write_rows
from pedigree.data.expectations.validation import validate
from pedigree.data.records import parents, records
from pedigree.data.records.messages import user_turns
from pedigree.data.records.records import Message, Prompt, derived_id
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.sampling.asking import Bound, ask, mark_models, reported
from pedigree.stages.sampling.endpoint import Reply
from pedigree.stages.sampling.sampler import seed_of
from pedigree.stages.synthesize.novelty import Novelty
from pedigree.stages.synthesize.writing import read_prompts, writing_question
from pedigree.stages.verifiers import check

SHOWN = 200
"""Characters of a reply in an error message."""


@dataclass(frozen=True)
class Material:
    """A text shown to the writer: the last user turn of a prompt."""

    id: str
    text: str


class WritingQuestions:
    """All requests: one per persona or prompt, or the configured number, each with its own examples."""

    def __init__(self, config: Synthesize, material: Sequence[Material]) -> None:
        self.config, self.material = config, material

    @property
    def sampling(self) -> Sampling:
        return self.config.sampling

    def __len__(self) -> int:
        method = self.config.method
        return method.requests if isinstance(method, SelfInstruct) else len(self.material)

    def shown(self, number: int) -> list[Material]:
        """The material of one request."""
        method = self.config.method
        if not isinstance(method, SelfInstruct):
            return [self.material[number]]
        return random.Random(f"{self.config.seed}/synthesize/{number}").sample(self.material, method.shots)

    def messages(self, number: int) -> list[Message]:
        return writing_question(self.config.method, [one.text for one in self.shown(number)])

    def seed(self, number: int) -> int:
        return seed_of(self.config.seed, "synthesize", *(one.id for one in self.shown(number)), number)

    def about(self, number: int) -> str:
        return str(number)


@dataclass
class Harvest:
    """The kept prompts, and statistics of the others."""

    config: Synthesize
    rows: list[Prompt] = field(default_factory=list)
    parents: list[tuple[str, list[str]]] = field(default_factory=list)
    """Id of a row and of the material shown for it."""
    drops: Counter[str] = field(default_factory=Counter)
    """Parsed prompts that were dropped, by reason."""
    unusable: Counter[str] = field(default_factory=Counter)
    """Replies without a prompt, by reason."""
    unreadable: str = ""
    """The first such reply, or why there is none."""
    names: dict[str, str] = field(default_factory=dict)
    """Text → id, of the material and of kept prompts."""
    novelty: Novelty | None = None

    def take(self, text: str, number: int, shown: Sequence[Material]) -> dict[str, Any]:
        """Keep or drop a prompt, the one with this number in its reply; return the outcome."""
        known = self.names.get(text)
        if known is not None:
            return self._dropped("it repeats another one", text, known)
        like = self.novelty.resembled(text) if self.novelty else None
        if like is not None:
            return self._dropped("it resembles another one", text, like[0]) | {"rouge_l": like[1]}
        row: Prompt = {"id": "", "source": self.config.source, "messages": [{"role": "user", "content": text}], "verifier": None}
        method = self.config.method
        if isinstance(method, SelfInstruct):
            row["id"] = f"{row['source']}-{digest(row)[:16]}"
        else:
            row["id"] = derived_id(shown[0].id, f"{method.type}-{method.task}/{number}")
        self.rows.append(row)
        self.parents.append((row["id"], [one.id for one in shown]))
        self.note(row["id"], text)
        return {"id": row["id"]}

    def note(self, name: str, text: str) -> None:
        """Register a text, so that later prompts must differ from it."""
        self.names.setdefault(text, name)
        if self.novelty:
            self.novelty.add(name, text)

    def _dropped(self, reason: str, text: str, like: str) -> dict[str, Any]:
        self.drops[reason] += 1
        return {"dropped": reason, "like": like, "text": text}


def run(config: Synthesize, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Generate prompts.

    Raises:
        StageError: there are fewer prompts than `shots`, too many replies contain no prompts, or fewer than `min_rows` are left.
        EngineLost: the language model is down; its replies are kept.
    """
    with job.busy("reading rows"):
        rows = records.stream(only(inputs, "prompts").payload, ("id", "messages"))
        material = [Material(row["id"], user_turns(row["messages"])[-1].strip()) for row in rows]
    if isinstance(config.method, SelfInstruct):
        material.sort(key=lambda one: one.id)  # the draw must not depend on row order
        if config.method.shots > len(material):
            raise StageError(f"shots is {config.method.shots}, but there are only {len(material)} prompts: lower it, or add prompts")
    questions = WritingQuestions(config, material)
    bound = Bound(config.max_unusable_share, len(questions), "no reply to {} of {} requests", "max_unusable_share")
    replies = ask(config.by, only_or_none(inputs, "writer"), questions, job, bound)
    made = Harvest(config)
    write_rows(job.evidence / "requests.jsonl", read(made, questions, replies, job))
    counts = {
        "read": len(made.rows) + sum(made.drops.values()),
        "kept": len(made.rows),
        "drops": dict(sorted(made.drops.items())),
        "requests": len(questions),
        "unusable": dict(sorted(made.unusable.items())),
    }
    write_json(job.evidence / "counts.json", counts)
    refuse(config, made, counts)
    with job.busy("checking rows"):
        verdict = validate([dict(row) for row in made.rows], "prompt", check)
    write_json(job.evidence / "validation.json", verdict)
    parents.write(job.evidence, made.parents)
    with job.busy("writing rows"):
        records.save(job.out, "prompt", made.rows)
    mark_models("written", replies, job)
    return {
        "rows": len(made.rows),
        "requests": len(questions),
        "unusable": counts["unusable"],
        "dropped": counts["drops"],
        "mean_length": sum(records.size_of(row) for row in made.rows) / len(made.rows),
        **({"reported": models} if (models := reported(replies)) else {}),
        "validation": verdict,
    }


def read(made: Harvest, questions: WritingQuestions, replies: Sequence[Reply | str], job: Job) -> Iterator[dict[str, Any]]:
    """Process all replies in order; yield a line of evidence for each."""
    config = questions.config
    most = config.method.prompts
    texts = [reply if isinstance(reply, str) else read_prompts(reply.text, most, ended=reply.ended) for reply in replies]
    if isinstance(config.method, SelfInstruct):
        written = [text for found in texts if not isinstance(found, str) for text in found]
        made.novelty = Novelty(config.method.max_rouge_l, [*(one.text for one in questions.material), *written])
    for one in questions.material:
        made.note(one.id, one.text)
    for number, (reply, found) in enumerate(zip(replies, texts, strict=True)):
        job.doing("reading replies", number, len(replies), "replies")
        shown = questions.shown(number)
        line: dict[str, Any] = {"shown": [one.id for one in shown], "question": questions.messages(number)[0]["content"]}
        line |= {"reply": reply.text} if isinstance(reply, Reply) else {}
        if isinstance(found, str):
            made.unusable[found if isinstance(reply, Reply) else "no reply"] += 1
            made.unreadable = made.unreadable or (reply.text if isinstance(reply, Reply) else reply)
            yield line | {"failure": found}
        else:
            yield line | {"prompts": [made.take(text, place, shown) for place, text in enumerate(found)]}


def refuse(config: Synthesize, made: Harvest, counts: dict[str, Any]) -> None:
    """Raise StageError if too many replies are unusable or too few prompts are left; the message counts the reasons."""
    unusable, requests = sum(made.unusable.values()), counts["requests"]
    if unusable > config.max_unusable_share * requests:
        raise StageError(
            f"{unusable} of {requests} replies contain no prompts, more than {config.max_unusable_share:.0%} "
            f"({counts['unusable']}; the first: {made.unreadable[:SHOWN]!r}): see evidence/requests.jsonl; use a writer that follows the "
            "format <prompt>...</prompt>, raise sampling.max_tokens, or raise max_unusable_share"
        )
    if len(made.rows) < config.min_rows:
        raise StageError(
            f"{len(made.rows)} prompts < min_rows {config.min_rows} from {requests} replies ({counts['drops']}): raise the temperature, "
            "use other input prompts, or lower min_rows"
        )
