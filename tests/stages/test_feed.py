"""Prefetching: items come in order while the consumer works, errors are raised where they belong, and no thread is left."""

import itertools
import signal
import threading

import pytest
import torch

from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.batches import collate, document, plan_step
from pedigree.stages.job.failures import Preempted
from pedigree.stages.training.feed import GlobalBatch, feed, prefetch

CPU = torch.device("cpu")


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_items_come_in_order_and_the_thread_ends_with_them():
    with prefetch(range(100), depth=3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []
    assert no_thread_is_left()


def test_the_next_item_is_made_while_the_consumer_is_busy_with_one():
    second = threading.Event()

    def make():
        yield 1
        second.set()
        yield 2

    with prefetch(make()) as items:
        assert next(items) == 1
        second.wait()  # nobody has asked for it
        assert next(items) == 2


def test_no_more_than_the_depth_is_made_before_it_is_taken():
    made, third = [], threading.Event()

    def make():
        for number in itertools.count():
            made.append(number)
            if number == 3:
                third.set()
            yield number

    with prefetch(make(), depth=3) as items:
        assert next(items) == 0
        third.wait()
    assert made == [0, 1, 2, 3] and no_thread_is_left()


def test_an_error_is_raised_where_its_item_would_have_been():
    def make():
        yield 1
        raise KeyError("row-7")

    with prefetch(make()) as items:
        assert next(items) == 1
        with pytest.raises(KeyError, match="row-7"):
            next(items)
    assert no_thread_is_left()


@pytest.mark.parametrize("error", [Preempted, KeyboardInterrupt, RuntimeError])
def test_the_thread_ends_with_a_consumer_that_fails(error):
    with pytest.raises(error), prefetch(itertools.count(), depth=2) as items:
        next(items)
        raise error
    assert no_thread_is_left()


def test_a_signal_reaches_a_consumer_that_waits():
    asked, go_on = threading.Event(), threading.Event()

    def make():
        asked.set()
        go_on.wait()
        yield 1

    def stop(*_):
        go_on.set()
        raise Preempted

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Preempted), prefetch(make()) as items:
            asked.wait()
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            for _ in items:
                go_on.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert no_thread_is_left()


def units(*lengths):
    return [(document(range(5, 8), range(9, 9 + length)),) for length in lengths]


def test_a_feed_gives_the_micro_batches_of_every_rank_batch_by_batch():
    numerics = Numerics(micro_batch_tokens=16)
    batches = [units(4, 9, 2, 7), [], units(3, 3, 11)]
    for rank in range(2):
        given = (GlobalBatch(batch, lambda units: {"units": torch.tensor(units)}) for batch in batches)
        with feed(given, rank, 2, numerics, 0, CPU) as fed:
            for batch in batches:
                planned = plan_step(batch, rank, 2, numerics) if batch else []
                found = list(fed.micro_batches())
                assert [(made.units, made.weight) for made in found] == [(micro.units, micro.weight) for micro in planned]
                for made in found:
                    expected = collate([batch[i] for i in made.units], numerics, 0)
                    assert torch.equal(made.batch.input_ids_BT, expected.input_ids_BT)
                    assert made.extras["units"].tolist() == list(made.units)


def test_every_tensor_of_a_micro_batch_is_moved():
    """On the meta device there are no values: what stayed behind would be seen."""
    pair = (document([5, 6, 7], [8, 9]), document([5, 6, 7], [3]))
    for numerics in (Numerics(), Numerics(packing=False)):
        with feed([GlobalBatch([pair], lambda _: {"labels": torch.ones(1)})], 0, 1, numerics, 0, torch.device("meta")) as fed:
            (made,) = fed.micro_batches()
        batch = made.batch
        tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)] + list(made.extras.values())
        if batch.spans is not None:
            assert batch.spans.key_places is not None
            tensors += [batch.spans.queries_S1, batch.spans.keys_S1, batch.spans.key_places]
        assert len(tensors) == (11 if numerics.packing else 9) and all(tensor.is_meta for tensor in tensors)
