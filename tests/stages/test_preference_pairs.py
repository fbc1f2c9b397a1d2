"""From a pool of policies to preferences: who answers what, the best against a random lower one, and each known bug of the scripts that
Tülu 3 was made with (open-instruct, `scripts/synth_pref`)."""

import random
from collections import Counter
from typing import Any

import pytest
from data_lab import publish, rows_of, run_stage
from pydantic import ValidationError

from pedigree.configs.judging.pairing import Pair
from pedigree.configs.judging.pools import Sample
from pedigree.data.records.answer_pool import noted
from pedigree.stages.job.failures import StageError
from pedigree.stages.pair.pair_selection import preferences
from pedigree.stages.pair.run import preference
from pedigree.stages.sample.run import Tally, draws_of

POOL = [f"m{number}" for number in range(6)]


def sample(**fields):
    base = {"sampling": {"max_tokens": 4}, "samples_per_prompt": 2, "prompts": {"count": 4}, "policies_per_prompt": 3, "seed": 7}
    return Sample.model_validate(base | fields)


def prompts(count):
    return [{"id": f"p{number}", "messages": [], "source": "s", "verifier": None} for number in range(count)]


def asked(config, given):
    """(policy, prompt, index, seed) of every request."""
    return {
        (label, one.prompt["id"], one.index, one.seed) for label, drawn in draws_of(config, POOL, given).items() for one in drawn
    }  # fmt: skip


def test_only_drawn_policies_are_asked_each_for_all_its_answers():
    requests = draws_of(sample(), POOL, prompts(50))
    assert sum(map(len, requests.values())) == 50 * 3 * 2  # of 50 * 6 * 2
    by_prompt = Counter((one.prompt["id"], label) for label, drawn in requests.items() for one in drawn)
    assert set(by_prompt.values()) == {2} and set(Counter(prompt for prompt, _ in by_prompt).values()) == {3}
    assert sum(map(len, draws_of(sample(policies_per_prompt=None), POOL, prompts(50)).values())) == 50 * 6 * 2


def test_a_seed_is_that_of_the_answer_whoever_else_was_drawn():
    all_, some = asked(sample(policies_per_prompt=None), prompts(50)), asked(sample(), prompts(50))
    assert some < all_ and asked(sample(), prompts(50)[::-1]) == some > asked(sample(), prompts(20))
    assert len({seed for *_, seed in all_}) == len(all_)


def test_answers_to_a_prompt_take_the_temperatures_in_turn_and_keep_their_seeds():
    warm = {"temperature": [0.6, 1, 0.0], "max_tokens": 4}
    drawn = draws_of(sample(sampling=warm, samples_per_prompt=6), POOL, prompts(5))
    temperatures = {(one.index, one.temperature) for several in drawn.values() for one in several}
    assert temperatures == {(0, 0.6), (1, 1.0), (2, 0.0), (3, 0.6), (4, 1.0), (5, 0.0)}
    alone = draws_of(sample(samples_per_prompt=6), POOL, prompts(5))
    assert {one.temperature for several in alone.values() for one in several} == {None}
    assert [one.seed for several in drawn.values() for one in several] == [one.seed for several in alone.values() for one in several]


@pytest.mark.parametrize(
    ("temperature", "samples", "problem"),
    [
        ([0.6, 1.0], 3, "samples_per_prompt 3 is not divisible by the 2 temperatures 0.6, 1.0: make it a multiple of 2"),
        ([0.6, 1.0, 0.6], 3, r"temperature \[0.6, 1.0, 0.6\] must list"),
        ([1.0], 2, r"temperature \[1.0\] must list at least 2 distinct values"),
        ([], 2, r"temperature \[\] must list"),
        ([0.6, -1.0], 2, "greater than or equal to 0"),
        (["warm", 1.0], 2, "valid number"),
    ],
)
def test_temperatures_that_cannot_be_shared_out_are_refused(temperature, samples, problem):
    with pytest.raises(ValidationError, match=problem):
        sample(sampling={"temperature": temperature, "max_tokens": 4}, samples_per_prompt=samples)


def test_a_recipe_with_several_temperatures_is_read_back_from_its_record():
    config = sample(sampling={"temperature": [0.6, 1.0], "max_tokens": 4})
    assert Sample.model_validate_json(config.model_dump_json()) == config == Sample.model_validate(config.model_dump(mode="json"))


def test_a_policy_that_nobody_drew_is_not_asked():
    assert len(draws_of(sample(policies_per_prompt=1), POOL, prompts(1))) == 1


def test_shares_are_counted_over_prompts_and_answers():
    given = [("a", True), ("a", False), ("b", False), ("b", False), ("b", False)]
    tally = Tally(set())
    for prompt, own in given:
        row: Any = {"prompt_id": prompt, "on_policy": own, "response_ids": [], "text": "", "finish_reason": "stop"}
        tally.note(row)
    assert tally.on_policy_shares() == {"prompts": 0.5, "answers": 0.2}


def test_a_share_without_draws_is_refused():
    with pytest.raises(ValidationError, match=r"on_policy.share 0.5 has no effect without"):
        sample(policies_per_prompt=None, on_policy={"policies": ["m0"], "share": 0.5})


# --- pairs -------------------------------------------------------------------------------------------------------------


def judgment(prompt, label, score, text=None, **more):
    return {
        "id": f"{prompt}/{label}/0", "prompt_id": prompt, "source": "s", "messages": [{"role": "user", "content": f"Q {prompt}"}],
        "policy": label, "policy_content": f"content of {label}", "on_policy": label == "m0", "text": text or f"{prompt} by {label}",
        "finish_reason": "stop", "response_length": 3, "verifier_score": None, "rewards": {}, "reward": None, "disagreement": None,
        "ratings": {}, "rating": score, "score": score, "win_rate": None, **more,
    }  # fmt: skip


def paired(folder, rows, **config):
    given = publish(folder.with_name(folder.name + "_in"), "judgment", rows)
    return run_stage(folder, "pair", {"strategy": "best_vs_random_lower", **config}, judgments=given)


def of(group, **config) -> Any:
    """The preference of one prompt in words, or why there is none."""
    given = [noted(place, row, "score", {}) for place, row in enumerate(group)]
    found = preferences(given, Pair.model_validate({"strategy": "best_vs_random_lower", **config}))
    return found if isinstance(found, str) else preference(found[0], dict(enumerate(group)))


def sides(made):
    return [(one["policy"], one["score"]) for one in made["answers"]]


def made_up(seed, count=60):
    """Each prompt answered by four of six, some answers without a score; ratings are means of four, so quarters."""
    draw = random.Random(seed)
    scores = [None, *(quarter / 4 for quarter in range(8, 21))]
    return [judgment(f"q{number}", label, draw.choice(scores)) for number in range(count) for label in draw.sample(POOL, 4)]


def test_chosen_is_the_best_and_rejected_any_of_those_that_are_lower():
    group = [judgment("q", "m0", 4.5), judgment("q", "m1", 3.0), judgment("q", "m2", 1.0), judgment("q", "m3", 4.25)]
    drawn = Counter(sides(of(group, seed=seed))[1] for seed in range(300))
    assert all(sides(of(group, seed=seed))[0] == ("m0", 4.5) for seed in range(300))
    assert set(drawn) == {("m1", 3.0), ("m2", 1.0), ("m3", 4.25)} and min(drawn.values()) > 66  # 100 are due, deviation 8.2: not the worst


def test_a_pair_says_who_gave_each_answer():
    made = of([judgment("q", "m0", 4.5), judgment("q", "m1", 3.0)])
    assert made["id"] == "q/best_vs_random_lower" and made["strength"] is None
    assert [(one["text"], one["policy_content"], one["on_policy"]) for one in made["answers"]] == [
        ("q by m0", "content of m0", True),
        ("q by m1", "content of m1", False),
    ]


def test_every_pair_holds_the_best_answer_of_its_prompt_and_a_strictly_lower_one(tmp_path):
    """A rating that could not be read was -1 there, and lost against every answer; only prompts that every model had answered were kept."""
    rows = made_up(0)
    found = {row["messages"][0]["content"]: row for row in rows_of(paired(tmp_path / "x", rows))}
    counted = Counter()
    for prompt in {row["prompt_id"] for row in rows}:
        scores = [row["score"] for row in rows if row["prompt_id"] == prompt and row["score"] is not None]
        made = found.pop(f"Q {prompt}", None)
        counted[made is not None] += 1
        assert (made is None) == (len(set(scores)) < 2)
        if made:
            (_, best), (_, lower) = sides(made)
            assert best == max(scores) > lower and lower in scores
            assert all(one["text"].startswith(f"{prompt} by ") for one in made["answers"])
    assert not found and counted[True] > 50


def test_neither_order_nor_rows_that_are_missing_elsewhere_change_a_pair(tmp_path):
    """The released binarisation joined by position after it had dropped rows: from there on, every prompt had another's answers."""
    rows, draw = made_up(1), random.Random(1)
    whole = {row["id"]: row for row in rows_of(paired(tmp_path / "whole", rows))}
    assert rows_of(paired(tmp_path / "shuffled", draw.sample(rows, len(rows)))) == list(whole.values())
    gone = set(draw.sample(sorted({row["prompt_id"] for row in rows}), 20))
    left = [row for row in draw.sample(rows, len(rows)) if row["prompt_id"] not in gone]
    some = {row["id"]: row for row in rows_of(paired(tmp_path / "some", left))}
    assert some == {name: row for name, row in whole.items() if name.split("/")[0] not in gone} and len(some) > 30
    failed = [row | {"score": None} if row["prompt_id"] in gone else row for row in rows]
    assert {row["id"]: row for row in rows_of(paired(tmp_path / "failed", failed))} == some


def test_an_answer_as_good_as_the_best_is_never_the_rejected_one():
    """Rejected was drawn from all but one of the best there, so ties became preferences, and a single answer was paired with itself."""
    group = [judgment("q", "m0", 4.0), judgment("q", "m1", 4.0), judgment("q", "m2", 4.0), judgment("q", "m3", 1.0)]
    found = [sides(of(group, seed=seed)) for seed in range(100)]
    assert {pair[1] for pair in found} == {("m3", 1.0)}
    assert min(Counter(pair[0][0] for pair in found).values()) > 15  # among the best, chance decides: 33 are due
    assert of(group[:3]) == "tie" and of(group[:1]) == "fewer than two scored answers"


def test_prompts_that_give_no_pair_are_counted_by_their_reason(tmp_path):
    rows = [judgment("a", "m0", 3.0), judgment("a", "m1", 2.0), judgment("b", "m0", 3.0), judgment("b", "m1", 3.0)]
    rows += [judgment("c", "m0", 3.0), judgment("d", "m0", 3.0), judgment("d", "m1", 2.75)]
    rows += [judgment("e", "m0", 3.0, "same"), judgment("e", "m1", 2.0, "same")]
    metrics = paired(tmp_path / "x", rows, min_gap=0.5).record.metrics
    assert metrics["dropped"] == {"tie": 1, "fewer than two scored answers": 1, "gap below min_gap": 1, "identical texts": 1}
    assert (metrics["rows"], metrics["prompts"], metrics["mean_margin"]) == (1, 5, 1.0)
    with pytest.raises(StageError, match=r"0 preferences < min_pairs 1.*'tie': 1"):
        paired(tmp_path / "y", rows[2:4])


def test_the_same_words_are_not_preferred_to_themselves():
    group = [judgment("q", "m0", 4.0, "same"), judgment("q", "m1", 2.0, "same"), judgment("q", "m2", 3.0)]
    assert {sides(of(group, seed=seed))[1] for seed in range(30)} == {("m2", 3.0)}
    assert of(group[:2]) == "identical texts"


def test_draws_follow_from_the_seed(tmp_path):
    """Nothing was seeded there: neither which models answered nor which answer was rejected."""
    rows = made_up(1)
    one, again, other = (paired(tmp_path / name, rows, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert one.record.content == again.record.content != other.record.content
    assert asked(sample(), prompts(50)) == asked(sample(), prompts(50)) != asked(sample(seed=8), prompts(50))


def test_the_share_of_on_policy_answers_is_measured_in_the_pairs(tmp_path):
    rows = [judgment("a", "m0", 4.0), judgment("a", "m1", 2.0), judgment("b", "m0", 1.0), judgment("b", "m1", 2.0)]
    rows += [judgment(prompt, label, score) for prompt in ("c", "d", "e") for label, score in (("m1", 1.0), ("m2", 2.0))]
    metrics = paired(tmp_path / "x", rows).record.metrics
    assert metrics["on_policy"] == {"any": 0.4, "best": 0.2, "worse": 0.2}
    swapped = paired(tmp_path / "y", rows, label_noise=0.5, seed=3)
    for row in rows_of(swapped):  # whoever gave a text goes with the text
        assert all(one["text"].endswith(f"by {one['policy']}") for one in row["answers"])
    assert 0 < swapped.record.metrics["exchanged"] < 5
