"""Read a config of another trainer: whose it is, what it trains, and its keys."""

import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

from pedigree.configs.base.document import parse_value, read_document, read_text, secret_problem
from pedigree.configs.base.problems import UsageProblem
from pedigree.pipelines.importing.description import Description, Unfit, on
from pedigree.pipelines.importing.named_rows import READERS
from pedigree.pipelines.importing.trainers import DEFAULTS, EVERY, LEFT_OUT, names_of

SCRIPT = re.compile(r"(?:^|/)open_instruct[/.](\w+?)(?:\.py)?$")
SCRIPTS = {
    "finetune": "sft", "dpo": "dpo", "dpo_tune": "dpo", "dpo_tune_cache": "dpo", "reward_modeling": "reward", "grpo": "grpo",
    "grpo_fast": "grpo",
}  # fmt: skip
"""Scripts of open-instruct."""
OF_OPEN_INSTRUCT = ("checkpointing_steps", "dataset_mixer_list", "reduce_loss", "use_flash_attn", "use_slow_tokenizer", "with_tracking")
UNKNOWN = f"""{{}} is of no known format. These are recognized:
- open-instruct: a command line with `open_instruct/SCRIPT.py`, or YAML with `model_name_or_path` and one of {", ".join(OF_OPEN_INSTRUCT)}
- LLaMA-Factory: YAML with `model_name_or_path` and `stage`
- axolotl: YAML with `base_model`
- TRL and alignment-handbook: any other YAML with `model_name_or_path`"""
CLUES = {
    "grpo": {"num_generations", "max_completion_length", "reward_funcs"},
    "reward": {"center_rewards_coefficient"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "dpo": {"beta", "loss_type", "f_divergence_type", "precompute_ref_log_probs"},
    "sft": {"assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing", "max_seq_length"},
}
"""Method → keys of TRL that only it has; the first one counts."""
LONGEST_COMMAND, LONGEST_VALUE = 1 << 16, 1000
"""Characters of a file with a command, and of a variable that is substituted."""
ENDS = {"&&", "||", "|", ";", "&", ">", "2>&1"}
"""Words after which a shell command has no more arguments."""


def read_config(path: Path, method: str | None = None, devices: int | None = None) -> Description:
    """What a file says: a YAML config, or a command line.

    Args:
        path: of the file.
        method: how it trains, if the file does not say so.
        devices: on which it runs, if the file does not say so.

    Raises:
        UsageProblem: not readable, or of no known format or method.
    """
    if path.suffix in (".yaml", ".yml", ".json"):
        trainer, found, keys = _yaml(path)
    else:
        trainer = "open-instruct"
        found, keys, processes = _command(path)
        devices = devices or processes
    method = method or found
    if method is None or method not in DEFAULTS[trainer]:
        what = f"trains by {method}, which is not imported" if method else "does not state how it trains: add --method"
        raise UsageProblem(f"{path} {what}; methods of {trainer}: {', '.join(DEFAULTS[trainer])}")
    description = Description(trainer, method, devices, {**EVERY[trainer], **DEFAULTS[trainer][method]})
    model = keys.get("model_name_or_path")
    for key, (name, _) in names_of(trainer, description.method).items():
        if key in keys and keys[key] is None and name in ("max_length", "optimizer.max_grad_norm") and trainer != "axolotl":
            description.check(name, f"{key}: null means no limit there: write the value that you need")
    keys = {key: value for key, value in keys.items() if value is not None and not (key.startswith("tokenizer_name") and value == model)}
    _precision(description, keys)
    try:
        READERS[trainer](description, keys)
    except Unfit as unfit:
        raise UsageProblem(f"{path}: an amount of rows is {unfit}") from unfit
    description.read(keys, names_of(trainer, method), LEFT_OUT)
    return description


def _precision(description: Description, keys: dict[str, Any]) -> None:
    """fp32 where nothing is computed in bf16 or fp16; a model that is loaded in fp32 keeps its values."""
    loaded = next((key for key in ("dtype", "torch_dtype") if key in keys), "")
    exact = str(keys.get(loaded)) in ("float32", "torch.float32", "fp32")
    half = any(on(keys.get(key, key == "bf16")) for key in ("bf16", "fp16", "bfloat16", "pure_bf16")) or (loaded and not exact)
    if exact:
        del keys[loaded]
    if exact or not half:
        description.values["model.dtype"] = "fp32"
    if not half:
        del keys["bf16"]
        description.values["dtype"] = "fp32"


def _yaml(path: Path) -> tuple[str, str | None, dict[str, Any]]:
    """Trainer, method (None if unknown), keys."""
    keys = read_document(path, str(path)).value
    if "base_model" in keys:
        rl = keys.pop("rl", None)
        if rl in ("ipo", "simpo"):
            rl, keys["dpo_loss_type"] = "dpo", rl
        trl = keys.pop("trl", None)
        return "axolotl", "reward" if keys.pop("reward_model", None) else str(rl or "sft"), keys | (trl if isinstance(trl, dict) else {})
    if "model_name_or_path" not in keys:
        raise UsageProblem(UNKNOWN.format(path))
    if "stage" in keys:
        stage = keys.pop("stage")
        return "LLaMA-Factory", "reward" if stage == "rm" else str(stage), keys
    if keys.keys() & {*OF_OPEN_INSTRUCT}:
        return "open-instruct", "dpo" if any(key.startswith("dpo_") for key in keys) else "sft", keys
    folder, name = path.absolute().parts[-2:]  # alignment-handbook: recipes/MODEL/dpo/config_full.yaml
    words = re.findall(r"[a-z]+", f"{name}/{folder}".lower())
    clues = [method for method, clues in CLUES.items() if clues & keys.keys()]
    return "TRL", next((method for method in [*words, *clues] if method in DEFAULTS["TRL"]), None), keys


def _command(path: Path) -> tuple[str, dict[str, Any], int | None]:
    """Method, keys and devices of a command line. Nothing is executed; variables have the values that the file gives them."""
    text = read_text(path, str(path)).replace("\\\n", " ")
    if problem := secret_problem(str(path), text):
        raise UsageProblem(problem)
    if len(text) > LONGEST_COMMAND:
        raise UsageProblem(f"{path} has {len(text)} characters; a command has at most {LONGEST_COMMAND}")
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageProblem(f"{path} is not a shell command: {error}") from error
    variables: dict[str, str] = {}
    for place, word in enumerate(words):
        words[place] = Template(word).safe_substitute(variables)
        name, is_set, value = words[place].partition("=")
        if is_set and name.isidentifier() and len(value) <= LONGEST_VALUE:
            variables[name] = value
    starts = [(place, found[1]) for place, word in enumerate(words) if (found := SCRIPT.search(word))]
    if not starts:
        raise UsageProblem(UNKNOWN.format(path))
    place, script = starts[0]
    if len(starts) > 1 or script not in SCRIPTS:
        what = f"{len(starts)} commands: keep one" if len(starts) > 1 else f"the script {script}; these are known: {', '.join(SCRIPTS)}"
        raise UsageProblem(f"{path} has {what}")
    arguments = words[place + 1 :]
    end = next((at for at, word in enumerate(arguments) if word in ENDS), len(arguments))
    if end and arguments[0].endswith((".yaml", ".yml")):
        raise UsageProblem(f"{path} takes its settings from {arguments[0]}: import that file")
    stated = {name: value for name, value in _options(words[:place]).items() if isinstance(value, int)}
    processes = stated.get("num_processes", stated.get("gpus"))  # `--num_nodes` is mason.py's, which multiplies the processes of a node
    return SCRIPTS[script], _options(arguments[:end]), processes and processes * stated.get("num_nodes", 1)


def _options(words: list[str]) -> dict[str, Any]:
    """Options and their values: true without one, a list of several."""
    found: dict[str, list[Any]] = {}
    values: list[Any] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, is_set, value = word[2:].partition("=")
            values = found.setdefault(name.replace("-", "_"), [])
            values[:] = [_value(value)] if is_set else []
        elif re.match("--$|-[A-Za-z]", word):
            values = []
        elif word != "$@":
            values.append(_value(word))
    return {name: values[0] if len(values) == 1 else values or True for name, values in found.items()}


def _value(text: str) -> Any:
    try:
        return parse_value(text)
    except ValueError:
        return text
