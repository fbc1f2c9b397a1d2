"""What `pedigree logs` prints: steps, warnings and errors of the job, without the messages of its libraries."""

import pytest

from pedigree.pipelines.cli.job_logs import gained, last_lines, without_chatter

pytestmark = pytest.mark.unit

OURS = """step 1/20  loss 4.02  tokens per second 812
resumed from step-10
[2026-11-27 04:00:01,123] [WARNING] [engine.py:1] the optimizer skipped a step
WARNING 11-27 04:00:01 [core.py:58] no memory left for the cache
step 2/20  loss 3.9
begin to worry: MA is short of memory
INFORMATION on a row
(n2) [2026-11-27 04:00:01,123] [WARNING] [engine.py:1] the optimizer skipped a step
refused: rows: 1 malformed rows of 20:
  rows.jsonl:8: is not JSON
Traceback (most recent call last):
  File "lib/python3.11/site-packages/torch/nn.py", line 3, in forward
torch.OutOfMemoryError: out of memory
"""
CHATTER = """[2026-11-27 04:00:00,123] [INFO] [config.py:1003:print] DeepSpeedEngine configuration:
INFO 11-27 04:00:00 [core.py:58] Initializing a V1 LLM engine
(n2.site) INFO 11-27 04:00:00 [core.py:58] Initializing a V1 LLM engine
(n2) (EngineCore_0 pid=123) INFO 11-27 04:00:00 [gpu_worker.py:2] Loading weights
lib/python3.11/site-packages/torch/cuda.py:63: FutureWarning: pynvml is deprecated
  warnings.warn(
DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully
begin bf16_optimizer
MA 0.65 GB         Max_MA 0.65 GB         CA 0.65 GB         Max_CA 1 GB 
CPU Virtual Memory:  used = 2.8 GB, percent = 11.9%
before initializing group 0
after initializing group 0
end bf16_ optimizer
before GatheredParameters
_load_legacy_checkpoint current_rank_sd[BASE_OPTIMIZER_STATE]
Triton is installed, but doesn't include CPU backend. Disabling Triton.
\rLoading checkpoint shards:   0%|          | 0/2\rLoading checkpoint shards: 100%|##########| 2/2
"""


def test_steps_and_errors_are_shown_and_messages_of_libraries_are_not():
    assert "".join(without_chatter([CHATTER + OURS])) == OURS


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_growing_log_gives_the_same_lines_in_pieces_of_any_size(size):
    text = CHATTER + OURS + CHATTER + "step 3/20  lo"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert "".join(without_chatter(pieces)) == OURS + "step 3/20  lo"


@pytest.mark.parametrize("every", [False, True])
def test_the_last_lines_of_a_growing_log_come_first_and_then_all_that_follows(every):
    noise = "INFO 11-27 04:00:01 [core.py:58] loaded\n"
    texts = ["one\ntwo\n" + noise + "three\nfo", "ur\n" + noise, "five\n", "six\n"]
    shown = list(last_lines(iter(texts), 3, iter if every else without_chatter))
    before = noise + "three\n" if every else "two\nthree\n"
    assert "".join(shown) == before + "four\n" + noise * every + "five\nsix\n"
    assert "".join(last_lines(iter(["one\ntwo\n"]), 5, without_chatter)) == "one\ntwo\n"
    assert "".join(last_lines(iter(["one\ntwo"]), 1, without_chatter)) == "two"


def test_lines_of_further_nodes_begin_with_the_nodes_name_and_stay_whole(tmp_path):
    log, other = tmp_path / "log.txt", tmp_path / "log-n2.txt"
    log.write_text("step 1/2\nstep ")
    other.write_text("joined\n2 ran")
    offsets = {}
    assert gained(log, offsets, grows=True) == "(n2) joined\nstep 1/2\n"
    for path, more in ((log, "2/2\n"), (other, "ks\n\nended")):
        path.write_text(path.read_text() + more)
    assert gained(log, offsets, grows=True) == "(n2) 2 ranks\nstep 2/2\n"
    assert gained(log, offsets) == "(n2) ended\n" and gained(log, offsets) == ""
