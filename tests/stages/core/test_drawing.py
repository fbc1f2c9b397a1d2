import random
from collections import Counter
from functools import cache
from itertools import combinations

from pedigree.stages.core.drawing import draw_policies

POOL = tuple(f"m{number}" for number in range(8))
PROMPTS = tuple(f"p{number}" for number in range(3000))


@cache
def draws(labels=POOL, prompts=PROMPTS, seed=0, count=4, **on_policy):
    return {prompt: draw_policies(labels, prompt, seed=seed, count=count, **on_policy) for prompt in prompts}


def test_every_prompt_has_so_many_different_policies_in_the_order_of_the_pool():
    assert all(drawn == sorted(set(drawn)) and len(drawn) == 4 for drawn in draws().values())
    assert draw_policies(POOL, "p", seed=0, count=None) == [*POOL] == draw_policies(POOL, "p", seed=0, count=8)


def test_every_pair_of_policies_meets_as_often_as_chance_says():
    """Each pair of 8 is among 4 of them with probability C(6,2) / C(8,4) = 3/14: 642.9 of 3000, with a standard deviation of 22.5."""
    met = Counter(pair for drawn in draws().values() for pair in combinations(drawn, 2))
    assert len(met) == 28 and all(abs(count - 642.9) < 4 * 22.5 for count in met.values())


def test_a_draw_depends_on_seed_and_prompt_and_on_nothing_else():
    found = draws()
    shuffled = tuple(random.Random(1).sample(PROMPTS, 100))
    assert draws(prompts=shuffled) == {prompt: found[prompt] for prompt in shuffled}
    backwards = draws(labels=POOL[::-1])
    assert all(set(backwards[prompt]) == set(drawn) for prompt, drawn in found.items())
    assert sum(drawn != found[prompt] for prompt, drawn in draws(prompts=shuffled, seed=1).items()) > 90  # 69 of 70 sets are others


def test_a_policy_more_changes_only_the_draws_that_it_enters():
    found, more = draws(), draws(labels=(*POOL, "new"))
    assert all("new" in drawn or drawn == found[prompt] for prompt, drawn in more.items())
    assert 1 / 3 < sum("new" in drawn for drawn in more.values()) / len(more) < 5 / 9  # 4/9 are due


def test_a_share_of_the_prompts_has_one_on_policy_answer_and_the_others_none():
    found = draws(on_policy=("m1", "m5"), share=0.3)
    own = Counter(sum(label in ("m1", "m5") for label in drawn) for drawn in found.values())
    assert set(own) == {0, 1} and abs(own[1] / 3000 - 0.3) < 4 * (0.3 * 0.7 / 3000) ** 0.5
    assert all(len(drawn) == 4 for drawn in found.values())
    each = Counter(label for drawn in found.values() for label in drawn if label in ("m1", "m5"))
    assert abs(each["m1"] - each["m5"]) < 4 * own[1] ** 0.5
    assert all("m1" in drawn for drawn in draws(on_policy=("m1",), share=1.0).values())


def test_a_larger_share_keeps_the_prompts_of_a_smaller_one():
    small, large = (draws(on_policy=("m1",), share=share) for share in (0.2, 0.6))
    assert all("m1" in large[prompt] for prompt, drawn in small.items() if "m1" in drawn)


def test_a_policy_to_be_trained_without_a_share_is_drawn_like_the_others():
    assert draws(on_policy=("m1",)) == draws()
