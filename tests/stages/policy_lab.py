"""Policy updates on made rollouts, without a sampler: `python policy_lab.py POLICY CASES.json` prints one line of numbers per case.

As a script it runs on as many ranks as it is started with, and prints on the first.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import torch
from pydantic import TypeAdapter

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.optimizer import Optimizer
from pedigree.configs.methods.policy_gradient import Algorithm, Ppo
from pedigree.data.artifacts.artifacts import Artifact, open_artifact
from pedigree.stages.core.batches import collate, document
from pedigree.stages.training.checkpoints import Checkpoints
from pedigree.stages.training.logprobs import PolicyModule
from pedigree.stages.training.models import load_policy, load_value_model
from pedigree.stages.training.policy_update import Learner, TrainingSample, UpdateResult, initial_state, update_policy
from pedigree.stages.training.router_loss import RouterLoss, routers_of
from pedigree.stages.training.trainer import Trainer

TEMPERATURE, LONGEST, GROUP = 0.8, 8, 4
RATE = Optimizer(learning_rate=1e-3, schedule="constant")


def algorithm(type: str, **fields: Any) -> Algorithm:
    critic = {"critic": {"optimizer": {"learning_rate": 1e-2, "schedule": "constant"}}} if type == "ppo" else {}
    return TypeAdapter(Algorithm).validate_python({"type": type, **critic, **fields})


def config(algorithm: dict[str, Any], **fields: Any) -> Any:
    """Of a stage of four steps on answers as made here."""
    sampling = {"temperature": TEMPERATURE, "max_tokens": LONGEST}
    plan = {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": GROUP, "sampling": sampling, "max_prompt_length": 32}
    return models.config_of("rlvr", **{"algorithm": algorithm, **plan, "max_logprob_gap": 10.0, "dtype": "fp32", **fields})


def made_answers(policy: PolicyModule, prompts: int = 4, seed: int = 0, noise: float = 0.0) -> list[TrainingSample]:
    """Random ids of unequal lengths with the log-probs that the policy gives them; the last prompt's rewards are all 1."""
    draw = random.Random(seed)
    answers = []
    for p in range(prompts):
        prompt_ids = [draw.randrange(3, 250) for _ in range(draw.randrange(3, 9))]
        for g in range(GROUP):
            ids = [draw.randrange(3, 250) for _ in range(draw.randrange(1, LONGEST + 1))]
            with torch.no_grad():
                logps_N, _ = policy(collate([(document(prompt_ids, ids),)], Numerics(), 0), temperature=TEMPERATURE)
            logps = [logp + noise * draw.gauss(0, 1) for logp in logps_N.tolist()]
            answers.append(TrainingSample(f"p{p}", prompt_ids, ids, logps, 1.0 if p == prompts - 1 else float(g % 2 if p else g == 0)))
    return answers


def two_turns(policy: PolicyModule, noise: float = 0.0) -> list[TrainingSample]:
    """As `made_answers`, each answer cut into two turns, between which an environment says one to three tokens."""
    draw = random.Random(7)
    answers = []
    for one in made_answers(policy):
        turn, said = draw.randrange(1, len(one.ids) + 1), [draw.randrange(3, 250) for _ in range(draw.randrange(1, 4))]
        ids = [*one.ids[:turn], *said, *one.ids[turn:], 2]
        sampled = [not turn <= place < turn + len(said) for place in range(len(ids))]
        with torch.no_grad():
            logps_N, _ = policy(collate([(document(one.prompt_ids, ids),)], Numerics(), 0), temperature=TEMPERATURE)
        logps = [logp + noise * draw.gauss(0, 1) for logp in logps_N.tolist()]
        answers.append(replace(one, ids=ids, logprobs=logps, sampled=sampled))
    return answers


def learner(chosen: Algorithm, policy: Artifact, numerics: Numerics | None = None, **fields: Any) -> Learner:
    numerics = numerics or Numerics(threads=1)
    settings: dict[str, Any] = {"total_steps": 1000, "dtype": "fp32", "numerics": numerics, "seed": 0}
    trainer = Trainer(load_policy(policy, numerics), optimizer=RATE, **settings)
    critic = None
    if isinstance(chosen, Ppo):
        critic = Trainer(load_value_model(policy, numerics, 0), optimizer=chosen.critic.optimizer, name="critic", **settings)
    reference = load_policy(policy, numerics).eval() if chosen.kl else None
    given = {"reference": reference, "critic": critic, "max_gap": 10.0, **fields}
    router_loss = RouterLoss(trainer, routers_of(policy.payload, None))
    return Learner(chosen, trainer, router_loss, numerics, pad_id=0, temperature=TEMPERATURE, max_tokens=LONGEST, **given)


def steps(made: Learner, answers: list[TrainingSample], count: int) -> list[UpdateResult]:
    """Several updates on the same answers."""
    greedy = [0.5] * (len(answers) // GROUP) if made.algorithm.advantage == "greedy" else None
    done: list[UpdateResult] = []
    for step in range(count):
        done.append(update_policy(made, answers, GROUP, step, done[-1].state if done else initial_state(made.algorithm), greedy))
    return done


def close(made: Learner) -> None:
    for trainer in filter(None, (made.trainer, made.critic)):
        trainer.close()


def interrupted(
    policy: Artifact, fields: dict[str, Any], folder: Path, stop: int, total: int, numerics: tuple[Numerics, Numerics]
) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Steps up to `stop` and a checkpoint; new engines, which go on from it under the second numerics.

    Returns:
        (numbers of the steps after the stop, the weights of all models at the end).
    """
    rows, carried = [], None
    for chosen, steps in zip(numerics, (range(stop), range(stop, total)), strict=True):
        answers = made_answers(load_policy(policy, Numerics()))
        made = learner(algorithm(**fields), policy, chosen)
        job = models.a_job(folder, chosen)
        job.allow_numerics_change = True
        checkpoints = Checkpoints(job, made.trainer, *([made.critic] if made.critic else []))
        state = checkpoints.resume()
        assert (state is None) == (not job.checkpoints.exists())
        carried = state["memory"] if state else initial_state(made.algorithm)
        rows = []
        for step in steps:
            done = update_policy(made, answers, GROUP, step, carried)
            rows.append(done.metrics)
            carried = done.state
        if steps.stop == stop:
            checkpoints.write(stop, {"memory": carried})
            checkpoints._settle()
        weights = [p.detach().clone() for one in (made.trainer, made.critic) if one for p in one.module.parameters()]
        close(made)
    return rows, weights


def numbers_of(policy: Artifact, fields: dict[str, Any], numerics: Numerics, count: int = 2) -> list[dict[str, float]]:
    """`fields` are those of an algorithm, with `turns: 2` for `two_turns`."""
    made_by = two_turns if fields.get("turns") else made_answers
    fields = {name: value for name, value in fields.items() if name != "turns"}
    answers = made_by(load_policy(policy, Numerics()), noise=0.3)
    answers[5] = replace(answers[5], reward=float("nan"))
    made = learner(algorithm(**fields), policy, numerics)
    found = [done.metrics for done in steps(made, answers, count)]
    close(made)
    return found


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[2]).read_text())
    for fields, numerics in cases:
        found = numbers_of(open_artifact(Path(sys.argv[1])), fields, Numerics(**numerics))
        if torch.distributed.get_rank() == 0:
            print("numbers " + json.dumps(found), flush=True)
