"""Merged policies as artifacts: what transformers loads again, and what is refused before a byte is written."""

import json
import shutil

import models
import pytest
import torch

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.postconditions import unmet
from pedigree.stages.merge import run as merge


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Artifact]:
    return {f"seed_{seed}": models.tiny_policy(tmp_path_factory.mktemp("policy"), seed=seed) for seed in (0, 1)}


def weights(artifact):
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(artifact.payload, dtype=torch.float32).named_parameters())


def altered(folder, artifact, change):
    """A copy of a policy whose payload is changed."""
    shutil.copytree(artifact.path, folder)
    change(folder / "payload")
    return models.publish(folder, "sft", "policy")


def test_a_soup_is_the_mean_and_says_how_far_it_is_from_each(tmp_path, policies):
    job = models.a_job(tmp_path)
    method = {"type": "linear", "weights": {"seed_0": 3.0, "seed_1": 1.0}}
    metrics = merge.run(models.config_of("merge", method=method), {"policies": policies}, job)
    assert unmet("policy", metrics, job) is None
    soup = weights(models.publish(job.out, "merge", "policy"))
    zero, one = (weights(policy) for policy in policies.values())
    for name, merged in soup.items():
        assert torch.equal(merged, 0.75 * zero[name] + 0.25 * one[name])
    apart = [torch.cat([(soup[n] - other[n]).flatten() for n in soup]).norm() for other in (zero, one)]
    sizes = [torch.cat([other[n].flatten() for n in soup]).norm() for other in (zero, one)]
    assert list(metrics["distances"].values()) == pytest.approx([float(a / b) for a, b in zip(apart, sizes, strict=True)], rel=1e-3)


@pytest.mark.parametrize(("t", "kept"), [(0.0, "seed_0"), (1.0, "seed_1")])
def test_slerp_ends_in_its_inputs(tmp_path, policies, t, kept):
    job = models.a_job(tmp_path)
    metrics = merge.run(models.config_of("merge", method={"type": "slerp", "t": t}), {"policies": policies}, job)
    assert metrics["distances"][kept] < 1e-3 < min(distance for label, distance in metrics["distances"].items() if label != kept)


def edited(name, **changes):
    def change(payload):
        path = payload / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def other_template(payload):
    path = payload / "chat_template.jinja"
    path.write_text("{# another #}" + path.read_text())


def other_vocabulary(payload):
    text = (payload / "tokenizer.json").read_text()
    assert '"merges": []' not in text
    read = json.loads(text)
    read["model"]["merges"] = read["model"]["merges"][:-1]
    (payload / "tokenizer.json").write_text(json.dumps(read))


UNLIKE = {
    "rope": (edited("config.json", rope_theta=5.0, rope_parameters={"rope_theta": 5.0}), "rope_parameters of config.json is"),
    "template": (other_template, "their chat templates differ"),
    "tokenizer": (other_vocabulary, "their tokenizers differ"),
}


@pytest.mark.parametrize(("change", "says"), UNLIKE.values(), ids=UNLIKE.keys())
def test_policies_of_unlike_kinds_are_refused(tmp_path, policies, change, says):
    given = {"seed_0": policies["seed_0"], "other": altered(tmp_path / "other", policies["seed_1"], change)}
    job = models.a_job(tmp_path / "job")
    with pytest.raises(StageError, match=f"seed_0 and other cannot be merged: {says}"):
        merge.run(models.config_of("merge"), {"policies": given}, job)
    assert not (job.out / "payload").exists()


def test_what_only_says_how_a_folder_was_written_does_not_keep_policies_apart(tmp_path, policies):
    given = {"seed_0": policies["seed_0"], "other": altered(tmp_path / "other", policies["seed_1"], edited("config.json", use_cache=False))}
    merge.run(models.config_of("merge"), {"policies": given}, models.a_job(tmp_path / "job"))


def test_a_job_is_not_silent_while_it_measures_distances(tmp_path, policies, monkeypatch):
    models.told_while(monkeypatch, merge, "relative_l2", "measuring distances")
    merge.run(models.config_of("merge", method={"type": "linear"}), {"policies": policies}, models.a_job(tmp_path))
