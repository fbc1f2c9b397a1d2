"""What wrong labels cost preference training, and what gets some of it back.

Sums of two digits, the right one beside a wrong one. The verifier judges them (`judge`), `pair` exchanges the answers of a share ε of the
pairs (`label_noise`), and `preference_train` learns from what is left of the truth, on a model of random weights:

- by DPO as it was published, by its conservative form (`cdpo`) and its unbiased one (`robust`), which are told ε, and by `ipo_mean`;
- by DPO once more, without the share ε of the pairs that the first policy contradicts most: those with the least margin r_w - r_l.

Measured is the share of clean pairs which no training saw, of sums that it did see, that a policy orders rightly; and how well the margins
tell the exchanged pairs from the others: the probability that an exchanged one has the smaller margin (a coin has 0.5). Each seed has
weights, an order, exchanges and held-out pairs of its own; a process of one thread does all of a seed and a share.

    python -m benchmarks.label_noise [--seeds 5] [--noise 0,0.1,0.25,0.4]
"""

import argparse
import importlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, RUNS, Interval, Watch, described
from benchmarks.workloads import made, seal
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import Artifact, open_artifact
from pedigree.data.artifacts.provenance import hardware
from pedigree.data.host.parallel import mapped
from pedigree.data.records import records

FOUND = RESULTS / "label_noise" / "accuracy.json"
NOISE = (0.0, 0.1, 0.25, 0.4)
HELD_OUT = 0.2
"""Of the wrong answers to each sum."""
FAR = 9
"""So much a wrong answer differs from the right one at most."""
LEFT_OUT, TOLD_APART = "dpo, suspects left out", "exchanged pairs told from others"
MODEL = {"type": "random_llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocabulary": 300, "context": 64}
TRAINING = {"max_length": 64, "global_batch": 64, "epochs": 6, "dtype": "fp32", "optimizer": {"learning_rate": 3e-3}}
ONE_THREAD = Numerics(device="cpu", threads=1)
Row = dict[str, Any]


def losses(noise: float) -> dict[str, Row]:
    """By name; without noise, those that are told of it are DPO itself."""
    told = {name: {"type": name, "epsilon": noise} for name in ("cdpo", "robust")} if noise else {}
    return {"dpo": {"type": "dpo"}, **told, "ipo_mean": {"type": "ipo_mean"}}


def answers(seed: int, digits: int = 10) -> tuple[list[Row], list[Row]]:
    """(completions to train on, to hold out), two for each pair: a sum's right answer and one of the wrong ones."""
    draw, sides = random.Random(seed), ([], [])
    for a, b in ((a, b) for a in range(digits) for b in range(digits)):
        wrong = [number for number in range(max(0, a + b - FAR), a + b + FAR + 1) if number != a + b]
        held = set(draw.sample(wrong, int(HELD_OUT * len(wrong))))
        for number in wrong:
            sides[number in held].extend(completion(a, b, number, text) for text in (a + b, number))
    return sides


def completion(a: int, b: int, wrong: int, text: int) -> Row:
    name = f"{a}+{b}, not {wrong}"
    return {
        "id": f"{name}/{text}", "prompt_id": name, "source": "sums", "messages": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "verifier": {"name": "arithmetic", "answer": str(a + b)}, "policy": "made", "policy_content": "", "on_policy": False, "index": 0,
        "seed": 0, "prompt_ids": [], "response_ids": [], "logprobs": [], "text": str(text), "finish_reason": "stop",
    }  # fmt: skip


class Study:
    """A seed and a share of wrong labels, in a folder."""

    def __init__(self, folder: Path, seed: int, noise: float, digits: int = 10) -> None:
        """`digits`: so many there are."""
        self.folder, self.seed, self.noise = folder, seed, noise
        trained, held = answers(seed, digits)
        said = [[*row["messages"], {"role": "assistant", "content": row["text"]}] for row in trained]
        corpus = self._saved("corpus", "conversation", [{"id": str(n), "source": "sums", "messages": one} for n, one in enumerate(said)])
        self.base = self._made("source_model", "policy", "base", {"source": {**MODEL, "seed": seed}}, corpus=corpus)
        self.pairs = self._paired("trained", trained, noise)
        self.held = records.load(self._paired("held", held, 0.0))

    def found(self) -> dict[str, float]:
        """Loss → the share of held-out pairs that it orders rightly; and how well margins tell exchanged pairs from others."""
        policies = {name: self.policy(name, loss, self.pairs) for name, loss in losses(self.noise).items()}
        found = {name: right(self.margins(policy, self.held)) for name, policy in policies.items()}
        if self.noise:
            rows = records.load(self.pairs)
            margins = self.margins(policies["dpo"], rows)
            found[TOLD_APART] = told_apart(margins, list(map(exchanged, rows)))
            ranked = sorted(range(len(rows)), key=lambda place: (margins[place], rows[place]["id"]))
            kept = sorted(ranked[round(self.noise * len(rows)) :])
            trusted = self._saved("trusted", "preference", [rows[place] for place in kept])
            found[LEFT_OUT] = right(self.margins(self.policy("again", {"type": "dpo"}, trusted), self.held))
        return found

    def policy(self, name: str, loss: Row, pairs: Artifact) -> Artifact:
        """What training on the pairs makes of the base."""
        config = {**TRAINING, "loss": loss, "seed": self.seed}
        return self._made("preference_train", "policy", name, config, policy=self.base, preferences=pairs)

    def margins(self, policy: Artifact, rows: Sequence[Row]) -> list[float]:
        """r_w - r_l of each pair."""
        gaps = (self._gaps(model, rows) for model in (policy, self.base))
        return [now - before for now, before in zip(*gaps, strict=True)]

    def _gaps(self, model: Artifact, rows: Sequence[Row]) -> list[float]:
        """log π(y_w) - log π(y_l) of each pair."""
        from pedigree.data.chat.chat import Chat
        from pedigree.stages.core.batches import document
        from pedigree.stages.job.job import Job
        from pedigree.stages.reference_logprobs.run import score
        from pedigree.stages.training.models import load_policy

        chat = Chat(model.payload)
        units = [tuple(document(*chat.answer(row["messages"], one["text"])) for one in row["answers"]) for row in rows]
        job = Job(self.folder / "scratch", "bench/margins", "k", ONE_THREAD, Placement(), {})
        return [chosen - rejected for chosen, rejected in score(load_policy(model, ONE_THREAD).eval(), units, job, chat.pad_id)]

    def _paired(self, name: str, rows: Sequence[Row], noise: float) -> Artifact:
        judged = self._made("judge", "judgment", f"{name}-judged", {}, completions=self._saved(f"{name}-said", "completion", rows))
        return self._made("pair", "preference", f"{name}-pairs", {"label_noise": noise, "seed": self.seed}, judgments=judged)

    def _made(self, kind: str, artifact_type: str, name: str, config: Row, **ports: Artifact) -> Artifact:
        """What a stage makes, in this process."""
        typed, inputs = KINDS[kind].config.model_validate(config), {port: {"it": given} for port, given in ports.items()}
        made(importlib.import_module(f"pedigree.stages.{kind}.run"), typed, inputs, self.folder / name, artifact_type, ONE_THREAD)
        return open_artifact(self.folder / name)

    def _saved(self, name: str, record: str, rows: Sequence[Row]) -> Artifact:
        records.save(self.folder / name, record, rows)
        seal(self.folder / name, record)
        return open_artifact(self.folder / name)


def exchanged(pair: Row) -> bool:
    """Whether the first of its answers is the wrong one, `3+4, not 9/best_vs_worst`."""
    wrong = pair["id"].partition("/")[0].rpartition(" ")[2]
    return pair["answers"][0]["text"] == wrong


def right(margins: Sequence[float]) -> float:
    """The share of pairs that are in order."""
    return sum(margin > 0 for margin in margins) / len(margins)


def told_apart(margins: Sequence[float], wrong: Sequence[bool]) -> float:
    """The probability that a wrong pair has a smaller margin than a right one; equal ones count half."""
    sides = [[margin for margin, is_wrong in zip(margins, wrong, strict=True) if is_wrong == side] for side in (True, False)]
    wins = sum((low < high) + (low == high) / 2 for low in sides[0] for high in sides[1])
    return wins / (len(sides[0]) * len(sides[1]))


def measured(task: tuple[int, float]) -> tuple[float, dict[str, float]]:
    """(share of wrong labels, what came of it) of one seed; called in a process of its own, which loads the engines."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    seed, noise = task
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        found = Study(Path(folder), seed, noise).found()
    said = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    print(f"seed {seed}, {noise:g} of the labels wrong: {said}; {time.monotonic() - began:.0f} s", flush=True)
    return noise, found


def collected(outcomes: Iterable[tuple[float, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Share of wrong labels → what was measured → its median, lowest and highest over the seeds."""
    runs: dict[str, dict[str, list[float]]] = {}
    for noise, found in outcomes:
        for name, value in found.items():
            runs.setdefault(f"{noise:g}", {}).setdefault(name, []).append(value)
    return {noise: {name: described(Interval.of(values)) for name, values in by_name.items()} for noise, by_name in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=RUNS)
    parser.add_argument("--noise", default=",".join(map(str, NOISE)))
    given = parser.parse_args()
    if given.seeds < RUNS:
        raise SystemExit(f"--seeds {given.seeds}: what is claimed is of {RUNS} or more")
    tasks = [(seed, noise) for noise in map(float, given.noise.split(",")) for seed in range(given.seeds)]
    watch = Watch()
    found = collected(mapped(measured, tasks, len(os.sched_getaffinity(0))))
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    table = {"seeds": given.seeds, "found": found, "hardware": hardware(), "machine": watch.read()}
    FOUND.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
