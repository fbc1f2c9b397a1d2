"""Choices between given texts, by a model's likelihood of each.

`choice` {answer}   right if the choice at this place, from 0, is the most likely one; ties go to the first
`mc2` {labels}      the probability of the true ones, Σ_{true} P / Σ P over all (TruthfulQA, Lin et al. 2022, arXiv 2109.07958, §2.3);
                    labels are 1 (true) and 0

A choice's likelihood is Σ_t log P(y_t | prompt, y_<t) over the tokens of its text, without the end-of-turn token. `choice` can divide it by
the number of tokens or characters (`normalise`); `mc2` uses it unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly

NORMALISATIONS = ("none", "tokens", "characters")


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if the answer is not a place, or the labels are not 0 and 1 with at least one of each."""
    if verifier["name"] == "mc2":
        exactly(verifier, {"name", "labels"})
        labels = verifier["labels"]
        if not isinstance(labels, (list, tuple)) or not all(type(one) is int for one in labels) or set(labels) != {0, 1}:
            raise VerifierError(f"verifier {dict(verifier)!r}: labels must be 0 and 1, at least one of each")
        return
    exactly(verifier, {"name", "answer"}, {"normalise"})
    if type(verifier["answer"]) is not int or verifier["answer"] < 0:
        raise VerifierError(f"verifier {dict(verifier)!r}: the answer must be the place of a choice, 0 or above")
    if verifier.get("normalise", "none") not in NORMALISATIONS:
        raise VerifierError(f"normalise {verifier['normalise']!r} is none of {', '.join(NORMALISATIONS)}")


def check_choices(verifier: Mapping[str, Any], choices: Sequence[str]) -> None:
    """Raise VerifierError if the verifier does not fit the number of choices."""
    if verifier["name"] == "mc2" and len(verifier["labels"]) != len(choices):
        raise VerifierError(f"{len(verifier['labels'])} labels for {len(choices)} choices: each needs one")
    if verifier["name"] == "choice" and verifier["answer"] >= len(choices):
        raise VerifierError(f"answer {verifier['answer']} is no place among {len(choices)} choices: 0 to {len(choices) - 1} is meant")


def refuse(verifier: Mapping[str, Any], text: str) -> Verdict:
    raise VerifierError(f"{verifier['name']} compares likelihoods of choices, and a written answer has none")


def decide(verifier: Mapping[str, Any], choices: Sequence[str], logprobs: Sequence[Sequence[float]]) -> Verdict:
    """Score the choices by the log-probabilities of their tokens.

    Args:
        verifier: `choice` or `mc2`.
        choices: [C], texts.
        logprobs: [C][tokens of the choice].

    Raises:
        VerifierError: the verifier does not fit these choices.
        ValueError: a choice has no tokens, or a log-probability is not finite.
    """
    check_choices(verifier, choices)
    for choice, own in zip(choices, logprobs, strict=True):
        if not own or not all(map(math.isfinite, own)):
            raise ValueError(f"choice {choice[:80]!r} has the log-probabilities {list(own)[:5]}: at least one token, and finite ones")
    sums = [sum(own) for own in logprobs]
    if verifier["name"] == "mc2":
        return Verdict(true_mass(sums, verifier["labels"]), choices[sums.index(max(sums))], "share of the true choices")
    divisors = {"none": [1] * len(sums), "tokens": list(map(len, logprobs)), "characters": list(map(len, choices))}
    likelihoods = [total / divisor for total, divisor in zip(sums, divisors[verifier.get("normalise", "none")], strict=True)]
    chosen = likelihoods.index(max(likelihoods))
    right = chosen == verifier["answer"]
    reason = "right" if right else f"{choices[chosen][:80]} instead of {choices[verifier['answer']][:80]}"
    return Verdict(float(right), choices[chosen], reason)


def true_mass(sums: Sequence[float], labels: Sequence[int]) -> float:
    """Σ_{true} e^s / Σ e^s, without overflow.

    Args:
        sums: [C], log-likelihoods.
        labels: [C], 1 if true.
    """
    highest = max(sums)
    masses = [math.exp(one - highest) for one in sums]
    return math.fsum(mass for mass, label in zip(masses, labels, strict=True) if label) / math.fsum(masses)
