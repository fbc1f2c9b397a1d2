"""What vLLM reads of exported folders, as JSON: the greedy answers of a policy, and the scores of reward models.

python vllm_child.py CONVERSATIONS.json POLICY|- REWARD_MODEL...
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
from vllm import LLM
from vllm.inputs import TokensPrompt

# `auto` would round weights in fp32 to 16 bits
SMALL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, "disable_log_stats": True}


def answers(policy: str, conversations: list[Any]) -> list[Any]:
    speaker: Any = LLM(policy, **SMALL)
    greedy = speaker.get_default_sampling_params()  # of the folder's generation_config.json
    greedy.temperature, greedy.max_tokens = 0.0, 16
    answered = [one.outputs[0] for one in speaker.chat([one[:-1] for one in conversations], greedy, use_tqdm=False)]
    return [[list(one.token_ids), one.finish_reason] for one in answered]


def scores(reward_model: str, conversations: list[Any]) -> list[float]:
    scorer: Any = LLM(reward_model, runner="pooling", **SMALL)
    rendered = [scorer.get_tokenizer().apply_chat_template(one, return_dict=False) for one in conversations]
    scored = scorer.classify([TokensPrompt(prompt_token_ids=ids) for ids in rendered], use_tqdm=False)
    return [score for one in scored for score in one.outputs.probs]


def main(file: str, policy: str, *reward_models: str) -> None:
    conversations = json.loads(Path(file).read_text())
    found = {
        "answers": [] if policy == "-" else answers(policy, conversations),
        "scores": [scores(one, conversations) for one in reward_models],
    }
    print(f"found {json.dumps(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
