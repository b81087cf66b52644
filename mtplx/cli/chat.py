"""`mtplx chat`: a conversation at the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mtplx.cli import options, show
from mtplx.errors import MtplxError

if TYPE_CHECKING:
    from mtplx.llm import LLM, Depth
    from mtplx.sampling import SamplerConfig

HELP = """\
/help          this list
/reset         forget the conversation
/system TEXT   set the system message and begin anew; without TEXT, the model's own
/depth N       draft N tokens per cycle; 0 for none, auto for as many as pay
/stats         show or hide the figures after each answer
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer. What it said so far is kept."""


class Conversation:
    """The history of a chat, and the commands that change how it goes on."""

    def __init__(
        self,
        llm: LLM,
        sampling: SamplerConfig,
        depth: Depth,
        max_tokens: int,
        system: str | None,
        stats: bool,
    ) -> None:
        self.llm = llm
        self.sampling = sampling
        self.depth = depth
        self.max_tokens = max_tokens
        self.system = system
        self.stats = stats
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message alone."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def command(self, line: str) -> bool:
        """Carry out a line that begins with a slash; False to leave."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                _say(HELP)
            case "/reset":
                self.reset()
                _say("the conversation is forgotten")
            case "/system":
                self.system = argument or None
                self.reset()
                _say("a new conversation begins")
            case "/depth":
                self._set_depth(argument)
            case "/stats":
                self.stats = not self.stats
                _say(f"figures are {'shown' if self.stats else 'hidden'}")
            case _:
                _say(f"there is no {name}; /help lists what there is")
        return True

    def _set_depth(self, argument: str) -> None:
        try:
            depth = options.read_depth(argument)
        except typer.BadParameter:
            _say(f"the depth is {self.depth}; /depth N takes a number from 0 up, or auto")
            return
        if depth and depth != "auto" and self.llm.drafter is None:
            _say(f"{self.llm.name} has no MTP head to draft with")
        else:
            self.depth = depth
            _say(f"the depth is {depth}")

    def answer(self, text: str) -> None:
        """Ask, and write the answer as it comes; Ctrl-C ends it early."""
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        last = None
        try:
            pieces = self.llm.stream(
                self.messages,
                max_tokens=self.max_tokens,
                depth=self.depth,
                sampling=self.sampling,
            )
            for last in pieces:
                said.append(last.text)
                print(last.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except MtplxError as error:
            # The message was not answered: leave it out, or every later one fails with it.
            self.messages.pop()
            _say(f"{error} (/reset begins anew)")
            return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(said)})
        if last is not None and self.stats:
            _say(show.stats_line(last.stats))


def chat(
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = None,
    drafter: options.Drafter = "auto",
    draft_model: options.DraftModel = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message.")
    ] = None,
    depth: options.Depth = None,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Show figures after each answer.")
    ] = True,
) -> None:
    """Talk with a model. `/help` lists what can be typed."""
    given = options.given_sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    llm = options.load_llm(
        model,
        head,
        dtype,
        device,
        quantize=quantize,
        threads=threads,
        drafter=drafter,
        draft_model=draft_model,
    )
    if not llm.tokenizer.chat_template:
        raise MtplxError(f"{llm.name} has no chat template: use `mtplx generate --raw`")
    if depth and depth != "auto" and llm.drafter is None:
        raise MtplxError(
            f"{llm.name} has no MTP head to draft with; use --depth 0, --drafter ngram or "
            "--draft-model"
        )
    sampling = options.sampling_for(llm, given)
    conversation = Conversation(
        llm,
        sampling,
        llm.default_depth(sampling) if depth is None else depth,
        max_tokens,
        system,
        stats,
    )
    _say(f"{llm.name}, depth {conversation.depth}, {show.sampling_words(sampling)}; /help for help")
    _talk(conversation)


def _talk(conversation: Conversation) -> None:
    """Read lines until /exit or the end of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  gives input() line editing and history
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            _say("\n(Ctrl-D or /exit leaves)")
            continue
        except UnicodeDecodeError:
            _say("that line is not UTF-8 text")
            continue
        if line.startswith("/"):
            if not conversation.command(line):
                return
        elif line:
            conversation.answer(line)
    if interactive:
        print()


def _say(text: str) -> None:
    """A line of the program's own, apart from the model's."""
    show.console().print(text, style="dim", markup=False, soft_wrap=True)
