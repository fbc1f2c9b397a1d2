"""The benchmark of wrong labels trains on what it says: as many wrong ones, none of the pairs that are held out."""

import pytest

from benchmarks import label_noise
from pedigree.data.records import records


def test_pairs_held_out_are_clean_and_in_no_training(tmp_path):
    study = label_noise.Study(tmp_path, seed=1, noise=0.4, digits=4)
    trained = records.load(study.pairs)
    wrong = list(map(label_noise.exchanged, trained))
    assert len(trained) > 100 and sum(wrong) / len(wrong) == pytest.approx(0.4, abs=0.1)
    assert not any(map(label_noise.exchanged, study.held)) and len(study.held) > 20
    assert not {row["id"] for row in trained} & {row["id"] for row in study.held}
    assert {row["messages"][0]["content"] for row in study.held} <= {row["messages"][0]["content"] for row in trained}


def test_every_way_to_take_wrong_labels_is_measured_on_the_same_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(label_noise, "TRAINING", label_noise.TRAINING | {"epochs": 1})
    found = label_noise.Study(tmp_path, seed=1, noise=0.25, digits=3).found()
    names = {"dpo", "cdpo", "robust", "ipo_mean", label_noise.LEFT_OUT, label_noise.TOLD_APART}
    assert found.keys() == names and all(0 <= value <= 1 for value in found.values())
    pairs = [records.load(label_noise.open_artifact(tmp_path / name)) for name in ("trained-pairs", "trusted")]
    assert len(pairs[1]) == len(pairs[0]) - round(0.25 * len(pairs[0])) and [row for row in pairs[0] if row in pairs[1]] == pairs[1]


def test_numbers_by_hand():
    assert label_noise.right([0.5, -1.0, 0.0, 2.0]) == 0.5  # a tie is no success
    # wrong pairs at -1 and 1, right ones at 0 and 1: -1 < 0, -1 < 1, 1 = 1
    assert label_noise.told_apart([-1.0, 0.0, 1.0, 1.0], [True, False, True, False]) == (1 + 1 + 0 + 0.5) / 4
    outcomes = [(0.1, {"dpo": share}) for share in (0.7, 0.9, 0.8)]
    assert label_noise.collected(outcomes) == {"0.1": {"dpo": {"median": 0.8, "low": 0.7, "high": 0.9}}}
