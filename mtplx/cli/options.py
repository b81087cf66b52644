"""The options that commands share, and what they mean together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtplx.cli import show
from mtplx.errors import MtplxError
from mtplx.grammar import GrammarSpec
from mtplx.sampling import SamplerConfig, Verifier

if TYPE_CHECKING:
    from mtplx.drafters.find import DrafterName
    from mtplx.llm import LLM

DEFAULT_MODEL = "smollm2-135m"
_SAMPLING = "Sampling (the checkpoint's own settings where not given)"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A built-in name, a directory in Hugging Face layout, a .gguf file or a hub id.",
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="HEAD",
        help="An attached head instead of the model's own: a directory or a hub id.",
    ),
]
Drafter = Annotated[
    Literal["auto", "mtp", "ngram", "mtp+ngram"],
    typer.Option(
        "--drafter",
        help="What drafts: the model's head (mtp), a lookup of what followed when the text last "
        "stood like this (ngram, for any model), or whichever does better. auto is the head, and "
        "nothing where there is none.",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="Draft with this smaller model of the same vocabulary, or Gemma 4's assistant.",
    ),
]


def read_depth(text: str) -> int | Literal["auto"]:
    """A depth as it is written; raises `typer.BadParameter` for what is none."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or len(text) > DIGITS:
        raise typer.BadParameter(f"{text!r} is neither a number from 0 up nor auto")
    return int(text)


DIGITS = 9
"""Of a depth at most: Python reads no number of thousands of them, and none has more than a few."""

Depth = Annotated[
    # Typer knows no type of a number or a word.
    Any,
    typer.Option(
        "--depth",
        "-k",
        parser=read_depth,
        metavar="N|auto",
        help="Tokens drafted per cycle; 0 for none, auto for as many as pay. If not given, auto, "
        "or what the drafter recommends where a seed's or a greedy text might depend on it.",
        show_default=False,
    ),
]
FixedDepth = Annotated[
    int | None,
    typer.Option(
        "--depth",
        "-k",
        min=0,
        metavar="N",
        help="Tokens drafted per cycle; 0 for none. What the head recommends if not given.",
    ),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Most tokens to write.")
]
Temperature = Annotated[
    float | None,
    typer.Option(metavar="T", help="0 is greedy.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Keep the likeliest tokens that reach P.", rich_help_panel=_SAMPLING
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        metavar="K", help="Keep the K likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Drop tokens less likely than P times the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
TypicalP = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Keep the most typical tokens that reach P.", rich_help_panel=_SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="R", help="Above 1, tokens seen before get less.", rich_help_panel=_SAMPLING
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        metavar="R", help="Above 0, tokens written before get less.", rich_help_panel=_SAMPLING
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="R", help="The same, for every time they were written.", rich_help_panel=_SAMPLING
    ),
]
NoRepeatNgram = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="No run of N tokens comes twice; 0 is off.", rich_help_panel=_SAMPLING
    ),
]
MinTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Least tokens to write.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="S", help="The same seed writes the same text.", rich_help_panel=_SAMPLING
    ),
]
Rule = Annotated[
    Verifier | None,
    typer.Option(
        "--verifier",
        help="How drafts are kept, always exactly. coupled with a seed, else block.",
        rich_help_panel=_SAMPLING,
    ),
]
Dtype = Annotated[
    Literal["bfloat16", "float32", "float16"] | None,
    typer.Option(help="Of the weights. bfloat16 where the device computes in it, else float32."),
]
Quantize = Annotated[
    Literal["int8", "int4", "file", "none"] | None,
    typer.Option(
        help="On a CPU, round the linear layers to so many bits, or take a GGUF file's own blocks: "
        "several times faster."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=512,  # far more of them exhaust what a process may map
        metavar="N",
        help="Threads of a CPU to compute with. If not given, one for each physical core.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Slower: the same bits in every pass, so a seed's text is the same at every depth.",
    ),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="cpu, cuda, mps, … The best one if not given.")
]
_ANSWER = "What the answer is to be"
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="JSON that follows the schema in this file.",
        rich_help_panel=_ANSWER,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        "--regex",
        metavar="REGEX",
        help="Text that this expression matches as a whole.",
        rich_help_panel=_ANSWER,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        min=0,
        metavar="N",
        help="With --json: log-probabilities of each token and of the N likeliest.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def given_sampling(**settings: float | int | None) -> dict[str, Any]:
    """The settings that were given on the command line, checked before anything is loaded."""
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        SamplerConfig(**given)  # type: ignore[arg-type]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return given


def sampling_for(llm: LLM, given: dict[str, Any]) -> SamplerConfig:
    """The checkpoint's own settings, with those given on the command line over them."""
    return llm.sampling_with(given)


def read_grammar(schema: Path | None, regex: str | None) -> GrammarSpec | None:
    """What the answer is to be, if that was said."""
    if schema is not None and regex is not None:
        raise typer.BadParameter("give --json-schema or --regex, not both")
    if schema is not None:
        try:
            return GrammarSpec.json_schema(schema.read_text(encoding="utf-8"))
        except (UnicodeError, MtplxError) as error:
            raise typer.BadParameter(f"{schema}: {error}") from None
    try:
        return None if regex is None else GrammarSpec.regex(regex)
    except MtplxError as error:
        raise typer.BadParameter(str(error)) from None


def load_llm(
    model: str,
    head: str | None,
    dtype: str | None,
    device: str | None,
    deterministic: bool = False,
    quantize: Quantize | None = None,
    threads: int | None = None,
    drafter: DrafterName = "auto",
    draft_model: str | None = None,
) -> LLM:
    """Load a model, and pass on what it has to note."""
    with show.waiting(f"loading {model} …") as report:
        # Here, not above: this import takes seconds.
        import torch

        from mtplx.llm import load

        if threads is not None:
            torch.set_num_threads(threads)

        llm = load(
            model,
            head=head,
            drafter=drafter,
            draft_model=draft_model,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            quantize=quantize,
            report=report,
        )
    for note in llm.notes:
        print(f"note: {note}", file=sys.stderr)
    return llm


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file or stdin, without a last newline from the latter two."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("give a PROMPT or --file, not both")
    try:
        if file is not None:
            text = file.read_text(encoding="utf-8").removesuffix("\n")
        elif prompt not in (None, "-"):
            text = str(prompt)
            text.encode()
        elif prompt is None and sys.stdin.isatty():
            raise typer.BadParameter("no prompt: give a PROMPT, --file or something on stdin")
        else:
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeError:
        raise typer.BadParameter("the prompt is not UTF-8 text") from None
    if not text:
        raise typer.BadParameter("the prompt is empty")
    return text
