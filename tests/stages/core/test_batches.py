import math
import random

import pytest
import torch

from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.batches import (
    Document,
    best_fit,
    collate,
    document,
    plan_step,
    share_prompts,
    shared_prefix,
    step_rows,
    unit_tokens,
)
from pedigree.stages.core.spans import Span


def docs(*lengths):
    return [(Document.of(tuple(range(length)), (False, *[True] * (length - 1))),) for length in lengths]


def test_an_answer_is_trained_and_its_prompt_is_not():
    doc = document([5, 6], [7, 2])
    assert doc.ids.tolist() == [5, 6, 7, 2] and doc.trained.tolist() == [False, False, True, True]
    assert (doc.num_trained, doc.prompt_length, len(doc)) == (2, 2, 4)


def test_best_fit_fills_the_fullest_bin_that_still_has_room():
    # capacity 10: 7, then 5; 3 fits beside the 7 exactly (0 left beats 2 left); 4 goes beside the 5
    assert best_fit(range(4), [7, 5, 3, 4], 10) == [[0, 2], [1, 3]]


def test_a_document_longer_than_the_budget_is_alone_and_not_lost():
    assert best_fit(range(3), [20, 3, 4], 10) == [[0], [2, 1]]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("numerics", [Numerics(micro_batch_tokens=16), Numerics(packing=False, micro_batch_sequences=2)])
def test_every_unit_counts_once_and_all_ranks_make_equally_many_passes(world, numerics):
    units = docs(9, 3, 8, 2, 7, 5, 4)
    plans = [plan_step(units, rank, world, numerics) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    counted = sorted(unit for plan in plans for micro in plan if micro.weight for unit in micro.units)
    assert counted == list(range(7))


def like_tulu(seed, rows=128):
    """Log-normal around a median of 400 tokens, cut to 4096."""
    draw = random.Random(seed)
    return [min(4096, max(16, round(draw.lognormvariate(math.log(400), 0.8)))) for _ in range(rows)]


def tokens_by_rank(units, world, numerics):
    plans = [plan_step(units, rank, world, numerics) for rank in range(world)]
    return [sum(unit_tokens(units[i], numerics) for micro in plan if micro.weight for i in micro.units) for plan in plans]


@pytest.mark.parametrize("world", [8, 32])
@pytest.mark.parametrize("padded", [False, True])
def test_ranks_have_equally_many_tokens_unless_one_row_is_longer_than_a_ranks_share(world, padded):
    """At 8 ranks, the busiest has at most 1.05 of the mean; by turns, it would have 1.36. At 32, four rows each, one row may be more than
    the mean."""
    numerics = Numerics(packing=not padded, micro_batch_tokens=8192)
    for seed in range(8):
        lengths = like_tulu(seed)
        tokens = tokens_by_rank(docs(*lengths), world, numerics)
        assert sum(tokens) == sum(lengths)
        assert max(tokens) <= (1.1 if padded else 1.05) * max(sum(lengths) / world, max(lengths)), seed


def test_answers_that_share_a_prompt_are_dealt_together_by_what_they_cost_together():
    """Prompts of 100 tokens: three units of two answers cost 120 each, and a single one of 260 as much as two of them."""
    pair = tuple(document(range(100), [7] * 10) for _ in range(2))
    alone = (document(range(100), [7] * 160),)
    numerics = Numerics(micro_batch_tokens=1024)
    assert [unit_tokens(unit, numerics) for unit in (pair, alone)] == [120, 260]
    plans = [plan_step([pair, alone, pair], rank, 2, numerics) for rank in range(2)]
    assert [[micro.units for micro in plan] for plan in plans] == [[(1,)], [(0, 2)]]


@pytest.mark.parametrize("numerics", [Numerics(micro_batch_tokens=4096), Numerics(packing=False, micro_batch_sequences=3)])
def test_dealing_by_length_costs_no_idle_pass(numerics):
    """Against units dealt by turns, each rank's packed alone."""
    idle, by_turns = 0, 0
    for seed in range(20):
        units = docs(*like_tulu(seed, 50))
        plans = [plan_step(units, rank, 8, numerics) for rank in range(8)]
        turns = [len(plan_step(units[rank::8], 0, 1, numerics)) for rank in range(8)]
        assert len(plans[0]) <= max(turns)
        idle += sum(micro.weight == 0 for plan in plans for micro in plan)
        by_turns += sum(max(turns) - passes for passes in turns)
    assert idle <= by_turns


def test_rows_of_equal_length_are_dealt_by_turns_and_one_rank_keeps_the_order():
    padded = Numerics(packing=False, micro_batch_sequences=2)
    plans = [plan_step(docs(*[5] * 6), rank, 2, padded) for rank in range(2)]
    assert [[micro.units for micro in plan] for plan in plans] == [[(0, 2), (4,)], [(1, 3), (5,)]]
    assert [micro.units for micro in plan_step(docs(3, 9, 2, 7), 0, 1, padded)] == [(0, 1), (2, 3)]


def test_more_ranks_than_units_leaves_idle_passes_without_weight():
    plans = [plan_step(docs(4), rank, 2, Numerics()) for rank in range(2)]
    assert [micro.weight for micro in plans[0]] == [1.0] and [micro.weight for micro in plans[1]] == [0.0]


def test_packed_tensors_by_hand():
    batch = collate([(document([5], [6, 7]),), (document([8, 9], [2]),)], Numerics(), pad_id=0)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 2]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch.attention_mask_BT is None
    assert batch.places_N.tolist() == [0, 1, 4] and batch.targets_N.tolist() == [6, 7, 2]
    assert batch.documents_N.tolist() == [0, 0, 1] and batch.last_D.tolist() == [2, 5]


PAIR = (document([5, 6, 7], [8, 9, 2]), document([5, 6, 7], [8, 2]))


def test_answers_share_their_prompt_and_nothing_that_is_trained():
    assert shared_prefix(PAIR) == 3  # the 8 that both begin with is trained
    assert shared_prefix((document([5, 6], [8]), document([5, 7], [8]))) == 1
    assert shared_prefix((document([], [5, 6]), document([], [5, 7]))) == 0
    assert shared_prefix((Document.of((5, 6), (False, False)), Document.of((5, 6), (False, False)))) == 1  # each keeps a token of its own
    assert unit_tokens(PAIR, Numerics()) == 3 + 3 + 2
    assert unit_tokens(PAIR, Numerics(attention="sdpa")) == unit_tokens(PAIR, Numerics(packing=False)) == 11


def test_a_shared_prompt_by_hand():
    batch = collate([(document([4], [2]),), PAIR], Numerics(), pad_id=0)
    assert batch.input_ids_BT.tolist() == [[4, 2, 5, 6, 7, 8, 9, 2, 8, 2]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 0, 1, 2, 3, 4, 5, 3, 4]]
    # the first token of both answers is predicted at the prompt's last place, 4
    assert batch.places_N.tolist() == [0, 4, 5, 6, 4, 8] and batch.targets_N.tolist() == [2, 8, 9, 2, 8, 2]
    assert batch.documents_N.tolist() == [0, 1, 1, 1, 2, 2] and batch.last_D.tolist() == [1, 7, 9]
    assert batch.spans is not None
    assert batch.spans.all == (Span(0, 2), Span(2, 3), Span(5, 3, 2, 3), Span(8, 2, 2, 3))
    assert batch.spans.queries_S1.tolist() == [0, 2, 5, 8, 10] and batch.spans.keys_S1.tolist() == [0, 2, 5, 11, 16]
    assert batch.spans.key_places is not None
    assert batch.spans.key_places.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 2, 3, 4, 8, 9]


def test_answers_to_one_prompt_are_cut_to_units_that_fit():
    group = [document([5] * 10, [6, 2]), document([5] * 10, [7, 7, 2]), document([5] * 10, [8, 2])]
    assert [len(unit) for unit in share_prompts(group, Numerics(micro_batch_tokens=17))] == [3]  # 10 + 2 + 3 + 2
    assert [len(unit) for unit in share_prompts(group, Numerics(micro_batch_tokens=16))] == [2, 1]
    assert [len(unit) for unit in share_prompts(group, Numerics(attention="sdpa"))] == [1, 1, 1]


def test_padding_is_masked_by_length_so_an_end_token_that_pads_is_still_trained():
    eos = 2
    batch = collate([(document([5], [6, eos]),), (document([8], [eos]),)], Numerics(packing=False), pad_id=eos)
    assert batch.input_ids_BT.tolist() == [[5, 6, 2], [8, 2, 2]]
    assert batch.attention_mask_BT is not None and batch.attention_mask_BT.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.targets_N.tolist() == [6, eos, eos] and batch.last_D.tolist() == [2, 4]


def test_an_epoch_visits_every_row_once_in_an_order_that_only_seed_and_epoch_decide():
    rows = [row for step in range(3) for row in step_rows(step, 10, 4, seed=5)]
    assert sorted(rows) == list(range(10)) and rows == step_rows(0, 10, 10, seed=5)
    second = [row for step in range(3, 6) for row in step_rows(step, 10, 4, seed=5)]
    assert sorted(second) == list(range(10)) and second != rows
    assert step_rows(0, 10, 10, seed=6) != rows
    assert [step_rows(step, 10, 4, seed=None) for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def drawn_units(seed):
    """Units of one to three documents, some with a prompt in common, some with gaps in what is trained."""
    draw = random.Random(seed)
    units = []
    for _ in range(draw.randrange(1, 6)):
        prompt = [draw.randrange(9) for _ in range(draw.randrange(6))]
        unit = [document(prompt, [draw.randrange(9) for _ in range(draw.randrange(1, 7))]) for _ in range(draw.randrange(1, 4))]
        if draw.random() < 0.3:
            ids = [draw.randrange(9) for _ in range(8)]
            unit = [Document.of(tuple(ids), tuple(draw.random() < 0.5 for _ in ids))]
        units.append(tuple(unit))
    return units


@pytest.mark.parametrize("numerics", [Numerics(), Numerics(attention="sdpa"), Numerics(packing=False)])
@pytest.mark.parametrize("seed", range(12))
def test_every_place_holds_what_its_document_says(numerics, seed):
    """Token t of a document is predicted at the place of token t - 1, which stands at position t - 1."""
    units = drawn_units(seed)
    batch = collate(units, numerics, pad_id=0)
    ids, positions = batch.input_ids_BT.flatten().tolist(), batch.position_ids_BT.flatten().tolist()
    documents = [doc for unit in units for doc in unit]
    expected = [(d, t) for d, doc in enumerate(documents) for t in range(1, len(doc)) if doc.trained[t]]
    assert batch.num_documents == len(documents) and len(batch.targets_N) == len(expected)
    found = zip(batch.documents_N.tolist(), batch.places_N.tolist(), batch.targets_N.tolist(), strict=True)
    for (d, t), (owner, place, target) in zip(expected, found, strict=True):
        assert (owner, target) == (d, documents[d].ids[t])
        assert (ids[place], positions[place]) == (documents[d].ids[t - 1], t - 1)
    for doc, place in zip(documents, batch.last_D.tolist(), strict=True):
        assert (ids[place], positions[place]) == (doc.ids[-1], len(doc) - 1)
    assert {batch.places_N.dtype, batch.targets_N.dtype, batch.documents_N.dtype, batch.last_D.dtype} == {torch.long}


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65])
def test_what_prompts_have_in_common_ends_at_the_first_difference(length):
    same = tuple(range(length))
    for place in range(length):
        other = (*same[:place], -1, *same[place + 1 :])
        unit = tuple(Document.of((*ids, 99), (False,) * (length + 1)) for ids in (same, other))
        assert shared_prefix(unit) == place
    unit = tuple(Document.of((*same, end), (False,) * (length + 1)) for end in (99, 98))
    assert shared_prefix(unit) == length
