"""The recipe of a description: quantities that other trainers state in parts become fields; comments mark the lines to look at."""

import textwrap
from collections.abc import Iterator
from typing import Any

from pedigree.configs.base.hub_names import PIN_ME
from pedigree.configs.language.kinds import KINDS
from pedigree.pipelines.importing.description import Description, flow
from pedigree.pipelines.importing.named_rows import UNNAMED, located

STAGES = {
    "sft": ("sft", "data", "conversation"), "dpo": ("preference_train", "preferences", "preference"),
    "orpo": ("preference_train", "preferences", "preference"), "kto": ("preference_train", "preferences", "preference"),
    "reward": ("reward_model", "preferences", "preference"), "grpo": ("rlvr", "prompts", "prompt"),
}  # fmt: skip
"""Method → kind of stage, its port for rows, their type."""
STEPS = 1000
"""Stands for a number of steps that depends on the number of prompts."""
MEASURED = 0.01
"""Share of pairs that measures a reward model if the config holds out none."""
THINKS = "^<think>(?!.*<think>)(.*?)</think>.*$"
"""TRL's `think_format_reward`."""
AGGREGATIONS = {"dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
"""How the losses of TRL sum over tokens, where `gspo` does it differently."""
CHANGED = "these are the defaults of open-instruct before March 2026; later versions have others"
NODE = 8
"""GPUs of the profile `gpu8`."""
WIDTH = 130
MARK = "# check: "
HEAD = (
    "`# check:` marks what this recipe does not express, or what means something else here. Nothing is evaluated yet: docs/suites.md "
    "describes suites, against which training rows are then checked."
)


def recipe_text(description: Description, file: str) -> tuple[str, int]:
    """The text of the recipe of a config called `file`, and the number of its lines that are marked for a look."""
    kind, port, record = STAGES[description.method]
    base = {"kind": "source_model", **_model(description), "dtype": description.take("model.dtype", "bf16")}
    fields = _fields(description, kind)
    repeats = any(source.get("epochs", 0) > 1 for source in description.sources)
    rows = {"kind": "prepare_data", "record": record, **({"draw": "after_filters"} if repeats else {}), "sources": description.sources}
    train = {"kind": kind, "in": {"policy": "base", port: "rows" if kind == "rlvr" else ["rows"]}, **fields}
    left_out = f"Left out, because it does not change the model: {', '.join(description.left_out)}." if description.left_out else ""
    lines = [
        f"description: {flow(f'{description.method} as in {file}, a config of {description.trainer}')}",
        f"execution: {'gpu8' if (description.devices or 1) >= NODE else 'gpu'}",
        *textwrap.wrap(f"{HEAD} {left_out}", WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False),
        "",
        "stages:",
        *_stage(description, "base", base),
        *_stage(description, "rows", rows),
        *_stage(description, description.method, train),
    ]
    return "\n".join(lines) + "\n", sum(line.lstrip().startswith(MARK) for line in lines)


def _stage(description: Description, name: str, stage: dict[str, Any]) -> Iterator[str]:
    """The lines of a stage: above each field what to check about it, and at the end what to check that has no field."""
    part = name if name in ("base", "rows") else "train"
    checks = {place: texts for place, texts in description.checks.items() if _part(place) == part}
    yield f"  {name}:"
    for field, value in stage.items():
        for place in [place for place in checks if place.partition(".")[0] == field or (place, field) == ("rows", "sources")]:
            yield from (f"    {MARK}{text}" for text in checks.pop(place))
        if field == "sources":
            yield "    sources:"
            yield from (f"      - {flow(source)}" for source in value)
        else:
            comment = _comment(description, field, value) if part == "train" else description.notes.get(field)
            yield f"    {field}: {flow(value)}" + (f"  # {comment}" if comment else "")
    yield from (f"    {MARK}{text}" for texts in checks.values() for text in texts)


def _part(place: str) -> str:
    return "base" if place.startswith("model.") else "rows" if place == "rows" else "train"


def _comment(description: Description, field: str, value: Any) -> str:
    """How a field came about: what it is the product of, or which of its values are defaults of the trainer."""
    default = f"{description.trainer}'s default"
    if field in description.notes or not isinstance(value, dict):
        return description.notes.get(field, default if field in description.assumed else "")
    assumed = {name.rpartition(".")[2] for name in description.assumed}
    return f"{default}: {', '.join(inner)}" if (inner := [name for name in value if name in assumed]) else ""


def _model(description: Description) -> dict[str, Any]:
    place = located(description, description.take("model.name"), "model.name", description.take("model.revision"))
    template, bos = description.take("model.template"), description.take("model.add_bos")
    if "model.template" in description.assumed:
        description.notes["chat_template"] = f"{description.trainer}'s default"
    fields = {"source": {"type": "folder" if "path" in place else "hub", **place}}
    return fields | ({"chat_template": template} if template else {}) | ({"add_bos": True} if bos else {})


def _fields(description: Description, kind: str) -> dict[str, Any]:
    """The fields of the stage that trains, in the order of its config."""
    if not description.sources:
        description.check("rows", "no dataset is named in the file: docs/data.md lists sources")
        description.sources.append({"type": "hub", "repo": UNNAMED, "revision": PIN_ME, "split": "train"})
    for derive in (_lora, _warmup, _rollouts if kind == "rlvr" else _training):
        derive(description)
    known, nested = KINDS[kind].config.model_fields, dict[str, Any]()
    for name, value in description.values.items():
        field, _, inner = name.partition(".")
        if field in known:
            place = nested.setdefault(field, {}) if inner else nested
            place[inner or field] = value
        elif name not in description.assumed:
            description.check("train", f"{name} {flow(value)}: {kind} has no such setting")
    return {name: nested[name] for name in known if name in nested}


def _lora(description: Description) -> None:
    wanted, linear = description.take("lora"), description.take("lora.linear")
    given = {name: description.take(f"lora.{name}") for name in ("rank", "alpha", "targets", "rslora")}
    if not wanted:
        return
    if linear or given["targets"] in (["all"], ["all-linear"], None):
        given["targets"] = "all-linear"
    elif "lora.targets" in description.assumed:
        description.check("lora", "targets are PEFT's default for Llama; other models may have others")
    given["alpha"] = float(given["alpha"] or 2 * (given["rank"] or 16))
    description.values["lora"] = {name: value for name, value in given.items() if value}


def _warmup(description: Description) -> None:
    steps, ratio = description.take("optimizer.warmup_steps"), description.take("optimizer.warmup_ratio")
    if description.values.get("optimizer.schedule") == "constant":
        return  # transformers' `constant` has no warm-up
    if description.values.get("optimizer.schedule") == "constant_with_warmup":
        description.values["optimizer.schedule"] = "constant"
    if "optimizer.warmup_ratio" in description.assumed:
        if steps is not None:
            ratio = None
        elif description.trainer == "axolotl":
            description.check("optimizer", "axolotl's default warm-up has at most 100 steps")
    if steps and steps >= 1:
        description.values["optimizer.warmup_steps"] = int(steps)
    elif steps or ratio:  # in transformers 5, steps below 1 are a ratio
        description.values["optimizer.warmup_ratio"] = steps or ratio


def _sequences(description: Description, field: str) -> int:
    """Sequences of a step on all devices."""
    device, steps, devices = description.take("batch.device"), description.take("batch.accumulation", 1), description.devices or 1
    default = f" ({description.trainer}'s default)" if "batch.device" in description.assumed else ""
    description.notes[field] = f"{device}{default} per device × {steps} accumulated × {devices} device{'s' if devices > 1 else ''}"
    if description.devices is None:
        description.check(field, "one device is assumed: `pedigree import --devices N` states their number")
    return device * steps * devices


def _training(description: Description) -> None:
    values, method, take = description.values, description.method, description.take
    values["global_batch"] = _sequences(description, "global_batch")
    if take("packed") and method == "sft" and description.trainer != "open-instruct":
        what = "there, a batch counts packed rows of max_length tokens; here, conversations: multiply it by how many fit into a row"
        description.check("global_batch", f"packing: {what}")
    if "max_steps" in values:
        description.check(
            "max_steps", "an upper bound here: raise `epochs` if they have fewer steps; there, rows repeat until it is reached"
        )
    if method == "kto":
        description.check("global_batch", "there, answers are counted; a pair has two")
    masks = {"assistant": take("assistant_only"), "last_turn": take("last_turn_only"), "all": take("every_token")}
    if mask := next((name for name, wanted in masks.items() if wanted), None):
        values["train_on"] = mask
        description.assumed.discard("train_on")
    elif values.get("train_on") == "all":
        description.check("train_on", "TRL trains on all tokens of `messages`, but only on the completion of rows that have a prompt")
    if method in ("kto", "reward") or not values.get("holdout"):
        take("measure_every")
    if method == "kto" and take("holdout"):
        description.check("train", "held-out rows: kto measures no held-out loss")
    if method == "reward":
        if values.setdefault("holdout", MEASURED) == MEASURED:
            description.notes["holdout"] = "ours, to measure the reward model"
        if centering := take("centering"):
            values["loss"] = {"type": "bradley_terry", "centering": centering}
    elif method != "sft":
        _preference_loss(description)


def _preference_loss(description: Description) -> None:
    method, take = description.method, description.take
    name, beta, gamma, ratio = take("loss"), take("beta"), take("gamma"), take("gamma_ratio")
    smoothing, likelihood = take("smoothing"), take("likelihood")
    if method != "dpo":
        name = method
    elif name == "dpo":
        name = "cdpo" if smoothing else "rpo" if likelihood else name
    loss = {"type": name, "odds_weight" if name == "orpo" else "beta": float(beta)}
    loss |= {"epsilon": smoothing} if name in ("cdpo", "robust") and smoothing else {}
    loss |= {"nll_weight": likelihood or 1.0} if name == "rpo" else {}
    loss |= {"gamma": float(gamma if ratio is None else ratio * beta)} if name == "simpo" else {}
    loss |= {weight: value for weight in ("desirable_weight", "undesirable_weight") if (value := take(weight))}
    description.values["loss"] = loss
    if likelihood and name != "rpo":
        description.check("loss", f"pref_ftx: {likelihood}: {name} has no likelihood term here")
    if smoothing and name not in ("cdpo", "robust"):
        description.check("loss", f"label_smoothing: {smoothing}: {name} has none here")
    if description.trainer == "open-instruct" and description.assumed & {"loss", "beta"}:
        description.check("loss", CHANGED)
    if name == "cdpo" and description.trainer == "TRL":
        description.check("loss", "label_smoothing: TRL 1 ignores it for this loss, older versions do not")
    if name == "simpo" and description.trainer in ("TRL", "axolotl"):
        description.check("loss", "without the likelihood term that TRL's CPOTrainer adds unless cpo_alpha is 0")


def _rollouts(description: Description) -> None:
    values, take = description.values, description.take
    if "prompts_per_step" not in values:
        sequences, samples = _sequences(description, "prompts_per_step"), values["samples_per_prompt"]
        values["prompts_per_step"] = max(1, sequences // samples)
        if sequences % samples:
            description.check("prompts_per_step", f"{sequences} sequences are no multiple of {samples} answers to a prompt")
    for quantity in ("batch.device", "batch.accumulation", "packed"):
        take(quantity)
    steps, episodes, passes = take("max_steps"), take("episodes"), take("epochs", 1)
    updates = values.get("algorithm.inner_epochs", 1) * values.get("algorithm.updates_per_rollout", 1)
    if steps or episodes:
        values["steps"] = max(1, steps // updates if steps else episodes // (values["samples_per_prompt"] * values["prompts_per_step"]))
    else:
        values["steps"] = STEPS
        description.check("steps", f"write the number of prompts × {passes} (epochs) / prompts_per_step")
    length = take("max_length")
    if "max_prompt_length" not in values:
        values["max_prompt_length"] = length or 1024
        description.check("max_prompt_length", "the file sets no bound; longer prompts are dropped here")
    take("too_long")
    values["replay"] = "recorded"  # other trainers repeat no rollouts
    _algorithm(description)
    _rewards(description)


def _algorithm(description: Description) -> None:
    values, take = description.values, description.take
    name, kl, unbiased, estimator = take("algorithm.type"), take("kl"), take("unbiased"), take("kl_estimator")
    inner, scale = name, take("scale", "group")
    name = take("ratio") or name
    algorithm: dict[str, Any] = {"type": name, "kl": {"coefficient": kl} if kl else None}
    if kl:
        algorithm["kl"] |= ({"estimator": estimator} if estimator else {}) | ({"unbiased": True} if unbiased else {})
    low, high = take("algorithm.clip_low"), take("algorithm.clip_high")
    if name == "cispo":
        algorithm["clip_max"] = high or 5.0
        if not high:
            description.check("algorithm", f"clip_max: TRL truncates at epsilon, {low}, where epsilon_high is not set")
    elif low:
        algorithm |= {"clip_low": low, "clip_high": high or low}
    algorithm |= {"resampling": None} if name == "dapo" else {"updates_per_rollout": 1} if name == "gspo" else {}
    if name == "gspo" and inner in AGGREGATIONS:
        algorithm["aggregation"] = AGGREGATIONS[inner]
    undivided = scale in ("none", "false")
    if description.trainer != "open-instruct" and (scale == "batch" or undivided != (name == "dr_grpo")):
        what = "never divides advantages by the standard deviation" if name == "dr_grpo" else "divides advantages by the group's deviation"
        description.check("algorithm", f"scale_rewards: {scale}: here, {name} {what}")
    if take("corrected") and take("correction", True):  # TRL's defaults with vLLM
        algorithm["correction"] = {"level": "sequence", "mode": "mask", "high": 3.0}
    for field in [field for field in values if field.startswith("algorithm.")]:
        algorithm[field.partition(".")[2]] = take(field)
    take("correction")
    values["algorithm"] = algorithm
    if description.trainer == "open-instruct":
        if description.assumed & {"algorithm.type", "algorithm.clip_high", "sampling.temperature"}:
            description.check("algorithm", CHANGED)
        description.check("algorithm", "there, losses are averaged per micro-batch, and rollouts are of the weights some steps before")


def _rewards(description: Description) -> None:
    names, weights = description.take("rewards", []), description.take("reward_weights") or []
    if not description.take("penalty"):
        description.take("reward.truncated")
    right, terms = 0.0, list[dict[str, Any]]()
    for place, name in enumerate(map(str, names)):
        weight = weights[place] if place < len(weights) else 1.0
        function = name.rpartition(".")[2]
        if function in ("accuracy_reward", "reasoning_accuracy_reward"):
            right = weight
            for source in description.sources:
                source |= {"columns": {"prompt": "prompt", "ground_truth": "solution"}, "verifier": "math"}
        elif function == "think_format_reward":
            terms.append({"type": "format", "pattern": THINKS, "weight": weight})
        else:
            term = f"{{type: program, path: rewards.py, function: {function}, weight: {weight}}}"
            description.check("reward", f"reward_funcs: {name}: a term `{term}`; until then, the prompts' verifiers (docs/own-reward.md)")
    if right or terms:
        description.values["reward"] = {"right": right, **({"terms": terms} if terms else {})}
