import json
import shutil

import gguf
import pytest
import torch
from data_lab import publish, run_stage
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from pedigree.configs.base.jinja import MARKS
from pedigree.configs.rows.source_models import SourceModel
from pedigree.data.artifacts.artifacts import read_json, stage_key, write_json
from pedigree.data.chat.chat import Chat
from pedigree.data.store.storage import StoreError
from pedigree.stages.job.failures import StageError
from pedigree.stages.source_model.run import load_gguf
from pedigree.stages.training.chat_format import sampling_of

Q8_0 = gguf.GGMLQuantizationType.Q8_0

LLAMA = {
    "type": "random_llama", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 32, "vocabulary": 320, "context": 64, "seed": 5,
}  # fmt: skip


def conversation(number):
    asked = {"role": "user", "content": f"How many rivers are {number} + 1 rivers?"}
    return {"id": f"r{number}", "source": "s", "messages": [asked, {"role": "assistant", "content": f"{number + 1} rivers"}]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("corpus") / "rows", "conversation", [conversation(number) for number in range(30)])


@pytest.fixture(scope="module")
def llama(tmp_path_factory, corpus):
    return run_stage(tmp_path_factory.mktemp("model") / "llama", "source_model", {"source": LLAMA}, corpus=corpus)


def test_equal_sources_are_equal_bytes_whatever_the_order_of_the_corpus_and_the_state_of_torch(tmp_path, corpus, llama):
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    backwards = publish(tmp_path / "rows", "conversation", [conversation(number) for number in reversed(range(30))])
    again = run_stage(tmp_path / "a", "source_model", {"source": LLAMA}, corpus=backwards)
    assert again.record.content == llama.record.content
    assert torch.equal(before, torch.random.get_rng_state())
    other = run_stage(tmp_path / "b", "source_model", {"source": LLAMA | {"seed": 6}}, corpus=corpus)
    changed = {entry.path for entry in other.record.files} - {entry.path for entry in llama.record.files if entry in other.record.files}
    assert changed == {"model.safetensors"}


def test_model_tokenizer_and_generation_agree_on_the_ends(llama):
    chat = Chat(llama.payload)
    model = AutoModelForCausalLM.from_pretrained(llama.payload)
    ends = {model.config.eos_token_id, GenerationConfig.from_pretrained(llama.payload).eos_token_id, chat.eos_id}
    assert ends == {chat.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert model.config.pad_token_id == chat.pad_id == chat.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert model.config.vocab_size == len(chat.tokenizer) == llama.record.metrics["vocabulary"] <= 320
    assert sum(p.numel() for p in model.parameters()) == llama.record.metrics["parameters"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, None),
        ({"do_sample": True, "min_p": 0.1}, None),
        ({"do_sample": True}, None),
        ({"repetition_penalty": 1.1}, None),
        ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),  # transformers refuses to save these
        ({"do_sample": False, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}),  # vLLM samples
        ({"do_sample": True, "temperature": 0.0, "top_p": 0.5}, {}),  # transformers refuses to generate
        ({"max_length": 20, "max_new_tokens": 8, "forced_eos_token_id": 5, "num_beams": 4, "eos_token_id": [2, 0]}, {}),
        ({}, None),
    ],
)
def test_the_sampling_values_of_a_model_are_handed_on(tmp_path, given, kept):
    """Of its generation config, but not lengths or searches, as fine-tunes by other libraries have them; and transformers saves them."""
    found, kept = sampling_of(GenerationConfig(**given)), given if kept is None else kept
    assert found == kept
    GenerationConfig(**found).save_pretrained(tmp_path)
    assert kept.items() <= read_json(tmp_path / "generation_config.json").items()


def test_an_imported_model_has_the_sampling_values_of_its_folder_and_its_own_ends(tmp_path, llama):
    folder = shutil.copytree(llama.payload, tmp_path / "given")
    ends, given = read_json(folder / "generation_config.json"), {"do_sample": True, "temperature": 0.7, "top_k": 20}
    write_json(folder / "generation_config.json", ends | given)
    made = run_stage(tmp_path / "made", "source_model", {"source": {"type": "folder", "path": "given"}}, files={"given": folder})
    AutoModelForCausalLM.from_pretrained(made.payload).save_pretrained(tmp_path / "again")  # as a trainer does
    for written in (made.payload, tmp_path / "again"):
        assert read_json(written / "generation_config.json") == ends | given


def test_digits_are_tokens_of_their_own(llama):
    tokenizer = Chat(llama.payload).tokenizer
    assert [tokenizer.decode([token]) for token in tokenizer("123", add_special_tokens=False)["input_ids"]] == ["1", "2", "3"]


def test_a_folder_gives_the_same_bytes_wherever_it_lies(tmp_path, llama):
    source = {"source": {"type": "folder", "path": "models/x"}, "dtype": "bf16"}
    made = [
        run_stage(tmp_path / name, "source_model", source, files={"models/x": shutil.copytree(llama.payload, tmp_path / f"{name}_in")})
        for name in ("a", "b")
    ]
    assert made[0].record.content == made[1].record.content
    stored, original = (load_file(artifact.payload / "model.safetensors") for artifact in (made[0], llama))
    assert all(torch.equal(stored[name], original[name].bfloat16()) for name in original)


def test_a_damaged_model_and_a_foreign_tokenizer_are_refused(tmp_path, llama):
    folder = shutil.copytree(llama.payload, tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    source = {"source": {"type": "folder", "path": "m"}}
    with pytest.raises(StageError, match=r"model\.norm\.weight contain non-finite values"):
        run_stage(tmp_path / "a", "source_model", source, files={"m": folder})
    few = publish(tmp_path / "rows", "conversation", [{"messages": [{"role": "user", "content": "a"}]}])
    small = run_stage(tmp_path / "small", "source_model", {"source": LLAMA}, corpus=few)
    foreign = shutil.copytree(small.payload, tmp_path / "foreign")
    (foreign / "tokenizer.json").write_bytes((llama.payload / "tokenizer.json").read_bytes())
    with pytest.raises(StageError, match=r"the tokenizer has \d+ tokens, but the model embeds \d+"):
        run_stage(tmp_path / "b", "source_model", source, files={"m": foreign})


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path, llama):
    folder = shutil.copytree(llama.payload, tmp_path / "strange")
    (folder / "config.json").write_text('{"model_type": "of-tomorrow"}')
    with pytest.raises(StageError, match="transformers cannot load this model"):
        run_stage(tmp_path / "a", "source_model", {"source": {"type": "folder", "path": "m"}}, files={"m": folder})


@pytest.mark.parametrize(
    ("config", "dropped", "says"),
    [
        ({"num_hidden_layers": 2}, None, r"which lack model\.layers\.1\."),  # transformers would make them up
        ({"intermediate_size": 16}, None, r"which have another shape for model\.layers\.0\.mlp\.down_proj"),
        ({}, "model.layers.0.mlp.up_proj.weight", r"which lack model\.layers\.0\.mlp\.up_proj"),
        ({}, "further", r"which also have model\.layers\.1\.mlp\.up_proj"),
    ],
)
def test_weights_of_another_model_than_the_config_are_refused(tmp_path, llama, config, dropped, says):
    folder = shutil.copytree(llama.payload, tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    weights = load_file(folder / "model.safetensors")
    if dropped == "further":
        weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].clone()
    save_file({name: tensor for name, tensor in weights.items() if name != dropped}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StageError, match=f"folder m: config.json describes another model than the weights, {says}"):
        run_stage(tmp_path / "a", "source_model", {"source": {"type": "folder", "path": "m"}}, files={"m": folder})


def test_a_folder_without_tokenizer_and_one_whose_template_is_anothers_are_refused(tmp_path, llama):
    source = {"source": {"type": "folder", "path": "m"}}
    folder = shutil.copytree(llama.payload, tmp_path / "strange")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|eot|>{% endfor %}")
    with pytest.raises(StageError, match=r"writes <\|eot\|>, which its tokenizer does not have as a token"):
        run_stage(tmp_path / "a", "source_model", source, files={"m": folder})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(StageError, match="folder m: it has no tokenizer"):
        run_stage(tmp_path / "b", "source_model", source | {"chat_template": "chatml"}, files={"m": folder})


def test_a_model_keeps_its_own_template_and_a_replaced_one_is_a_mark(tmp_path, llama):
    source = {"source": {"type": "folder", "path": "m"}}
    folder = shutil.copytree(llama.payload, tmp_path / "own")
    own = MARKS.sub("", (folder / "chat_template.jinja").read_text()).replace("user", "asker")
    (folder / "chat_template.jinja").write_text(own)
    kept = run_stage(tmp_path / "a", "source_model", source, files={"m": folder})
    assert Chat(kept.payload).template == own and kept.record.marks == () and kept.record.metrics["added_tokens"] == []
    replaced = run_stage(tmp_path / "b", "source_model", source | {"chat_template": "chatml"}, files={"m": folder})
    assert replaced.record.marks == ("the model's own chat template was replaced by chatml",)
    again = run_stage(tmp_path / "c", "source_model", source | {"chat_template": "chatml"}, files={"m": replaced.payload})
    assert again.record.marks == ()  # it is its own by now


def test_a_random_model_has_chatml_and_no_template_of_its_own():
    assert SourceModel.model_validate({"source": LLAMA}).chat_template == "chatml"
    assert SourceModel.model_validate({"source": {"type": "folder", "path": "m"}}).chat_template == "own"
    with pytest.raises(ValueError, match="chat_template is own, but a random_llama has none: name one of chatml, gemma"):
        SourceModel.model_validate({"source": LLAMA, "chat_template": "own"})


def test_a_model_that_pedigree_exported_keeps_its_records(tmp_path, llama, monkeypatch):
    """Otherwise its data, and the suites that it was chosen by, would be forgotten."""
    export = shutil.copytree(llama.payload, tmp_path / "export")
    record = llama.record
    key = stage_key(record.kind, record.version, record.config, [], {})
    written = {
        "record.json": record.model_copy(update={"inputs": (), "key": key}).model_dump(mode="json"),
        "run.json": {"schema_version": 2},
        "lineage.json": {"schema_version": 2, "artifacts": {}, "shared": {}, "patches": {}},
    }
    for name, value in written.items():
        write_json(export / "pedigree" / name, value)
    monkeypatch.setenv("PEDIGREE_HUB", str(tmp_path))
    mirror = shutil.copytree(export, tmp_path / "models" / "me" / "mine")
    folder, hub = {"type": "folder", "path": "m"}, {"type": "hub", "repo": "me/mine", "revision": "a" * 40}
    for name, source, files in (("a", folder, {"m": export}), ("b", hub, {})):
        made = run_stage(tmp_path / name, "source_model", {"source": source}, files=files)
        assert {one: read_json(made.evidence / "adopted-from/pedigree" / one) for one in written} == written
    plain = run_stage(tmp_path / "c", "source_model", {"source": folder}, files={"m": llama.payload})
    assert not (plain.evidence / "adopted-from").exists()
    for what, source, place in (("folder m", folder, export), ("hub model me/mine", hub, mirror)):
        (place / "generation_config.json").write_text("{}")
        with pytest.raises(StageError, match=rf"{what}: it was exported .*changed since \(generation_config.json is not as recorded\)"):
            run_stage(tmp_path / f"{place.name}_x", "source_model", {"source": source}, files={"m": export})
    with pytest.raises(ValueError, match="is an artifact of this project: use the stage that made it"):
        run_stage(tmp_path / "d", "source_model", {"source": {"type": "folder", "path": "artifacts/tiny/sft/payload"}})


def test_a_model_of_the_hub_gives_the_bytes_of_its_folder(tmp_path, llama, monkeypatch):
    folder = shutil.copytree(llama.payload, tmp_path / "folder")
    direct = run_stage(tmp_path / "a", "source_model", {"source": {"type": "folder", "path": "m"}}, files={"m": folder})
    monkeypatch.setenv("PEDIGREE_HUB", str(tmp_path / "mirror"))
    shutil.copytree(folder, tmp_path / "mirror" / "models" / "lab" / "tiny")
    hub = {"type": "hub", "repo": "lab/tiny", "revision": "pin me"}
    assert run_stage(tmp_path / "b", "source_model", {"source": hub}).record.content == direct.record.content
    with pytest.raises(StoreError, match=r"hub model lab/other: the mirror has no .*models/lab/other: download it with `hf download"):
        run_stage(tmp_path / "c", "source_model", {"source": hub | {"repo": "lab/other"}})


def test_a_random_model_needs_a_corpus(tmp_path):
    with pytest.raises(StageError, match="input `corpus`"):
        run_stage(tmp_path / "x", "source_model", {"source": LLAMA})


def as_gguf(folder, file):
    """The model as llama.cpp lays it out: rows of queries and keys are in pairs of the two halves of each head. `down_proj` is Q8_0."""
    config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
    writer = gguf.GGUFWriter(file, "llama")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = tokenizer["model"]["vocab"] | {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(tokens, key=tokens.__getitem__))
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        for part, count in heads.items():
            if part in name:
                tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        kept = {"tensor": tensor.contiguous().numpy(), "raw_dtype": None}
        if "down_proj" in name:
            kept = {"tensor": gguf.quants.quantize(kept["tensor"], Q8_0), "raw_dtype": Q8_0}
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), **kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_of_llama_cpp_is_parsed_once_and_gives_weights_and_tokens(tmp_path, llama, monkeypatch):
    as_gguf(llama.payload, tmp_path / "m.gguf")
    parsed, parse = [], gguf.GGUFReader.__init__
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda reader, file: (parsed.append(file), parse(reader, file))[1])
    model, tokenizer = load_gguf(tmp_path / "m.gguf")
    assert len(parsed) == 1
    expected = AutoModelForCausalLM.from_pretrained(llama.payload).state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name in [name for name in expected if "down_proj" in name]:
        scale = expected[name].unfold(1, 32, 32).abs().amax(2, keepdim=True) / 127  # of 32 weights, rounded to fp16; 127 steps at most
        off = (model.state_dict()[name] - expected[name]).abs()
        assert 0 < off.max() and (off.unfold(1, 32, 32) <= (0.5 + 127 * 2**-11) * scale).all()
        expected[name] = model.state_dict()[name]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    text = "How many rivers are 17 + 1 rivers?"
    assert tokenizer(text)["input_ids"] == Chat(llama.payload).tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_packaged_model_speaks(tmp_path):
    made = run_stage(tmp_path / "x", "source_model", {"source": {"type": "packaged", "asset": "smollm2-135m-instruct"}, "dtype": "bf16"})
    assert made.record.metrics["parameters"] == 134_515_008
    chat = Chat(made.payload)
    assert (chat.eos_id, chat.pad_id) == (2, 0)
    model = AutoModelForCausalLM.from_pretrained(made.payload, dtype=torch.float32)
    prompt = torch.tensor([chat.prompt([{"role": "user", "content": "What is the capital of France?"}])])
    with torch.no_grad():
        answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert "Paris" in chat.decode(answer[0, prompt.shape[1] :].tolist())
