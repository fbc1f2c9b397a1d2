"""New weights under running answers, with a real engine."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_sampler import PLACEMENT, STOP, hf_logprobs
from tiny_models import make
from waiting import deadline

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Sampling
from pedigree.stages.job.failures import StageError
from pedigree.stages.rlvr import weight_transfer
from pedigree.stages.sampling.engines import Fleet, open_sampler
from pedigree.stages.sampling.sampler import Generation, Request, Sampler, write_version

TOKENS = 900
"""Of an answer: it is to be running still when the weights come."""
TRIES = 5
"""Of sending them in time."""
LONG = Sampling(temperature=0.7, max_tokens=TOKENS)
REQUESTS = [Request([*range(3, 20 + number)], number) for number in range(6)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {name: make(folder / name, seed=seed, context=1024) for seed, name in enumerate(("old", "new"))}
    write_version(found["new"], 5)
    return found


@pytest.fixture(scope="module")
def engine(models) -> Iterator[Sampler]:
    numerics = Numerics(threads=1)
    with open_sampler(
        models["old"], dtype="fp32", context=1024, numerics=numerics, placement=PLACEMENT, inline=False, in_flight=True
    ) as opened:
        yield opened


def updated_in_flight(engine: Sampler, models: dict[str, Path]) -> dict[int, Generation]:
    """Answers under which new weights came; none where some had ended before, as they do when this process gets no processor meanwhile."""
    fleet, running, found = Fleet([engine]), threading.Event(), dict[int, Generation]()
    given = load_file(models["new"] / "model.safetensors")
    streaming = threading.Thread(
        target=lambda: fleet.answer(REQUESTS, LONG, [], found.__setitem__, lambda _: running.set(), None), daemon=True
    )
    streaming.start()
    assert running.wait(deadline(120))
    trainer: Any = SimpleNamespace(rank=0, weights=lambda: given.items())
    sent = []
    for part in weight_transfer.parts(trainer, weight_transfer.HostMemory(trainer), 5):
        fleet.update(part)  # returns while the answers still run, but no token is sampled between two parts
        sent.append(part.version)
    assert len(sent) > 2 and sent[-1] == 5
    in_time = streaming.is_alive() and not found
    streaming.join(deadline(120))
    return found if in_time and all(one.changes for one in found.values()) else {}


@pytest.mark.slow
def test_running_answers_go_on_under_new_weights_and_each_token_is_that_of_its_version(engine, models, monkeypatch):
    monkeypatch.setattr(weight_transfer, "PART_BYTES", 1 << 16)
    found = dict[int, Generation]()
    for _ in range(TRIES):
        if found := updated_in_flight(engine, models):
            break
        engine.load(models["old"])
    for place, request in enumerate(REQUESTS):
        one = found[place]
        ((version, start),) = one.changes
        assert one.version == 0 and version == 5 and 0 < start < len(one.response_ids) == TOKENS
        assert one.versions == [(0, start), (5, TOKENS - start)]
        old, new = (hf_logprobs(models[name], request, one.response_ids, 0.7) for name in ("old", "new"))
        sampled = torch.tensor(one.logprobs)
        # a KV cache of the old weights would move the later tokens by tenths of a nat
        assert torch.allclose(sampled[:start], old[:start], atol=1e-3) and torch.allclose(sampled[start:], new[start:], atol=1e-3)
        assert (old[start:] - new[start:]).abs().mean() > 0.1
    (later,) = engine.generate(REQUESTS[:1], LONG, STOP)
    assert later.version == 5 and not later.changes and Generation(**later.as_json()) == later


@pytest.mark.slow
def test_an_engine_that_refuses_weights_in_flight_fails_its_stream_and_the_load(engine, models, tmp_path):
    """Neither thread waits for an answer that does not come. This is the end of the engine."""
    broken = shutil.copytree(models["new"], tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")
    failed: list[BaseException] = []
    running = threading.Event()

    def stream() -> None:
        try:
            engine.stream(REQUESTS, LONG, [], lambda *_: None, lambda _: running.set())
        except StageError as error:
            failed.append(error)

    streaming = threading.Thread(target=stream, daemon=True)
    streaming.start()
    assert running.wait(deadline(120))
    with pytest.raises(StageError):
        engine.load(broken)
    streaming.join(deadline(60))
    assert failed
