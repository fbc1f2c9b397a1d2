"""A chain of stages from rows to scores, and a folder of recipes that tests write and load."""

from pathlib import Path

import pytest

from pedigree.configs.base.document import ConfigError
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe

SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 9, seed: 1}"
LLAMA = "{type: random_llama, layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 16, vocabulary: 300, context: 64}"
CHAIN = f"""\
description: from rows to scores
stages:
  suite: {{kind: prepare_data, record: item, task: sums, sources: [{SUMS}]}}
  raw: {{kind: prepare_data, record: conversation, sources: [{SUMS}]}}
  clean: {{kind: decontaminate, in: {{data: raw, benchmarks: [suite]}}}}
  base: {{kind: source_model, in: {{corpus: [clean]}}, source: {LLAMA}}}
  sft:
    kind: sft
    in: {{policy: base, data: [clean]}}
    global_batch: 4
    max_length: 32
    optimizer: {{learning_rate: 1e-4}}
  scores:
    kind: evaluate
    in: {{policies: [sft], suites: [suite]}}
    sampling: {{max_tokens: 4}}
"""
PREFERENCES = f"""\
  pairs_raw: {{kind: prepare_data, record: preference, sources: [{SUMS}]}}
  pairs: {{kind: decontaminate, in: {{data: pairs_raw, benchmarks: [suite]}}}}
  reward:
    kind: reward_model
    in: {{policy: sft, preferences: [pairs]}}
    global_batch: 4
    max_length: 32
    optimizer: {{learning_rate: 1e-4}}
"""
ROUNDS = """\
  prompts_raw: {kind: prepare_data, record: prompt, sources: [SUMS]}
  prompts: {kind: decontaminate, in: {data: prompts_raw, benchmarks: [suite]}}
  online:
    rounds: 2
    first: sft
    stages:
      sample:
        kind: sample
        in: {policies: [previous], prompts: prompts}
        sampling: {max_tokens: 4}
        samples_per_prompt: 2
        prompts: {count: 4, index: $round}
      judge: {kind: judge, in: {completions: sample}}
      pair: {kind: pair, in: {judgments: judge}}
      dpo:
        kind: preference_train
        in: {policy: previous, preferences: [pair], reference: sft}
        loss: {type: dpo}
        global_batch: 4
        max_length: 32
        optimizer: {learning_rate: 1e-5}
  best: {kind: select, in: {candidates: [sft, online], scores: scores}}
""".replace("SUMS", SUMS)


class Recipes:
    """A folder of recipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.yaml").write_text(text)

    def load(self, name: str, *overrides: str) -> Graph:
        return load_recipe(self.folder, name, overrides)

    def problems(self, name: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self.load(name, *overrides)
        return [str(problem) for problem in caught.value.problems]

    def problem(self, name: str, *overrides: str) -> str:
        (problem,) = self.problems(name, *overrides)
        return problem
