"""Measure reward overoptimization: best-of-n by a proxy reward, evaluated by a gold reward (Gao et al. 2022).

    payload/rows.jsonl        one row per n: KL, and the means of proxy and gold with 95 % intervals over prompts
    evidence/curve.csv        the same as a curve (its step is n)
    evidence/prompts.jsonl    each prompt's number of answers and its gold curve
    evidence/left_out.jsonl   prompts with too few answers scored by both

The proxy is `reward` of the judgments, from their reward models. The gold reward is `verifier_score` of the same
rows, or `reward` of the same answers in the judgments at `gold`. If gold falls while the proxy still rises, the proxy is being
overoptimized.
"""

from collections import defaultdict
from typing import Any

from pedigree.configs.judging.scoring import Overoptimization
from pedigree.data.artifacts.artifacts import write_rows
from pedigree.data.records import records
from pedigree.stages.core.statistics import bootstrap_average, paired_difference
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.overoptimization.best_of_n import best_of_n, kl_best_of_n

Scores = list[tuple[float, float]]
"""(proxy, gold) of each answer to one prompt."""
Curve = list[tuple[float, float]]
"""(proxy, gold) for n = 1, 2, ..."""


def run(config: Overoptimization, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Measure the curve.

    Raises:
        StageError: no answer has both rewards, `gold` judged other answers, or no prompt has enough answers.
    """
    with job.busy("reading rows"):
        scored = answers_by_prompt(inputs)
    largest = config.max_n or min(len(answers) for answers in scored.values())
    kept = {prompt: answers for prompt, answers in scored.items() if len(answers) >= largest}
    left_out = [{"prompt_id": prompt, "answers": len(answers)} for prompt, answers in scored.items() if prompt not in kept]
    write_rows(job.evidence / "left_out.jsonl", left_out)
    if not kept or largest < 2:
        most = max(len(answers) for answers in scored.values())
        raise StageError(
            f"best of {largest} requires at least 2 and at least {largest} answers per prompt scored by both rewards; {len(kept)} of "
            f"{len(scored)} prompts have {largest}, and the maximum is {most}: sample more answers per prompt, or set max_n to 2 ... {most}"
        )
    with job.busy("measuring"):
        curves = {prompt: best_of_n([p for p, _ in answers], [g for _, g in answers], largest) for prompt, answers in kept.items()}
    rows = []
    for n in range(1, largest + 1):
        job.progress(n - 1, largest)
        rows.append(point(n, [curve[n - 1] for curve in curves.values()], config))
    job.progress(largest, largest)
    records.save(job.out, "report", rows)
    by_prompt = [{"prompt_id": prompt, "answers": len(kept[prompt]), "gold": [g for _, g in curve]} for prompt, curve in curves.items()]
    write_rows(job.evidence / "prompts.jsonl", by_prompt)
    job.rewind(0)
    for row in rows:
        job.log(row["n"], **{name: value for name, value in row.items() if name != "n"})
    return {"rows": len(rows), "prompts": len(kept), "left_out": len(left_out), **summary(rows, curves, config)}


def answers_by_prompt(inputs: Inputs) -> dict[str, Scores]:
    """Prompt → scores of its answers, sorted by prompt; answers without both rewards are excluded."""
    rows = records.load(only(inputs, "judgments"))
    gold = only_or_none(inputs, "gold")
    others = {row["id"]: (row["text"], row["reward"]) for row in records.load(gold)} if gold else {}
    found: dict[str, Scores] = defaultdict(list)
    for row in rows:
        text, measured = others.get(row["id"], (row["text"], None)) if gold else (row["text"], row["verifier_score"])
        if text != row["text"]:  # ids of answers number them, and another sample has the same
            problem = f"`gold` judged another text under the id {row['id']} than `judgments`"
            raise StageError(f"{problem}: judge the completions of one sample stage twice, or set no `gold` to use `verifier_score`")
        if row["reward"] is not None and measured is not None:
            found[row["prompt_id"]].append((row["reward"], measured))
    if not found:
        lacks = "a `reward` in the judgments and in `gold`" if gold else "a `reward` and a `verifier_score`"
        raise StageError(
            f"none of {len(rows)} answers has {lacks}: judge the same completions with reward_weight and reward models"
            + ("" if gold else ", on prompts with verifiers, or set `gold` to judgments by a gold reward model")
        )
    return dict(sorted(found.items()))


def point(n: int, values: Curve, config: Overoptimization) -> dict[str, Any]:
    """The row for one n, over all prompts."""
    row: dict[str, Any] = {"n": n, "kl": kl_best_of_n(n)}
    for name, side in (("proxy", 0), ("gold", 1)):
        mean, low, high = bootstrap_average([value[side] for value in values], resamples=config.resamples, seed=config.seed)
        row |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return row


def summary(rows: list[dict[str, Any]], curves: dict[str, Curve], config: Overoptimization) -> dict[str, Any]:
    """The (first) peak of gold, and the change from there to the largest n, paired by prompt."""
    peak = max(rows, key=lambda row: row["gold"])
    at_peak, at_end = ([curve[place][1] for curve in curves.values()] for place in (peak["n"] - 1, -1))
    change = paired_difference(at_end, at_peak, resamples=config.resamples, seed=config.seed)
    return {
        "max_n": len(rows),
        "peak_n": peak["n"],
        "peak_kl": peak["kl"],
        "gold_first": rows[0]["gold"],
        "gold_peak": peak["gold"],
        "gold_last": rows[-1]["gold"],
        "proxy_first": rows[0]["proxy"],
        "proxy_last": rows[-1]["proxy"],
        "gold_after_peak": {"mean": change.mean, "low": change.low, "high": change.high},
    }
