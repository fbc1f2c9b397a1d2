"""The examples of docs/external.md: their arguments against the parsers of the programs, which are installed without what they need."""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import HfArgumentParser

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("verl==0.9.1", "axolotl==0.19.0", "llamafactory==0.9.5")
EXAMPLES = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/external.md").read_text(), re.DOTALL)[-1])["stages"]
CONFIGS = {"axolotl": "{}", "llama_factory": "stage: sft\nfinetuning_type: full\ndataset: rows\ntemplate: qwen\n"}
PARSE = {
    "axolotl": "from axolotl.cli.main import train; found = train.make_context('train', sys.argv[1:]).params",
    "llama_factory": "from llamafactory.hparams.parser import _parse_train_args as parse; model, _, training, *_ = parse(); "
    "found = {'base_model': model.model_name_or_path, 'output_dir': training.output_dir}",
}


@dataclass
class OpenInstruct:
    """Of `FlatArguments` in open_instruct/finetune.py (commit e6c3044, August 2026; on no index): what the example needs or sets."""

    model_name_or_path: str
    dataset_mixer_list: list[str] = field(default_factory=list)
    output_dir: str = "output/"
    do_not_randomize_output_dir: bool = False
    push_to_hub: bool = True
    try_launch_beaker_eval_jobs: bool = True


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with their modules."""
    root = tmp_path_factory.mktemp("programs")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(root), *PROGRAMS]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{', '.join(PROGRAMS)} cannot be installed: {done.stderr}")
    return root


def arguments(name: str, *start: str) -> list[str]:
    """What follows the words `start` in the command of an example, to the next `&&`, with folders as a job writes them."""
    command = [re.sub(r"\{(\w+)\}", r"/job/\1", word) for word in EXAMPLES[name]["command"]]
    words = shlex.split(command[-1]) if command[0] == "bash" else command
    (at,) = [at for at in range(len(words)) if tuple(words[at : at + len(start)]) == start]
    words = words[at + len(start) :]
    return words[: words.index("&&")] if "&&" in words else words


def test_versions_on_the_page_are_those_that_are_checked() -> None:
    said = (ROOT / "docs/external.md").read_text().replace("LLaMA-Factory", "llamafactory")
    assert all(program.replace("==", " ") in said for program in PROGRAMS)


def test_verl_writes_the_checkpoint_that_is_merged(programs: Path) -> None:
    with initialize_config_dir(str(programs / "verl/trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=arguments("verl", "verl.trainer.main_ppo"))
    assert OmegaConf.missing_keys(config) == {"reward.reward_model.rollout.name"}  # of a reward model, which is not used
    trainer, policy = config.trainer, config.actor_rollout_ref
    assert trainer.save_freq > 0 and policy.actor.use_dynamic_bsz and policy.rollout.n > 1 and trainer.resume_mode == "auto"
    tree = ast.parse((programs / "verl/model_merger/base_model_merger.py").read_text())
    (parser,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "parse_args"]
    names: dict[str, Any] = {"argparse": argparse}
    exec(ast.unparse(parser), names)  # its module imports all of verl
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["merge", *arguments("verl", "verl.model_merger")])
        merge = names["parse_args"]()
    assert merge.local_dir == f"{trainer.default_local_dir}/global_step_{trainer.total_training_steps}/actor"
    assert (merge.operation, merge.backend, merge.target_dir) == ("merge", policy.actor.strategy, "/job/output")


@pytest.mark.parametrize(("name", "program"), [("axolotl", "axolotl"), ("llama_factory", "llamafactory-cli")])
def test_a_config_of_axolotl_or_llama_factory_takes_model_and_output_from_the_command(programs, tmp_path, name, program):
    given = arguments(name, program, "train")
    assert given[0] in EXAMPLES[name]["files"]
    (tmp_path / given[0]).parent.mkdir()
    (tmp_path / given[0]).write_text(CONFIGS[name])
    code = f"import sys; {PARSE[name]}; print('found', found['base_model'], found['output_dir'])"
    environment = os.environ | {"PYTHONPATH": str(programs), "DISABLE_VERSION_CHECK": "1"}
    done = subprocess.run([sys.executable, "-c", code, *given], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "found /job/model /job/output\n" in done.stdout, done.stderr


def test_open_instruct_leaves_its_model_where_it_is_sought_and_sends_it_nowhere() -> None:
    given = arguments("open_instruct", "open-instruct/open_instruct/finetune.py")
    fields: Any = OpenInstruct
    found = HfArgumentParser(fields).parse_args_into_dataclasses(given)[0]
    assert found == OpenInstruct("/job/model", ["/job/chat/rows.jsonl", "1.0"], "/job/output", True, False, False)
