"""No row goes that is not near another one, and nearly none stays that is; against Jaccard indices of sets, made plainly."""

import random
from itertools import combinations

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from pedigree.configs.rows.filters import Filter
from pedigree.data.filters import filtering, near_duplicates
from pedigree.data.filters.near_duplicates import BANDS, RECALL, band_length

WORDS = [f"word{number}" for number in range(5000)]


def plain(text: str, size: int) -> set[tuple[str, ...]]:
    words = text.casefold().split()
    return {tuple(words[first : first + size]) for first in range(max(1, len(words) - size + 1))}


def jaccard(one: str, other: str, size: int) -> float:
    a, b = plain(one, size), plain(other, size)
    return len(a & b) / len(a | b)


def conversation(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def applied(texts: list[str], threshold: float = 0.7, shingle: int = 5, workers: int = 1) -> dict[int, str]:
    """Place → evidence; ids are `row` and the place."""
    chosen = [TypeAdapter(Filter).validate_python({"type": "near_duplicates", "threshold": threshold, "shingle": shingle})]
    rows = [conversation(text) for text in texts]
    facts = filtering.look(chosen, rows)
    drops = filtering.decide(chosen, facts, [f"row{place}" for place in range(len(rows))], lambda at: [rows[one] for one in at], workers)
    assert {drop.reason for drop in drops.values()} <= {"near_duplicates"}
    return {place: drop.evidence for place, drop in sorted(drops.items())}


def copies(count: int, seed: int, changes: tuple[int, int] = (0, 12)) -> list[str]:
    """Texts of a hundred words, each followed by one in which some are others."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        words = draw.choices(WORDS, k=100)
        copy = list(words)
        for place in draw.sample(range(100), draw.randint(*changes)):
            copy[place] = draw.choice(WORDS)
        found += [" ".join(words), " ".join(copy)]
    return found


@pytest.mark.parametrize(("threshold", "shingle"), [(0.7, 5), (0.5, 3), (0.85, 5), (1.0, 5)])
def test_planted_copies_are_found_and_nothing_below_the_threshold_is(threshold, shingle):
    texts = copies(400, seed=1)
    near = {place + 1 for place in range(0, 800, 2) if jaccard(texts[place], texts[place + 1], shingle) >= threshold}
    found = applied(texts, threshold, shingle)
    assert set(found) <= near  # exactly: what is proposed is compared
    assert len(found) >= RECALL * len(near) - 1 and 30 < len(near) < 400
    for place, evidence in found.items():
        assert evidence == f"{jaccard(texts[place - 1], texts[place], shingle):.3f} like row{place - 1}"


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 0.95])
def test_pairs_share_a_band_as_often_as_the_theory_of_minhash_says(threshold):
    """Sets of 100 shingles each of which J of all are common; the share of 1,500 pairs with a band in common."""
    draw, length = random.Random(f"{threshold}"), band_length(threshold)
    for similarity in (threshold, threshold - 0.2):
        common = round(2 * 100 * similarity / (1 + similarity))
        texts = []
        for _ in range(1500):
            words = draw.sample(WORDS, 200 - common)
            texts += [" ".join(words[:100]), " ".join(words[100 - common :])]
        bands = near_duplicates.bands(texts, 1, threshold)
        share = (bands[::2] == bands[1::2]).any(axis=1).mean()
        actual = common / (200 - common)
        expected = 1 - (1 - actual**length) ** BANDS
        assert abs(share - expected) < 4 * (max(expected * (1 - expected), 1e-3) / 1500) ** 0.5


def test_the_bands_leave_few_at_the_threshold_and_are_as_long_as_that_allows():
    # 1 - (1 - 0.7^5)^32 = 1 - 0.83193^32 = 0.9972, and 1 - (1 - 0.7^6)^32 = 1 - 0.88235^32 = 0.9817
    assert [band_length(threshold) for threshold in (0.5, 0.7, 1.0)] == [2, 5, 8]
    assert 1 - (1 - 0.8 ** band_length(0.8)) ** BANDS >= RECALL


def test_clusters_are_what_hangs_together_by_pairs_and_keep_their_first_row():
    """A chain: each text has 12 of its 100 words, in one place, other than the text before it, so that only neighbours are near."""
    draw = random.Random(3)
    words = draw.sample(WORDS, 100)
    chain = []
    for step in range(5):
        words = [*words[: 15 * step], *draw.sample(WORDS, 12), *words[15 * step + 12 :]]
        chain.append(" ".join(words))
    others = copies(30, seed=4, changes=(40, 40))
    texts = [others[0], chain[2], *others[1:20], chain[0], chain[1], *others[20:], chain[4], chain[3]]
    place = [texts.index(one) for one in chain]
    assert [jaccard(one, other, 5) > 0.7 for one, other in combinations(chain, 2)] == [gap == 1 for gap in (1, 2, 3, 4, 1, 2, 3, 1, 2, 1)]
    found = applied(texts)
    assert set(found) == {place[0], place[1], place[3], place[4]}  # of all that was said the first is chain[2]
    said = {
        far: f"{jaccard(chain[far], chain[2], 5):.3f} like row1, by way of row{place[near]}: {jaccard(chain[far], chain[near], 5):.3f}"
        for far, near in ((0, 1), (4, 3))
    }
    assert (found[place[0]], found[place[4]]) == (said[0], said[4])
    assert found[place[1]] == f"{jaccard(chain[1], chain[2], 5):.3f} like row1"


@pytest.mark.integration
def test_clusters_are_those_of_all_pairs_compared_plainly_whatever_the_processes(monkeypatch):
    """Families of a text and copies of copies, mixed; and many rows with one frame, more than are compared each with each."""
    draw, texts = random.Random(5), []
    for _ in range(40):
        family = [draw.choices(WORDS, k=60)]
        for _ in range(draw.randint(0, 6)):
            copy = list(draw.choice(family))
            copy[draw.randrange(60)] = draw.choice(WORDS)
            family.append(copy)
        texts += [" ".join(words) for words in family]
    frame = draw.choices(WORDS, k=80)
    texts += [" ".join([*frame, *draw.choices(WORDS, k=4)]) for _ in range(60)]
    draw.shuffle(texts)
    first, sets = list(range(len(texts))), [plain(text, 5) for text in texts]
    for one, other in combinations(range(len(texts)), 2):  # all pairs
        if first[one] != first[other] and len(sets[one] & sets[other]) / len(sets[one] | sets[other]) >= 0.7:
            low, high = sorted((first[one], first[other]))
            first = [low if root == high else root for root in first]
    expected = {place: root for place, root in enumerate(first) if root != place}
    found = applied(texts)
    kept = {place: int(evidence.split(" like row")[1].split(",")[0]) for place, evidence in found.items()}
    assert kept == expected and len(expected) > 120
    monkeypatch.setattr(near_duplicates, "PAIRS", 7)
    assert applied(texts, workers=3) == found


def test_rows_of_a_band_are_compared_with_those_before_them_and_not_with_the_first_alone():
    """Four rows share a band; the second and the last are near, and neither is near the first."""
    keys = np.arange(4 * BANDS, dtype=np.uint32).reshape(4, BANDS)
    keys[:, 7] = 1
    asked = []

    def compare(pairs):
        asked.extend(map(tuple, pairs.T.tolist()))
        return np.array([0.8 if (one, other) == (1, 3) else 0.1 for one, other in pairs.T.tolist()])

    assert near_duplicates.near(keys, 0.7, compare) == {3: near_duplicates.Near(1, 0.8, 1, 0.8)}
    assert sorted(asked) == sorted([*combinations(range(4), 2), (1, 3)])  # each once, and at last what the kept row is said to be like


def test_texts_are_folded_and_borders_of_turns_are_words_of_their_own():
    a, b = (
        {"messages": [{"role": "user", "content": "Say it\n twice"}, {"role": "assistant", "content": "IT it"}]},
        conversation("say It twice it it"),
    )
    ones = [near_duplicates.bands([filtering.row_filters.folded(row)], 1, 1.0).tobytes() for row in (a, b)]
    assert ones[0] != ones[1]
    assert applied(["Say  IT", "say it", "say it so"], threshold=1, shingle=5) == {1: "1.000 like row0"}


def test_a_text_in_a_script_without_spaces_is_read_by_characters():
    text = "我们在这里讨论如何在一个很长的句子里只改变一个字而不改变其他的内容这样就能看出相似的程度有多高"
    # 47 characters have 43 shingles of 5, of which 5 hold the one that is exchanged
    assert len(text) == 47 and applied([text, text[:20] + "他" + text[21:], text[::-1]], threshold=0.5) == {1: f"{38 / 48:.3f} like row0"}


def test_rows_that_went_already_are_near_to_nothing():
    chosen = [TypeAdapter(Filter).validate_python(one) for one in ({"type": "keywords", "words": ["bad"]}, {"type": "near_duplicates"})]
    text = " ".join(WORDS[:60])
    rows = [conversation(f"bad {text}"), conversation(text), conversation(f"{text} more")]
    drops = filtering.decide(chosen, filtering.look(chosen, rows), ["a", "b", "c"], lambda at: [rows[one] for one in at])
    # 60 words have 56 shingles of 5, 61 have one more
    assert {place: (drop.reason, drop.evidence) for place, drop in drops.items()} == {
        0: ("keywords", "bad"),
        2: ("near_duplicates", f"{56 / 57:.3f} like b"),
    }


def test_empty_inputs_and_thresholds_that_would_compare_everything():
    assert applied([]) == {} == applied(["", "one"])
    assert near_duplicates.similarities(["", ""], 5, np.array([[0], [1]])).tolist() == [1.0]
    with pytest.raises(ValidationError, match=r"greater than or equal to 0.5"):
        applied(["one"], threshold=0.3)
