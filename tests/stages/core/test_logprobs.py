import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.execution import Numerics
from stages.core.batches import collate, document
from stages.core.logprobs import IsolationError, PolicyModule, ScoreHead, probe_isolation

DOCS = [document([5, 6, 7], [8, 9, 2]), document([11], [12, 2]), document([20, 21, 22, 23], [24, 2])]


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)).eval()


def by_hand(model, doc, temperature=1.0):
    """One document alone, through the model's own forward and a plain log-softmax."""
    logits = model(torch.tensor([doc.ids])).logits[0].double() / temperature
    logps = logits.log_softmax(-1)
    return [logps[t - 1, doc.ids[t]].item() for t in range(1, len(doc)) if doc.trained[t]]


@pytest.mark.parametrize("numerics", [Numerics(), Numerics(packing=False)], ids=["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_each_document_alone(llama, numerics, temperature):
    logps, _ = PolicyModule(llama, chunk=1024)(collate(DOCS, numerics, pad_id=2), temperature)
    expected = [value for doc in DOCS for value in by_hand(llama, doc, temperature)]
    assert logps.tolist() == pytest.approx(expected, abs=1e-5)


def test_chunks_change_neither_value_nor_gradient(llama):
    batch = collate(DOCS, Numerics(), pad_id=0)
    gradients = []
    for chunk in (1024, 2):
        llama.zero_grad()
        logps, _ = PolicyModule(llama, chunk)(batch)
        logps.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in llama.parameters()]))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-5)


def test_entropy_of_a_uniform_policy_is_log_v(llama):
    uniform = PolicyModule(llama, chunk=1024)
    _, entropy = uniform(collate(DOCS, Numerics(), pad_id=0), temperature=1e6, entropy=True)
    assert entropy.tolist() == pytest.approx([torch.tensor(64.0).log().item()] * len(entropy), abs=1e-4)


def test_log_softmax_of_bf16_logits_is_taken_in_fp32(llama):
    model = LlamaForCausalLM(llama.config).to(torch.bfloat16).eval()
    batch = collate(DOCS, Numerics(), pad_id=0)
    logps, _ = PolicyModule(model, chunk=1024)(batch)
    hidden = model.model(batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False).last_hidden_state[0]
    exact = model.lm_head(hidden[batch.places_N]).double().log_softmax(-1).gather(-1, batch.targets_N[:, None])[:, 0]
    assert logps.dtype == torch.float32 and torch.allclose(logps.double(), exact, atol=1e-5)


def test_the_probe_accepts_isolated_documents_and_catches_a_leak(llama):
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for numerics in (Numerics(), Numerics(packing=False)):
            probe_isolation(PolicyModule(LlamaForCausalLM(llama.config).to(dtype).eval(), 1024), numerics, cpu)

    class Leaking(PolicyModule):
        """Positions that do not restart, as a collator that forgot them would give."""

        def forward(self, batch, temperature=1.0, entropy=False):
            width = batch.input_ids_BT.shape[1]
            batch.position_ids_BT.copy_(torch.arange(width)[None])
            return super().forward(batch, temperature, entropy)

    with pytest.raises(IsolationError, match="packing: false"):
        probe_isolation(Leaking(llama, 1024), Numerics(), cpu)


def test_the_score_head_computes_in_fp32_on_bf16_weights():
    head = ScoreHead(512, 1, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(3, 512).to(torch.bfloat16)
    exact = hidden.double() @ head.weight.double().T
    assert head(hidden).dtype == torch.float32 and torch.allclose(head(hidden).double(), exact, atol=1e-5)
