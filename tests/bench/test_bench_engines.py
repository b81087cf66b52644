"""The engines of the benchmark on tiny models, and what a cycle of theirs reads."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_checkpoint
import torch

from mtplx import SamplerConfig, kernels
from mtplx.bench import engines, peers, traffic
from mtplx.bench.engines import OwnEngine, TransformersEngine
from mtplx.bench.run import Task
from mtplx.drafters.attached import AttachedHead, FusedHead
from mtplx.drafters.mtp import HeadSlots
from mtplx.errors import MtplxError
from mtplx.llm import LLM
from mtplx.models.checkpoint import GenerationDefaults, locate
from mtplx.models.fused import FusedTrunk
from mtplx.models.linear import KernelLinear, hand_over, linear_layers

SAMPLING = SamplerConfig(temperature=0.7, top_p=0.9, top_k=20, seed=3)
PROMPT = tuple(range(40, 60))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    return tiny_checkpoint.write(directory / "model"), tiny_checkpoint.write_head(
        directory / "head"
    )


@pytest.fixture(scope="module", params=["torch", "kernels"])
def llm(request):
    trunk = tiny.llama(tiny_checkpoint.VOCAB_SIZE, heads=1)
    head = tiny.eagle3(trunk)
    if request.param == "torch":
        bound = AttachedHead(head, trunk)
    else:
        if (library := kernels.find()) is None:
            pytest.skip("the kernels are not built")
        for name, layer in linear_layers(trunk.model):
            hand_over(trunk.model, name, library, layer.weight, None)
        trunk = FusedTrunk(trunk.model, library)
        bound = FusedHead(head, trunk, library)
    defaults = GenerationDefaults((), {})
    return LLM("tiny", trunk, bound, tiny_checkpoint.tokenizer(), defaults, 2)


def test_own_engine_decodes_and_its_cycles_are_taken_apart(llm):
    engine = OwnEngine(llm, 2, "block", "tiny")
    task = Task(PROMPT, 12, SAMPLING, frozenset())
    did = engine.generate(task)
    assert did.tokens == did.timed_tokens > 0
    assert 0 < did.cycles <= did.tokens and did.decode_seconds > 0 and did.prefill_seconds > 0
    assert sum(did.accepted_by_position) + did.cycles >= did.tokens
    split = engine.split([task, task])
    assert (split.depth, split.cycles) == (2, 2 * did.cycles)
    # Each is a part of the cycle: were one hooked no more, its time would be the host's.
    assert min(split.draft, split.verify, split.sample, split.host) > 0
    plain = OwnEngine(llm, 0, "block", "tiny").split([task])
    assert plain.draft == 0 < min(plain.verify, plain.sample, plain.host)
    # The watches are gone.
    assert engine.generate(task).cycles == did.cycles
    assert "watched" not in HeadSlots.draft.__qualname__


def test_a_cycle_reads_all_but_the_embedding_and_the_head_once_a_step():
    trunk = tiny.llama()
    head = tiny.attached(trunk)
    numbers = sum(p.numel() for p in trunk.model.parameters())
    weights = 4 * (numbers - trunk.embed.weight.numel())
    assert traffic.model_bytes(trunk.model) == weights
    step = 4 * sum(p.numel() for p in head.head.parameters())
    assert traffic.head_bytes(head) == step
    llm = SimpleNamespace(trunk=trunk, head=head, drafter=head)
    # 2 layers of 2 heads of 4 numbers, keys and values.
    token = 2 * 2 * 2 * 4 * 4
    assert OwnEngine(llm, 3, "block", "").cycle_bytes(10) == weights + 3 * step + 10 * token


@pytest.mark.parametrize("llm", ["kernels"], indirect=True)
def test_tiles_are_read_instead_of_what_they_were_made_of(llm):
    layers = [part for part in llm.trunk.model.modules() if isinstance(part, KernelLinear)]
    # Seven of each of two layers, and the output; float32 beside that only in norms.
    assert len(layers) == 15
    tiles = sum(layer.data.nbytes for layer in layers)
    assert traffic.model_bytes(llm.trunk.model) == tiles + 5 * 16 * 4
    # Seven matrices, one to fuse the trunk's states, one to the vocabulary.
    parts = [*llm.head._layers._held[0][0].values(), llm.head._fuse, llm.head._output]
    sizes = [part.data.nbytes for part in parts if isinstance(part, KernelLinear)]
    assert len(sizes) == 9 and traffic.head_bytes(llm.head) == sum(sizes)


def test_a_tied_output_is_read():
    trunk = tiny.llama()
    numbers = sum(p.numel() for p in trunk.model.parameters())
    trunk.model.lm_head.weight = trunk.embed.weight
    assert traffic.model_bytes(trunk.model) == 4 * (numbers - trunk.embed.weight.numel())


def test_transformers_counts_what_it_writes(checkpoint, tmp_path):
    found = locate(str(checkpoint[0]))
    (engine,) = engines.make(["transformers:bf16"], found, 1, 64, tmp_path)
    assert engine.name == "transformers:bf16" and "bfloat16" in engine.settings
    did = engine.generate(Task(PROMPT, 9, SAMPLING, frozenset()))
    assert (did.tokens, did.timed_tokens, did.cycles) == (9, 8, 8)
    assert did.decode_seconds > 0 and did.prefill_seconds > 0
    greedy = Task(PROMPT, 9, SamplerConfig(temperature=0.0), frozenset())
    ids = engine.model.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)
    stop = Task(PROMPT, 9, greedy.sampling, frozenset([int(ids[0, -1])]))
    assert engine.generate(stop).tokens <= 2
    # bfloat16, and half of it per position of what float32 has.
    assert engine.cycle_bytes(1) - engine.cycle_bytes(0) == 2 * 2 * 2 * 4 * 2


def test_transformers_loads_gguf_files_by_itself(monkeypatch, tmp_path):
    import transformers

    asked = []

    def load(directory, **arguments):
        asked.append((list(directory.iterdir()), arguments))
        return tiny.llama().model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    file = tmp_path / "some.gguf"
    file.write_bytes(b"")
    own = tmp_path / "own"
    own.mkdir()
    engine = TransformersEngine("gguf", SimpleNamespace(path=file, name="some"), own)
    assert "float32" in engine.settings
    ((names, arguments),) = asked
    assert [path.name for path in names] == ["some.gguf"] == [arguments["gguf_file"]]


# --- llama.cpp, as far as it goes without it ---------------------------------------------------


class Llama:
    """Counts up from the last token it was given."""

    def __init__(self, path, *, flash_attn, logits_all, draft_model, **settings):
        if "broken" in path:
            raise ValueError("no such\nfile")
        self.flash, self.all, self.draft = flash_attn, logits_all, draft_model
        self.settings, self.closed, self.ctx = settings, False, self

    def reset(self):
        self.seen = []

    def eval(self, tokens):
        self.seen += tokens

    def close(self):
        self.closed = True

    def set_seed(self, seed):
        self.seed = seed

    def generate(self, tokens, **settings):
        assert self.all and settings["min_p"] == 0
        token = tokens[-1]
        while True:
            token += 1
            yield token
            self.draft(np.array([token]))


@pytest.fixture
def llama_cpp(monkeypatch):
    module = ModuleType("llama_cpp")
    module.__version__ = "9"
    module.Llama, module.chains, module.quantized = Llama, [], []
    module.LLAMA_FTYPE_MOSTLY_Q4_0, module.LLAMA_FTYPE_MOSTLY_Q8_0 = 2, 7
    module.llama_sampler_chain_default_params = dict
    module.llama_sampler_chain_init = lambda params: module.chains.append([]) or module.chains[-1]
    module.llama_sampler_chain_add = list.append
    module.llama_sampler_free = list.clear
    for name in ("greedy", "temp", "top_k", "top_p", "dist"):
        part = f"llama_sampler_init_{name}"
        setattr(module, part, lambda *arguments, name=name: (name, *arguments))
    module.llama_sampler_sample = lambda chain, llama, index: (
        module.drawn.append(list(chain)) or llama.seen[-1] + 1
    )
    module.drawn = []
    module.llama_log_callback = lambda function: function
    module.llama_log_set = lambda function, data: None
    speculative = ModuleType("llama_cpp.llama_speculative")

    class Lookup:
        def __init__(self, num_pred_tokens):
            self.count = num_pred_tokens

        def __call__(self, ids):
            return ids

    speculative.LlamaPromptLookupDecoding = Lookup
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    monkeypatch.delitem(sys.modules, "mtplx.bench.llamacpp", raising=False)
    import mtplx.bench.llamacpp as ours

    monkeypatch.setattr(ours.traffic, "file_bytes", lambda path: 1000)
    config = SimpleNamespace(
        num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=4, hidden_size=16
    )
    monkeypatch.setattr(ours.gguf_families, "load_config", lambda file: config)
    monkeypatch.setattr(ours.gguf, "read_gguf", lambda path: path)
    yield module
    sys.modules.pop("mtplx.bench.llamacpp", None)


def test_llama_cpp_is_driven_token_by_token(llama_cpp, tmp_path):
    from mtplx.bench.llamacpp import LlamaCppEngine

    engine = LlamaCppEngine("file", tmp_path / "a.gguf", 3, 500, tmp_path)
    assert "3 threads" in engine.settings and "flash attention" in engine.settings
    assert engine.llama.settings["n_threads"] == engine.llama.settings["n_threads_batch"] == 3
    assert engine.llama.settings["n_ctx"] >= 500 and not engine.llama.closed
    assert engine.cycle_bytes(10) == 1000 + 10 * 2 * 2 * 2 * 4 * 2

    llama_cpp.drawn.clear()
    did = engine.generate(Task((5, 6), 4, SAMPLING, frozenset([100])))
    assert engine.llama.seen == [5, 6, 7, 8, 9]
    assert (did.tokens, did.timed_tokens, did.cycles) == (4, 4, 4)
    # The temperature shapes what top-p is taken of.
    chain = [("top_k", 20), ("temp", 0.7), ("top_p", 0.9, 1), ("dist", 3)]
    assert llama_cpp.drawn == [chain] * 4
    # A prompt may end with what would end a text.
    assert engine.generate(Task((5, 8), 4, SAMPLING, frozenset([8, 10]))).tokens == 2
    llama_cpp.drawn.clear()
    engine.generate(Task((5, 6), 1, SamplerConfig(temperature=0.0), frozenset()))
    assert llama_cpp.drawn == [[("greedy",)]]


def test_llama_cpp_looks_up(llama_cpp, tmp_path):
    from mtplx.bench.llamacpp import LlamaCppEngine

    engine = LlamaCppEngine("lookup", tmp_path / "a.gguf", 1, 500, tmp_path)
    assert "2 tokens looked up" in engine.settings and engine.llama.draft.count == 2
    did = engine.generate(Task((5, 6), 4, SAMPLING, frozenset()))
    assert (did.tokens, did.timed_tokens, did.cycles) == (4, 3, 3)
    assert engine.generate(Task((5, 6), 4, SAMPLING, frozenset([8]))).tokens == 2


def test_llama_cpp_quantises_once_more(llama_cpp, tmp_path):
    from mtplx.bench.llamacpp import LlamaCppEngine

    class Settings(ctypes_structure()):
        pass

    asked = []
    llama_cpp.llama_model_quantize_default_params = Settings

    def quantize(source, target, settings):
        asked.append((source, target))
        return int(b"bad" in source)

    llama_cpp.llama_model_quantize = quantize
    engine = LlamaCppEngine("Q4_0", tmp_path / "a.gguf", 1, 50, tmp_path)
    assert asked == [(str(tmp_path / "a.gguf").encode(), str(engine.path).encode())]
    assert engine.path.parent == tmp_path and engine.path != tmp_path / "a.gguf"
    with pytest.raises(MtplxError, match="cannot quantise"):
        LlamaCppEngine("Q8_0", tmp_path / "bad.gguf", 1, 50, tmp_path)
    with pytest.raises(MtplxError, match=r"broken.gguf: llama.cpp cannot load it \(no such file\)"):
        engines.make(
            ["llama.cpp:file"], SimpleNamespace(path=tmp_path / "broken.gguf"), 1, 9, tmp_path
        )


def ctypes_structure():
    import ctypes

    class Settings(ctypes.Structure):
        _fields_ = [
            ("nthread", ctypes.c_int32),
            ("ftype", ctypes.c_int),
            ("allow_requantize", ctypes.c_bool),
        ]

    return Settings


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["llama"], "no engine 'llama'; there are llama.cpp, transformers"),
        (["llama.cpp:Q5"], "llama.cpp has no way 'Q5'; there are file, Q4_0, Q8_0, lookup"),
        (["llama.cpp:"], "llama.cpp has no way ''"),
        (["transformers", "transformers"], "named twice"),
        (["llama.cpp", "llama.cpp:Q4_0"], "named twice"),
    ],
)
def test_wrong_names_are_refused(names, problem):
    with pytest.raises(ValueError, match=problem):
        peers.check(names)


def test_a_library_stands_for_all_that_can_read_the_model(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda module: module)
    assert list(peers.expand(["transformers"], "m", is_gguf=False)) == ["transformers:bf16"]
    assert list(peers.expand(["transformers", "llama.cpp:Q4_0"], "m.gguf", is_gguf=True)) == [
        "transformers:bf16",
        "transformers:gguf",
        "llama.cpp:Q4_0",
    ]
    with pytest.raises(MtplxError, match="reads GGUF files, and m is none"):
        peers.expand(["llama.cpp"], "m", is_gguf=False)
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    with pytest.raises(MtplxError, match=r"needs llama-cpp-python: pip install llama"):
        peers.expand(["llama.cpp"], "m.gguf", is_gguf=True)
