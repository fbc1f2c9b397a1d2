"""The paces of ranks: what is timed and against what, by a clock that the tests set. On two ranks see `test_two_ranks.py`."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pedigree.configs.language.execution import Numerics
from pedigree.stages.training import paces
from pedigree.stages.training.paces import MOST_LAYERS, Paces, slowest_of

pytestmark = pytest.mark.unit


class Model(nn.Module):
    """As transformers has them: a body of two linear layers, and a head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.base_model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        self.head = nn.Linear(2, 7)


class Module(nn.Module):
    """In place of a `PolicyModule`."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.model = Model(layers)

    def forward(self, batch: Any) -> Tensor:
        return self.model.head(self.model.base_model(batch.input_ids_BT[..., None].float().expand(-1, -1, 2)))


def passed(module: Module, tokens: int) -> None:
    module(SimpleNamespace(input_ids_BT=torch.zeros(1, tokens)))


@pytest.fixture
def clock(monkeypatch):
    """Each look at the clock is a second after the one before."""
    ticks = count()
    monkeypatch.setattr(paces, "perf_counter", lambda: float(next(ticks)))


def test_the_slowest_rank_is_compared_with_the_mean_over_all_exchanges():
    # ranks 0, 1, 2 need 1 + 2, 3 + 3, 1 + 2 seconds: 6 against a mean of 4
    assert slowest_of([[1.0, 3.0, 1.0], [2.0, 3.0, 2.0]]) == {"slowdown": 1.5, "slowest_rank": 1}
    assert slowest_of([[2.0, 2.0]]) == {"slowdown": 1.0, "slowest_rank": 0}
    assert slowest_of([]) == {}


@pytest.mark.parametrize(
    ("numerics", "spans", "work"),
    [
        ({"zero_stage": 2}, 2, 3 + 7),  # two passes of 3 and 7 tokens
        ({"zero_stage": 3}, 4, 2 * (3 + 7) * 2 * 2),  # two layers each of 2 x 2 weights
        ({"sequence_parallel": 2}, 4, 2 * (3 + 7) * 2 * 2),
    ],
)
def test_seconds_are_those_of_passes_or_of_layers_where_a_pass_exchanges_and_are_divided_by_their_work(clock, numerics, spans, work):
    module = Module()
    measured = Paces(module, Numerics(world_size=2, **numerics))
    passed(module, 3)
    passed(module, 7)
    with torch.no_grad():  # of a reference, held-out rows, old log-probs
        passed(module, 1000)
    measured.exchanged([0.0, 0.0])
    assert measured.own == pytest.approx(spans / work)
    measured.exchanged([measured.own, 2 * measured.own])
    assert measured.own == 0 and measured.slowest() == {"slowdown": pytest.approx(4 / 3), "slowest_rank": 1}
    assert measured.slowest() == {}


def test_many_layers_cost_no_more_marks_than_a_few(clock):
    module = Module(layers=3 * MOST_LAYERS)
    measured = Paces(module, Numerics(world_size=2, zero_stage=3))
    passed(module, 1)
    assert MOST_LAYERS / 2 < len(measured._spans) <= MOST_LAYERS


def test_of_a_trainer_that_exchanges_nothing_only_the_last_spans_are_kept(clock, monkeypatch):
    """As the trainer of a value model; the kept ones are of 3, 4 and 5 tokens."""
    monkeypatch.setattr(paces, "MOST_SPANS", 3)
    module = Module()
    measured = Paces(module, Numerics(world_size=2))
    for tokens in range(1, 6):
        passed(module, tokens)
    measured.exchanged([0.0, 0.0])
    assert measured.own == pytest.approx(3 / (3 + 4 + 5))


def test_one_rank_has_nothing_to_be_compared_with():
    module = Module()
    measured = Paces(module, Numerics())
    passed(module, 3)
    measured.exchanged([0.0])
    assert measured.own == 0 and measured.slowest() == {}


def test_on_gpus_events_mark_the_times_and_are_read_only_once_the_device_has_done_its_work(monkeypatch):
    ticks, done = count(), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(ticks)

        def elapsed_time(self, later: "Event") -> float:
            assert done
            return 1000.0 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    module = Module()
    measured = Paces(module, Numerics(device="cuda", world_size=2, zero_stage=2))
    passed(module, 4)
    done.append(True)
    measured.exchanged([0.0, 0.0])
    assert measured.own == pytest.approx(1 / 4)
