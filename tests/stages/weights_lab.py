"""What reaches readers of a trainer's weights on several ranks: `python weights_lab.py POLICY CASES.json` prints one line per case."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from effects_lab import trainer_of
from torch import Tensor

from pedigree.data.artifacts.artifacts import Artifact, open_artifact
from pedigree.data.chat.chat import Chat
from pedigree.stages.rlvr import weight_transfer
from pedigree.stages.sampling.weight_parts import tensors_of
from pedigree.stages.training.trainer import Trainer


def received(trainer: Trainer, version: int = 1) -> tuple[dict[str, Tensor], list[Any]]:
    """What a reader copies, part by part, and the parts; called on all ranks."""
    found: dict[str, Tensor] = {}
    seen = []
    memory = weight_transfer.HostMemory(trainer)
    for part in weight_transfer.parts(trainer, memory, version):
        if trainer.rank == 0:
            found |= {name: tensor.clone() for name, tensor in tensors_of(part, torch.device("cpu"))}
        seen.append(part)
        trainer.barrier()
    memory.close()
    return found, seen


def gathers(policy: Artifact, folder: Path, **fields: Any) -> dict[str, Any]:
    """Whether a reader gets what `export` writes, and how many whole parameters a rank has at most at a time."""
    from safetensors.torch import load_file

    trainer = trainer_of(policy, fields, dtype="bf16")
    trainer.export(folder, Chat(policy.payload))
    most = [0]
    plain = trainer.weights

    def counted():
        for one in plain():
            whole = [parameter for parameter in trainer.engine.module.parameters() if parameter.numel() and parameter.ndim == 2]
            most[0] = max(most[0], len(whole))
            yield one

    trainer.weights = counted
    found, seen = received(trainer)
    written = load_file(folder / "model.safetensors")
    equal = found.keys() == written.keys() and all(torch.equal(found[name], written[name]) for name in written)
    trainer.close()
    return {"equal": equal, "whole": most[0], "parts": len(seen), "matrices": sum(one.ndim == 2 for one in written.values())}


if __name__ == "__main__":
    weight_transfer.PART_BYTES = 1 << 16
    policy, cases = open_artifact(Path(sys.argv[1])), json.loads(Path(sys.argv[2]).read_text())
    for number, case in enumerate(cases):
        numbers = gathers(policy, Path(sys.argv[2]).parent / f"exported-{number}", **case)
        if torch.distributed.get_rank() == 0:
            print("numbers", json.dumps(numbers), flush=True)
