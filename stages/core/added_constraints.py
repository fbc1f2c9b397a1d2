"""Draw verifiable constraints for a prompt, with their values and wording. A pure function of (seed, prompt id), the prompt and the rules
of `configs/constraints.yaml`, independent of other prompts and their order.
"""

import random
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any, NamedTuple

from pedigree.configs.judging.constraining import REPEATED, Constrain, ConstraintForm, ConstraintRules, SomeOf
from pedigree.data.records.records import Prompt, derived_id

VERIFIER = "ifeval"
PART = "constrained"
"""Suffix of the id of a prompt with added constraints."""


class Constraint(NamedTuple):
    """One constraint of a prompt."""

    instruction: dict[str, Any]
    """The id and arguments for the verifier."""
    sentence: str
    """The wording in the user's turn."""


def constrained(prompt: Mapping[str, Any], config: Constrain, rules: ConstraintRules) -> Prompt | str:
    """Add constraints to a prompt's last turn, or return why that is impossible.

    Existing constraints are kept; added ones are compatible with them.
    """
    verifier = prompt["verifier"] or {"name": VERIFIER, "instructions": []}
    if verifier["name"] != VERIFIER:
        return f"it has the verifier {verifier['name']}"
    *before, last = prompt["messages"]
    if last["role"] != "user":
        return "it ends with the result of a call"
    chance = random.Random(f"{config.seed}/constrain/{prompt['id']}")
    count = config.min_constraints + int(chance.random() * (config.max_constraints - config.min_constraints + 1))
    added = drawn(rules, count, chance, last["content"], [one["id"] for one in verifier["instructions"]], config.instructions)
    if len(added) < config.min_constraints:
        return "too few constraints fit it"
    content = f"{last['content']}\n\n{' '.join(one.sentence for one in added)}"
    instructions = [*verifier["instructions"], *(one.instruction for one in added)]
    kept = {name: value for name, value in verifier.items() if name != "score"}
    verifier = {**kept, "instructions": instructions, **({"score": "share"} if config.score == "share" else {})}
    made: Prompt = {**prompt, "id": derived_id(prompt["id"], PART), "messages": [*before, {**last, "content": content}]}  # pyright: ignore
    return {**made, "verifier": verifier}


def drawn(
    rules: ConstraintRules, count: int, chance: random.Random, text: str, given: Sequence[str], among: Sequence[str] | None
) -> list[Constraint]:
    """Draw constraints that are compatible with each other and with the prompt's own; fewer than `count` if no more fit.

    Args:
        text: the user's last turn.
        given: the prompt's own instructions.
        among: instructions to draw from; None for all.
    """
    names = sorted(rules.instructions if among is None else among)
    chance.shuffle(names)
    taken, found = list(given), []
    for name in names:
        if len(found) == count:
            break
        if rules.incompatible[name].isdisjoint(taken):
            taken.append(name)
            found.append(_worded(name, chance.choice(rules.instructions[name].forms), chance, text))
    return found


def _worded(name: str, form: ConstraintForm, chance: random.Random, text: str) -> Constraint:
    """Draw the values and wording of a constraint."""
    instruction: dict[str, Any] = {"id": name, **({REPEATED: text.strip()} if form.repeats else {})}
    worded: dict[str, str] = {}
    for argument, values in form.arguments.items():
        if isinstance(values, SomeOf):
            instruction[argument] = chance.sample(values.of, chance.choice(values.some))
            worded[argument] = ", ".join(instruction[argument])
        else:
            instruction[argument] = chance.choice(list(values))
            worded[argument] = values[instruction[argument]] if isinstance(values, dict) else str(instruction[argument])
    return Constraint(instruction, Template(chance.choice(form.sentences)).substitute(worded))
