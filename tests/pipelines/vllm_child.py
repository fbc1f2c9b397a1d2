"""What vLLM reads of exported folders, as JSON: the greedy answer of a policy to a question, and a reward model's scores.

python vllm_child.py POLICY REWARD_MODEL CONVERSATIONS.json
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
SMALL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4, "disable_log_stats": True}


def main(policy: str, reward_model: str, file: str) -> None:
    conversations = json.loads(Path(file).read_text())
    speaker: Any = LLM(policy, **SMALL)
    greedy = speaker.get_default_sampling_params()  # of the folder's generation_config.json
    greedy.temperature, greedy.max_tokens = 0.0, 16
    answered = [one.outputs[0] for one in speaker.chat([one[:-1] for one in conversations], greedy, use_tqdm=False)]
    scorer: Any = LLM(reward_model, runner="pooling", **SMALL)
    rendered = [scorer.get_tokenizer().apply_chat_template(one, return_dict=False) for one in conversations]
    scored = scorer.classify([TokensPrompt(prompt_token_ids=ids) for ids in rendered], use_tqdm=False)
    found = {
        "answers": [[list(one.token_ids), one.finish_reason] for one in answered],
        "scores": [one.outputs.probs for one in scored],
    }
    print(f"found {json.dumps(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
