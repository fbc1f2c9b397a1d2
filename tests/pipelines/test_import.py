"""`pedigree import`: recipes of configs of other trainers."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.cli.main import main
from pedigree.pipelines.cli.recipes import import_
from pedigree.pipelines.cli.resolved import resolved_recipe
from pedigree.pipelines.importing.trainers import LOSSES

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "import.md").read_text()


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch) -> Path:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "configs" / "recipes").mkdir(parents=True)
    shutil.copytree(ROOT / "configs" / "execution", tmp_path / "configs" / "execution")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(text: str, file: str = "mine.yaml", method: str | None = None, devices: int | None = 1) -> tuple[str, Graph]:
    """The recipe of a config as text, and loaded."""
    Path(file).write_text(text)
    import_(Path(file), "mine", method, devices)
    path = Path("configs/recipes/mine.yaml")
    written = path.read_text()
    graph = load_recipe(path.parent, "mine")
    path.unlink()
    return written, graph


def checks(text: str) -> list[str]:
    return re.findall("^ *# check: (.*)", text, re.MULTILINE)


TRL = "model_name_or_path: org/base\nlearning_rate: 1.0e-5\ndataset_name: org/rows\n"
COMMAND = "open_instruct/{} --model_name_or_path org/base --dataset_mixer_list org/rows 1.0 "
CONFIGS: dict[str, tuple[str, str | None, str, dict[str, Any]]] = {
    "TRL sft": (
        TRL + "max_seq_length: 2048\nassistant_only_loss: true\nmax_steps: -1\nnum_train_epochs: 2.0\nwarmup_ratio: 0.1\nseed: 42\n"
        "lr_scheduler_type: constant_with_warmup\nadam_beta2: 0.95\n",
        "sft", "sft",
        {"global_batch": 8, "epochs": 2, "max_steps": None, "max_length": 2048, "too_long": "truncate", "train_on": "assistant", "seed": 42,
         "optimizer.schedule": "constant", "optimizer.warmup_ratio": 0.1, "optimizer.beta2": 0.95, "optimizer.learning_rate": 1e-5},
    ),
    "TRL dpo": (
        TRL + "loss_type: robust\nlabel_smoothing: 0.2\nbeta: 0.05\nuse_peft: true\nlora_target_modules: [q_proj]\n", None, "dpo",
        {"loss.type": "robust", "loss.beta": 0.05, "loss.epsilon": 0.2, "lora.rank": 16, "lora.alpha": 32.0, "lora.targets": ("q_proj",),
         "max_length": 1024, "epochs": 3},
    ),
    "TRL orpo": (TRL + "beta: 0.05\n", "orpo", "orpo", {"loss.type": "orpo", "loss.odds_weight": 0.05}),
    "TRL kto": (TRL + "desirable_weight: 1.5\n", None, "kto", {"loss.type": "kto", "loss.desirable_weight": 1.5, "loss.beta": 0.1}),
    "TRL reward": (
        TRL + "center_rewards_coefficient: 0.01\n", None, "reward", {"loss.centering": 0.01, "max_length": 1024, "too_long": "drop"},
    ),
    "TRL grpo": (
        TRL + "num_generations: 4\nper_device_train_batch_size: 16\ngradient_accumulation_steps: 2\nmax_steps: 100\nnum_iterations: 2\n"
        "max_prompt_length: 512\nmax_completion_length: 256\nbeta: 0.001\nepsilon_high: 0.28\nuse_vllm: true\n"
        "reward_funcs: [accuracy_reward, think_format_reward]\nreward_weights: [1.0, 0.5]\n",
        None, "grpo",
        {"algorithm.type": "dapo", "algorithm.resampling": None, "algorithm.kl.coefficient": 0.001, "algorithm.kl.unbiased": True,
         "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.inner_epochs": 2, "algorithm.correction.mode": "mask",
         "prompts_per_step": 8, "samples_per_prompt": 4, "steps": 50, "max_prompt_length": 512, "sampling.max_tokens": 256,
         "reward.right": 1.0, "reward.terms.0.weight": 0.5},
    ),
    "TRL grpo, ratios of answers": (
        TRL + "num_generations: 4\nloss_type: grpo\nimportance_sampling_level: sequence\nmax_steps: 10\n", None, "grpo",
        {"algorithm.type": "gspo", "algorithm.kl": None, "algorithm.updates_per_rollout": 1, "algorithm.clip_low": 0.2},
    ),
    "axolotl sft": (
        "base_model: org/base\ndatasets: [{path: org/rows, type: chat_template, field_messages: turns}]\nlearning_rate: 2e-4\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 4\nsequence_len: 4096\nwarmup_steps: 10\nadapter: lora\nlora_r: 32\n"
        "lora_alpha: 16\nlora_target_linear: true\noptimizer: adamw_torch_fused\nval_set_size: 0.05\neval_steps: 50\ntrain_on_inputs: no\n",
        None, "sft",
        {"global_batch": 8, "epochs": 1, "max_length": 4096, "too_long": "drop", "train_on": "assistant", "optimizer.schedule": "cosine",
         "optimizer.warmup_steps": 10, "lora.rank": 32, "lora.targets": "all-linear", "holdout": 0.05, "measure_every": 50},
    ),
    "axolotl dpo": (
        "base_model: org/base\nrl: ipo\nrl_beta: 0.3\ndatasets: [{path: org/rows, type: chatml.ultra}]\nlearning_rate: 2e-6\n", None, "dpo",
        {"loss.type": "ipo_mean", "loss.beta": 0.3, "global_batch": 1},
    ),
    "axolotl grpo": (
        "base_model: org/base\nrl: grpo\ndatasets: [{path: org/rows}]\nlearning_rate: 2e-6\nmicro_batch_size: 8\nmax_steps: 5\n"
        "trl: {beta: 0.0, num_generations: 4, max_completion_length: 64, loss_type: dr_grpo}\n",
        None, "grpo",
        {"algorithm.type": "dr_grpo", "algorithm.kl": None, "prompts_per_step": 2, "sampling.max_tokens": 64},
    ),
    "axolotl reward": (
        "base_model: org/base\nreward_model: true\ndatasets: [{path: org/rows}]\nlearning_rate: 2e-6\nval_set_size: 0.1\n", None, "reward",
        {"holdout": 0.1, "loss.centering": 0.0},
    ),
    "LLaMA-Factory sft": (
        "model_name_or_path: org/base\nstage: sft\nfinetuning_type: full\ndataset: a, b\ntemplate: qwen\nmask_history: true\n", None, "sft",
        {"train_on": "last_turn", "too_long": "truncate", "max_length": 2048, "lora": None, "optimizer.learning_rate": 5e-5, "epochs": 3},
    ),
    "LLaMA-Factory dpo": (
        "model_name_or_path: org/base\nstage: dpo\ndataset: a\npref_ftx: 0.5\nlora_target: q_proj,v_proj\n", None, "dpo",
        {"loss.type": "rpo", "loss.nll_weight": 0.5, "lora.targets": ("q_proj", "v_proj"), "lora.rank": 8, "lora.alpha": 16.0},
    ),
    "open-instruct sft": (
        "NUM=4\naccelerate launch --num_processes $NUM -m " + COMMAND.format("finetune.py") + "--reduce_loss sum --use_lora False \\\n"
        "  --per_device_train_batch_size=1 --gradient_accumulation_steps ${NUM} --clip_grad_norm -1 --learning_rate 5e-06 && echo --seed 3",
        None, "sft",
        {"global_batch": 16, "loss_reduction": "sum", "epochs": 2, "optimizer.learning_rate": 5e-6, "optimizer.warmup_ratio": 0.03,
         "max_length": 4096, "seed": 0, "lora": None},
    ),
    "open-instruct dpo": (
        COMMAND.format("dpo_tune_cache.py") + "--dpo_loss_type simpo --dpo_beta 2 --dpo_gamma_beta_ratio 0.5", None, "dpo",
        {"loss.type": "simpo", "loss.beta": 2.0, "loss.gamma": 1.0, "max_length": 2048},
    ),
    "open-instruct reward": (
        "open_instruct/reward_modeling.py --dataset_mixer '{\"org/rows\": 1.0}' --model_name_or_path org/base --learning_rate 3e-6",
        None, "reward",
        {"global_batch": 8, "optimizer.epsilon": 1e-5, "optimizer.weight_decay": 0.01, "optimizer.decayed": "all"},
    ),
    "open-instruct grpo": (
        COMMAND.format("grpo_fast.py") + "--beta 0.01 --kl_estimator 2 --num_mini_batches 2 --num_epochs 3 --total_episodes 6400 "
        "--non_stop_penalty --non_stop_penalty_value -1.0 --advantage_normalization_type centered --response_length 2048 "
        "--active_sampling --no_resampling_pass_rate 0.875",
        None, "grpo",
        {"algorithm.type": "dr_grpo", "algorithm.kl.estimator": "k3", "algorithm.updates_per_rollout": 2, "algorithm.inner_epochs": 3,
         "algorithm.resampling.max_batches": 10, "no_resampling_pass_rate": 0.875,
         "steps": 100, "prompts_per_step": 16, "samples_per_prompt": 4, "reward.right": 10.0, "reward.truncated": -1.0,
         "sampling.max_tokens": 2048, "sampling.temperature": 0.7},
    ),
}  # fmt: skip
"""Config, method that it does not state, name of the stage, fields of the stage."""


def value_at(value: Any, place: str) -> Any:
    for name in place.split("."):
        value = value[int(name)] if name.isdigit() else getattr(value, name)
    return value


@pytest.mark.parametrize("name", CONFIGS)
def test_each_format_and_method_becomes_a_recipe_with_its_quantities(project, name):
    text, method, stage, expected = CONFIGS[name]
    _, graph = imported(text, "mine.sh", method, None) if "open_instruct/" in text else imported(text, method=method)
    config = graph.find(stage).config
    assert {place: value_at(config, place) for place in expected} == expected
    assert graph.find(stage).parents == ("mine/base", "mine/rows") and resolved_recipe(Project.find(), graph)["stages"].keys() == {
        "base",
        "rows",
        stage,
    }


def batch(graph: Graph) -> int:
    return value_at(graph.find("sft").config, "global_batch")


def test_devices_are_those_of_the_command_or_stated_or_assumed_with_a_comment():
    command = COMMAND.format("finetune.py")
    assert batch(imported(f"python mason.py --gpus 8 --num_nodes 2 -- {command}", "mine.sh", devices=None)[1]) == 128
    assert batch(imported(f"accelerate launch --num_processes 4 {command}", "mine.sh", devices=2)[1]) == 16
    text, graph = imported(TRL, method="sft", devices=None)
    assert batch(graph) == 8 and graph.execution == "gpu"
    assert "one device is assumed: `pedigree import --devices N` states their number" in checks(text)
    text, graph = imported(TRL, method="sft", devices=16)
    assert "global_batch: 128  # 8 (TRL's default) per device × 1 accumulated × 16 devices\n" in text and graph.execution == "gpu8"


SETTINGS = {
    "lora_dropout: 0.05": "lora_dropout: 0.05 → nothing: dropout is off",
    "load_in_4bit: true": "load_in_4bit: true → nothing: adapters are trained on the exact weights",
    "lr_scheduler_type: cosine_with_min_lr": "lr_scheduler_type: cosine_with_min_lr: not available here; cosine decays to zero",
    "optim: paged_adamw_8bit": "optim: paged_adamw_8bit: the optimizer is AdamW with fp32 states here",
    "num_train_epochs: 0.5": "num_train_epochs: 0.5: epochs are whole numbers here; `max_steps` ends within one",
    "per_device_train_batch_size: auto": "per_device_train_batch_size: auto: not a number",
    "max_grad_norm: 0": "max_grad_norm: 0: no clipping would be `max_grad_norm: null`; DeepSpeed's own config may clip",
    "learning_rate: .inf": "learning_rate: .inf: not a finite number",
    "max_prompt_length: 512": "max_prompt_length 512: sft has no such setting",
    "packing: true":
        "packing: there, a batch counts packed rows of max_length tokens; here, conversations: multiply it by how many fit into a row",
    "max_length: null": "max_length: null means no limit there: write the value that you need",
    "max_steps: 10": "an upper bound here: raise `epochs` if they have fewer steps; there, rows repeat until it is reached",
    "frobnicate: {a: [1]}": "frobnicate: {a: [1]}: unknown",
    "model_revision: step-100": "revision: step-100: write its commit; `pedigree pin` takes the newest one of main",
    "chat_template: '{{ messages }}'":
        "chat_template: {{ messages }}: no template of that name here, so the model's own (docs/chat-templates.md)",
    "dataset_train_split: 'train[:5%]'": "split: train[:5%]: for a part of a split, add `count: 1000` or `epochs: 0.2` to its source",
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_a_recipe_cannot_express_is_marked_and_counted(setting, capsys):
    text, _ = imported(f"{TRL.replace('learning_rate', 'weight_decay') if 'learning_rate' in setting else TRL}{setting}\n", method="sft")
    assert SETTINGS[setting] in checks(text)
    assert f"lines to look at, marked `# check:`: {len(checks(text))}; next: `pedigree plan mine`" in capsys.readouterr().out


@pytest.mark.parametrize(
    "setting", ["max_steps: -1", "load_in_8bit: false", "neftune_noise_alpha:", "lora_dropout: 0.0", "optim: adamw_torch"]
)
def test_what_is_switched_off_or_equal_here_is_not_mentioned(setting):
    assert imported(f"{TRL}{setting}\n", method="sft")[0] == imported(TRL, method="sft")[0]


def test_keys_of_where_it_runs_are_listed_once():
    text, _ = imported(TRL + "logging_steps: 5\nreport_to: [wandb]\ndeepspeed: z3.json\nbf16: true\n", method="sft")
    head, _, stages = text.partition("\nstages:\n")
    head = head.replace("\n# ", " ")
    assert "logging_steps, report_to, deepspeed, bf16." in head and "bf16" not in stages.replace("dtype: bf16", "")
    assert checks(text) == checks(imported(TRL, method="sft")[0])


@pytest.mark.parametrize(
    ("rows", "sources"),
    [
        ("dataset_name: ./data/rows.jsonl", [{"type": "files", "path": "data/rows.jsonl"}]),
        ("dataset_name: org/rows\ndataset_config: main\ndataset_train_split: a+b", [{"config": "main", "split": ["a", "b"]}]),
        ("dataset_mixer: {org/a: 1.0, org/b: 2.5}\ndataset_splits: [train_sft, test_sft]",
         [{"repo": "org/a", "split": "train_sft", "epochs": None}, {"repo": "org/b", "epochs": 2.5}]),
        ("datasets: [{path: json, data_files: [a.jsonl, /data/b.jsonl]}]", [{"path": "a.jsonl"}, {"path": "/data/b.jsonl"}]),
        ("dataset_mixer_list: [org/a, 1.0, org/b, 300, org/c, 0.5]", [{"repo": "org/a", "count": None}, {"count": 300}, {"epochs": 0.5}]),
        ("seed: 1", [{"repo": "OWNER/NAME"}]),
        ("datasets: org/a", [{"repo": "OWNER/NAME"}]),
    ],
)  # fmt: skip
def test_rows_of_the_hub_are_to_be_pinned_and_local_ones_are_files(rows, sources):
    text, graph = imported(f"model_name_or_path: org/base\n{rows}\n", method="sft")
    written = yaml.safe_load(text)["stages"]["rows"]["sources"]
    assert all("revision: pin me" in line for line in text.splitlines() if "type: hub" in line)
    assert [{key: found.get(key) for key in wanted} for found, wanted in zip(written, sources, strict=True)] == sources
    assert graph.nodes["mine/rows"].output == "conversation"


@pytest.mark.parametrize("start", ["model_name_or_path", "base_model"], ids=["TRL", "axolotl"])
def test_files_of_a_repository_are_no_files_of_the_project(start):
    dataset = "{path: org/rows, data_files: data/train.jsonl, data_dir: clean}"
    text, _ = imported(f"{start}: org/base\nlearning_rate: 1e-5\ndatasets: [{dataset}]\n", method="sft")
    assert yaml.safe_load(text)["stages"]["rows"]["sources"] == [
        {"type": "hub", "repo": "org/rows", "revision": "pin me", "split": "train"}
    ]
    assert "data_files: data/train.jsonl: of org/rows, all files are read here" in checks(text)
    assert [check for check in checks(text) if check.startswith("data_dir: clean: ")]


def test_empty_keys_of_a_dataset_mean_their_defaults():
    text, _ = imported(
        "model_name_or_path: org/base\ndatasets: [{id: org/rows, weight: null, split: null, data_dir: null}]\n", method="sft"
    )
    assert "- {type: hub, repo: org/rows, revision: pin me, split: train}\n" in text and not [one for one in checks(text) if "data" in one]


@pytest.mark.parametrize("name", ["qwen", "mistral", "zephyr", "llama3", "chatml", "gemma"])
def test_templates_of_llama_factory_are_ours_only_if_they_write_the_same(name):
    """Its `qwen` is that of Qwen 2.5 with a system prompt, its `mistral` writes spaces, its `zephyr` has a system prompt."""
    text, graph = imported(f"model_name_or_path: org/base\nstage: sft\ndataset: a\ntemplate: {name}\n")
    other = name in ("qwen", "mistral", "zephyr")
    marked = f"template: {name}: another template has this name here, so the model's own (docs/chat-templates.md)"
    assert (marked in checks(text)) == other and value_at(graph.find("base").config, "chat_template") == ("own" if other else name)


FP32 = {"base": "fp32", "train": "fp32"}
PRECISIONS: dict[str, dict[str, str]] = {
    "bf16: true": {"base": "bf16", "train": "bf16"},
    "fp16: false": {"base": "bf16", "train": "bf16"},
    "bf16: false": FP32,
    "bf16: no": FP32,
    "bf16: false\ntorch_dtype: float32": FP32,
    "torch_dtype: float32": {"base": "fp32", "train": "bf16"},  # TRL computes in bf16 by default
    "bf16: false\nfp16: true": {"base": "bf16", "train": "bf16"},
    "bf16: false\ndtype: bfloat16": {"base": "bf16", "train": "bf16"},
    "bf16: false\npure_bf16: true": {"base": "bf16", "train": "bf16"},
}


@pytest.mark.parametrize("setting", PRECISIONS)
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_what_computes_in_fp32_does_so_here(setting, method):
    text, graph = imported(f"{TRL}{setting}\n{'max_steps: 1' if method == 'grpo' else ''}\n", method=method)
    found = {place: value_at(graph.find(stage).config, "dtype") for place, stage in (("base", "base"), ("train", method))}
    assert found == PRECISIONS[setting]
    named = text.partition("does not change the model")[2].partition("\nstages:")[0]
    assert "dtype" not in named or "bfloat16" in setting
    assert "bf16" not in named.replace("pure_bf16", "") or found["train"] == "bf16"


def test_the_bound_of_cispo_is_stated_or_marked():
    text, graph = imported(f"{TRL}loss_type: cispo\nmax_steps: 1\n", method="grpo")
    assert "clip_max: TRL truncates at epsilon, 0.2, where epsilon_high is not set" in checks(text)
    text, graph = imported(f"{TRL}loss_type: cispo\nepsilon_high: 4.0\nmax_steps: 1\n", method="grpo")
    assert value_at(graph.find("grpo").config, "algorithm.clip_max") == 4.0 and not [one for one in checks(text) if "clip_max" in one]


@pytest.mark.parametrize("value", ["''", "[]"])
def test_no_loss_is_not_available(value):
    text, _ = imported(f"{TRL}loss_type: {value}\n", method="dpo")
    assert [check for check in checks(text) if check.startswith("loss_type: ") and "not available here" in check]


def test_a_number_beyond_all_floats_is_not_finite():
    text, _ = imported(f"{TRL}weight_decay: 1{'0' * 400}\n", method="sft")
    assert [check for check in checks(text) if check.endswith("…: not a finite number")]


def test_a_commit_and_a_folder_of_a_model_are_kept():
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert f"revision: {commit}}}" in imported(f"{TRL}model_revision: {commit}\n", method="sft")[0]
    assert "source: {type: folder, path: /models/mine}" in imported(TRL.replace("org/base", "/models/mine/"), method="sft")[0]


def test_the_method_of_alignment_handbook_is_in_its_folder(project):
    (project / "zephyr" / "orpo").mkdir(parents=True)
    _, graph = imported(TRL + "beta: 0.05\n", "zephyr/orpo/config_full.yaml")
    assert value_at(graph.find("orpo").config, "loss.odds_weight") == 0.05


def test_the_name_of_a_file_counts_before_that_of_its_folder(project):
    (project / "dpo-study").mkdir()
    _, graph = imported(f"{TRL}assistant_only_loss: true\n", "dpo-study/sft_full.yaml")
    assert value_at(graph.find("sft").config, "train_on") == "assistant"


BOMB = "base_model: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
WRONG = {
    "nothing: 1": r"mine\.yaml is of no known format.*open-instruct: .*LLaMA-Factory: .*axolotl: YAML with `base_model`.*TRL and align",
    TRL: r"mine\.yaml does not state how it trains: add --method; methods of TRL: sft, dpo, orpo, kto, reward, grpo",
    TRL + "stage: ppo": r"mine\.yaml trains by ppo, which is not imported; methods of LLaMA-Factory: sft, dpo, kto, reward",
    TRL + "stage: [sft]": "which is not imported",
    "base_model: org/base": r"mine\.yaml has values that a recipe cannot have:.*learning_rate",
    TRL + "stage: sft\nseed: -3": "has values that a recipe cannot have:.*seed",
    TRL + "loss_weights: &a [*a]": "alias refers to its own anchor",
    "base_model: !!python/object/apply:os.system [touch executed]": "the tag .* is not known",
    BOMB: "more than 100000 values",
    "base_model: hf_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7": "appears to contain",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_config_that_cannot_be_read_is_refused_and_executes_nothing(project, text):
    with pytest.raises(UsageProblem, match=re.compile(WRONG[text], re.DOTALL)):
        imported(text)
    assert not list(project.glob("configs/recipes/*")) and not (project / "executed").exists()


COMMANDS = {
    "ls -l": "is of no known format",
    COMMAND.format("finetune.py") * 2: "has 2 commands: keep one",
    COMMAND.format("ppo_fast.py"): "has the script ppo_fast; these are known: finetune,",
    "open_instruct/finetune.py configs/sft.yaml": r"takes its settings from configs/sft\.yaml: import that file",
    "open_instruct/finetune.py --a 'b": "is not a shell command: No closing quotation",
    "open_instruct/finetune.py " + "-" * 70_000: "a command has at most 65536",
    COMMAND.format("finetune.py") + "--wandb_key hf_a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7": "appears to contain",
}


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_that_cannot_be_read_is_refused(text):
    with pytest.raises(UsageProblem, match=COMMANDS[text]):
        imported(text, "mine.sh")


def test_a_command_executes_nothing_and_its_variables_cannot_grow_without_end(project):
    bomb = "A=aaaaaaaaaa\n" + "".join("A=$A$A$A$A$A$A$A$A\n" for _ in range(30))
    text, _ = imported(
        f"{bomb}{COMMAND.format('finetune.py')} --output_dir $(touch executed) --notes `touch executed` --x $A $@", "mine.sh"
    )
    assert not (project / "executed").exists() and len(text) < 10_000


def test_no_text_of_a_config_becomes_a_line_of_the_recipe_or_controls_a_terminal():
    lines = '"save_\\nevil: 1": 1\n"odd\\u2028evil: 1": "a\\nevil: 1"\nodd: "\\e[2J"\nchat_template: "x\\u0085evil: 1"\n'
    text, _ = imported(TRL + lines, method="sft")
    assert not [line for line in text.splitlines() if line.strip().startswith("evil")]
    assert "\\u001b[2J" in text and "\x1b" not in text


AXOLOTL = "base_model: org/base\nlearning_rate: 1.0e-5\ndatasets: [{path: org/rows, type: chat_template}]\n"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    f"{TRL}lr_scheduler_type: constant\nwarmup_ratio: 0.03\n": {"schedule": "constant", "warmup_ratio": 0.0},
    f"{TRL}lr_scheduler_type: constant_with_warmup\nwarmup_ratio: 0.03\n": {"schedule": "constant", "warmup_ratio": 0.03},
    AXOLOTL: {"schedule": "cosine", "warmup_ratio": 0.03},
    f"{AXOLOTL}warmup_steps: 0\n": {"warmup_ratio": 0.0, "warmup_steps": None},
}


@pytest.mark.parametrize("text", OPTIMIZERS)
def test_the_warm_up_is_that_of_the_trainer(text):
    optimizer = imported(text, method="sft")[1].find("sft").config.optimizer
    assert {name: getattr(optimizer, name) for name in OPTIMIZERS[text]} == OPTIMIZERS[text]


def test_sequence_ratios_keep_the_sum_over_tokens_of_their_loss():
    ratios = "importance_sampling_level: sequence\nmax_steps: 1\n"
    found = {name: imported(f"{TRL}{ratios}loss_type: {name}\n", method="grpo")[1].find("grpo").config for name in ("grpo", "dapo")}
    assert {name: (value_at(one, "algorithm.type"), value_at(one, "algorithm.aggregation")) for name, one in found.items()} == {
        "grpo": ("gspo", "seq-mean-token-mean"), "dapo": ("gspo", "token-mean"),
    }  # fmt: skip


def test_quoted_amounts_without_a_point_are_counts():
    text = "model_name_or_path: org/base\nuse_flash_attn: true\ndataset_mixer_list: ['org/a', '2000', 'org/b', '0.5']\n"
    sources = imported(text, method="sft")[1].find("rows").config.sources
    assert [(one.count, one.epochs) for one in sources] == [(2000, None), (None, 0.5)]


def test_an_existing_recipe_is_kept(project):
    path = project / "configs" / "recipes" / "mine.yaml"
    path.write_text("mine")
    (project / "theirs.yaml").write_text(TRL)
    with pytest.raises(UsageProblem, match=r"configs/recipes/mine\.yaml exists: choose another name, or remove the file"):
        import_(Path("theirs.yaml"), "mine", "sft")
    assert path.read_text() == "mine"


def test_the_losses_are_those_that_the_page_of_trl_names():
    page = (ROOT / "docs" / "from-trl.md").read_text()
    rows = re.findall(r'^\| `(?:CPOConfig\()?loss_type="(\w+)"[^|]*\| `loss: \{type: (\w+)', page, re.MULTILINE)
    assert len(rows) >= 7 and all(LOSSES(there) == here for there, here in rows)
    algorithms = re.findall(r'^\| `loss_type="(\w+)"[^|]*\| `algorithm: \{type: (\w+)', page, re.MULTILINE)
    found = [imported(f"{TRL}loss_type: {there}\nmax_steps: 1\n", method="grpo")[1].find("grpo").config for there, _ in algorithms]
    assert [value_at(config, "algorithm.type") for config in found] == [here for _, here in algorithms] and len(algorithms) >= 4


def example(title: str) -> tuple[str, list[str], str]:
    """Config, command and recipe of a section of the page."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    config, command, recipe = re.findall(r"^```\w+\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return config, shlex.split(command.removeprefix("$ ")), recipe


@pytest.mark.parametrize("title", re.findall("^## (.*)", PAGE, re.MULTILINE))
def test_the_examples_of_the_page_are_what_the_command_writes(project, title, monkeypatch):
    config, command, recipe = example(title)
    (project / command[2]).write_text(config)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    (path,) = (project / "configs" / "recipes").iterdir()
    assert not end.value.code and path.read_text() == recipe
