"""Compare a reproduced artifact with the recorded one: equality, distance, and changed conditions."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pedigree.configs.language.execution import FORMERLY
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import Artifact, Record, Run, read_run
from pedigree.data.artifacts.provenance import CODE_ROOT, python_path
from pedigree.data.artifacts.run_record import Environment
from pedigree.pipelines.estimate.reality import UNREADABLE, curve_rows
from pedigree.pipelines.lineage.ancestry import Pedigree, open_payload
from pedigree.pipelines.lineage.difference import score_changes

Verdict = Literal["identical", "restored", "within tolerance", "drifted", "different", "failed", "not run"]
CLOCKED = ("per_second", "seconds", "_idle", "slowdown", "slowest_rank")
"""Suffixes of curve columns that measure time, which are not compared."""
WEIGHTS_TIMEOUT_S = 1800.0
UNNAMED = {"cpu_model": "the processor's model", "instruction_sets": "its instruction sets", "kernel_settings": "settings of kernels"}
"""Fields of the hardware that older records lack, with their descriptions."""


@dataclass(frozen=True)
class Finding:
    """Result for one stage of a reproduction."""

    address: str
    id: str
    key: str
    content: str
    verdict: Verdict
    detail: str = ""
    reproduced: str | None = None
    """Content hash of the new artifact."""
    conditions: tuple[str, ...] = ()
    """Conditions of the new run that differ from the recorded ones."""
    measures: Mapping[str, Any] = field(default_factory=dict)
    """`first_divergence`, `weights_relative_l2`, `scores`, if measurable."""


@dataclass(frozen=True)
class Original:
    """Paths of the recorded artifact's files."""

    payload: Path
    evidence: Path | None


def judge(
    record: Record, run: Run, made: Artifact, original: Original | None, tolerance: float | None
) -> tuple[Verdict, str, dict[str, Any], tuple[str, ...]]:
    """Compare a new artifact with the record of the old one; return verdict, one line of detail, measures, changed conditions.

    Equal content is `identical`. Otherwise a stage has `drifted` if its inputs, numerics, hardware, or libraries differ, or if GPUs summed
    in an order that depends on timing, and an evaluation is `within tolerance` if no mean score differs by more than that. A difference
    without such a cause is `different`. Stages without an engine must give the same bytes from the same inputs on any machine, so only
    changed inputs excuse them.
    """
    now = read_run(made.path / "run.json")
    other = tuple(conditions(run, now))
    if made.record.content == record.content:
        return "identical", f"despite {'; '.join(other)}" if other else "", {}, other
    before = set(record.edges)
    inputs = [f"{port} {label}" for port, label, content in made.record.edges if (port, label, content) not in before]
    measures = measure(record, run, made, original)
    l2 = measures.get("weights_relative_l2")
    details = [
        _files(record, made.record),
        *([measures["first_divergence"]] if "first_divergence" in measures else []),
        *([f"weights differ by {l2:.3g} (relative L2)"] if l2 is not None else []),
        *([f"inputs differ: {', '.join(inputs)}"] if inputs else []),
    ]
    exact = record.kind in KINDS and KINDS[record.kind].engine == "none"
    if now.numerics.get("device") == "cuda" and not now.numerics.get("deterministic") and not exact:
        other = (*other, "GPUs need not repeat bits without `numerics: {deterministic: true}`")
    verdict: Verdict = "drifted" if inputs or (other and not exact) else "different"
    lacks = [words for name, words in UNNAMED.items() if getattr(run.hardware, name) is None and getattr(now.hardware, name) is not None]
    if lacks and not other and not exact:
        details.append(f"the record does not name {', '.join(lacks[:-1])}{' and ' * (len(lacks) > 1)}{lacks[-1]}, which decide bits")
    if measures.get("scores"):
        worst = max(measures["scores"], key=lambda row: abs(row["difference"]))
        details.append(f"largest score difference {score_text(worst)}")
        if tolerance is not None:
            far = abs(worst["difference"]) > tolerance
            details[-1] += f", tolerance {tolerance:g}"
            verdict = "different" if far else "within tolerance"
    return verdict, "; ".join(details + list(other)), measures, other


def passes(findings: Sequence[Finding]) -> bool:
    """Whether the reproduction passes: no stage is different, failed, or not run, and if any drifted, an evaluation is within tolerance."""
    verdicts = [finding.verdict for finding in findings]
    if not verdicts or any(verdict in ("different", "failed", "not run") for verdict in verdicts):
        return False
    return "drifted" not in verdicts or "within tolerance" in verdicts


def conditions(before: Run, now: Run) -> list[str]:
    """Differences in numerics, hardware, libraries (also those of an external command), and code between two runs, one phrase each."""
    then, today = _named(before), _named(now)
    names = sorted(name for name in then.keys() | today.keys() if then.get(name) != today.get(name))
    found = [f"numerics {name} {then.get(name)} -> {today.get(name)}" for name in names]
    old, new = before.hardware, now.hardware
    for name in ("machine", "cpu", "cpu_model", "gpus"):
        if getattr(old, name) != getattr(new, name) and not (name in UNNAMED and getattr(old, name) is None):
            there, here = (list(value) if isinstance(value, tuple) else value for value in (getattr(old, name), getattr(new, name)))
            found.append(f"{name} {there} -> {here}")
    if old.instruction_sets is not None and new.instruction_sets is not None:
        pairs = (("there", old.instruction_sets, new.instruction_sets), ("here", new.instruction_sets, old.instruction_sets))
        only = [f"{', '.join(name for name in own if name not in other)} only {where}" for where, own, other in pairs if {*own} - {*other}]
        found += [f"instruction_sets: {'; '.join(only)}"] if only else []
    if old.kernel_settings is not None:
        found += _changes("", old.kernel_settings, new.kernel_settings or {})
    found += environment_differences(before.environment, now.environment, locks=False)
    if before.command_environment and now.command_environment:
        found += [f"command {one}" for one in environment_differences(before.command_environment, now.command_environment, locks=False)]
    old, new = before.fingerprint.files, now.fingerprint.files
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return found + ([f"code differs in {', '.join(changed)}"] if changed else [])


def _named(run: Run) -> dict[str, Any]:
    """Numerics that the stage used; a value still at `auto` was not used."""
    return FORMERLY | {name: value for name, value in run.numerics.items() if value != "auto"}


def environment_differences(before: Environment, now: Environment, *, locks: bool = True) -> list[str]:
    """Differences in Python, libraries, and lock files (by hash)."""
    found = _changes("", {"python": before.python}, {"python": now.python}) + _changes("", before.libraries, now.libraries)
    return found + (_changes("lock ", before.locks, now.locks) if locks else [])


def _changes(word: str, old: Mapping[str, str | None], new: Mapping[str, str | None]) -> list[str]:
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [f"{word}{name} {_short(old.get(name))} -> {_short(new.get(name))}" for name in names]


def measure(record: Record, run: Run, made: Artifact, original: Original | None) -> dict[str, Any]:
    """Measure the distance between the new and the old artifact, if the old files are available."""
    found: dict[str, Any] = {}
    if original and original.evidence:
        found["first_divergence"] = first_divergence(original.evidence / "curve.csv", made.evidence / "curve.csv")
    if original and any(original.payload.glob("*.safetensors")) and any(made.payload.glob("*.safetensors")):
        found["weights_relative_l2"] = weights_distance(original.payload, made.payload)
    if record.type == "scores":
        found["scores"] = score_differences(record, run, made, original)
    return {name: value for name, value in found.items() if value is not None}


def first_divergence(before: Path, after: Path) -> str | None:
    """First step and column where two curves differ, ignoring columns that measure time."""
    if not (before.exists() and after.exists()):
        return None
    try:
        old, new = curve_rows(before), curve_rows(after)
    except UNREADABLE as error:
        return f"curves cannot be compared: {error}"
    for first, second in zip(old, new, strict=False):
        for name in dict.fromkeys([*first, *second]):
            if not name.endswith(CLOCKED) and first.get(name) != second.get(name):
                return f"curves diverge at step {first.get('step', '?')}: {name} {first.get(name)} -> {second.get(name)}"
    if len(old) != len(new):
        return f"curves agree for {min(len(old), len(new))} steps but differ in length: {len(old)} -> {len(new)} steps"
    return None


def weights_distance(before: Path, after: Path) -> float | None:
    """‖after - before‖ / ‖before‖ over all weights of two folders; None if the tensors do not correspond, or cannot be read in time."""
    command = [sys.executable, "-P", "-m", "pedigree.stages.merge.distance", str(before), str(after)]
    environment = os.environ | {"PYTHONPATH": python_path(CODE_ROOT)}
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=WEIGHTS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    return float(answer.stdout) if answer.returncode == 0 else None


def score_differences(record: Record, run: Run, made: Artifact, original: Original | None) -> list[dict[str, Any]]:
    """New minus old mean score per policy and task, as `pedigree diff` compares them; without the old scores, of the recorded means."""
    if original:
        sides = ((record, original.payload), (made.record, made.payload))
        old, new = (Pedigree(one.id, {one.id: (one, run)}, partial(open_payload, payload)) for one, payload in sides)
        if found := score_changes(old, new):
            return [
                {"of": f"{one.policies}/{one.task}", "difference": one.mean, "low": one.low, "high": one.high, "n": one.items}
                for one in found
            ]
    before, after = _means(record.metrics), _means(made.record.metrics)
    return [{"of": name, "difference": after[name] - before[name], "n": None} for name in sorted(before.keys() & after.keys())]


def score_text(row: Mapping[str, Any]) -> str:
    interval = f" [{row['low']:+.3f}, {row['high']:+.3f}] n={row['n']}" if row.get("n") else ""
    return f"{row['difference']:+.3f}{interval} ({row['of']})"


def _means(metrics: Mapping[str, Any]) -> dict[str, float]:
    scores = {name: value for name, value in metrics.items() if "/" in name and not name.endswith("/mean")}
    return {name: value for name, value in scores.items() if isinstance(value, int | float)}


def _files(old: Record, new: Record) -> str:
    """Names of differing files, at most three."""
    before, after = ({entry.path: entry.sha256 for entry in record.files} for record in (old, new))
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} differ{'s' if len(names) == 1 else ''}"


def _short(value: Any) -> str:
    return "none" if value is None else str(value)[:12] if len(str(value)) == 64 else str(value)
