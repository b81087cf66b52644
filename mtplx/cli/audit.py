"""`mtplx audit`: whether what comes out is what should."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from mtplx.cli import options, show
from mtplx.sampling import SamplerConfig, Verifier

if TYPE_CHECKING:
    from mtplx.audit.run import Audit
    from mtplx.llm import LLM

FAILED = 1
TEXTS = 1024
ASSISTED_TEXTS = 512
"""Where texts are drawn one at a time."""


def audit(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help=f"As for the other commands, {options.DEFAULT_MODEL} if not given; or the name "
            "that an endpoint has for it, there the first one.",
        ),
    ] = None,
    head: options.Head = None,
    depth: options.FixedDepth = None,
    verifier: Annotated[
        Verifier | None,
        typer.Option(help="The rule to audit; block if not given, token with --plant."),
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="T", help="Above 0.")] = 0.8,
    top_p: Annotated[float, typer.Option(metavar="P", help="1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(metavar="P", help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(metavar="R", help="1 is off.")] = 1.0,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"Texts under speculation, and half as many without; {TEXTS}, or "
            f"{ASSISTED_TEXTS} where they are drawn one at a time.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**64 - 1,
            metavar="S",
            help="0 if not given; an endpoint is sent one only if it is.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="What the texts continue, as it is, without chat template; several times for "
            "several prompts. If not given, four short ones.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="ENGINE",
            help="Whose texts: mtplx, transformers, or the http:// or https:// address of an "
            "OpenAI-compatible endpoint that gives log-probabilities.",
        ),
    ] = "mtplx",
    mode: Annotated[
        Literal["plain", "mtp", "prompt-lookup", "assistant"],
        typer.Option(help="Of transformers' generate."),
    ] = "plain",
    assistant: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model that drafts in mode assistant."),
    ] = None,
    plant: Annotated[
        str | None,
        typer.Option(metavar="FAULT", help="Break the verifier on purpose; `list` names faults."),
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    deterministic: options.Deterministic = False,
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    json: options.Json = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", dir_okay=False, writable=True, metavar="FILE", help="Write a page here."
        ),
    ] = None,
) -> None:
    """Test an engine's texts against the model's exact law. Fails, with code 1, if they leave it.

    Draws many short texts under speculation and without, looks up what distribution each of their
    tokens should come from, and tests whether it did.
    """
    sampling = _sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    remote = engine.lower().startswith(("http://", "https://"))
    loaded = {
        "--head": head,
        "--dtype": dtype,
        "--device": device,
        "--deterministic": deterministic,
        "--quantize": quantize,
        "--threads": threads,
    }
    given = [name for name, value in loaded.items() if value]
    _check(engine, remote, mode, assistant, plant, verifier, given, html)
    if plant and _only_lists_faults(plant):
        return
    prompts = _prompts(prompt)
    if remote:
        result = _endpoint(engine, model, prompts, sampling, samples, seed, depth)
    else:
        llm = options.load_llm(
            model or options.DEFAULT_MODEL, head, dtype, device, deterministic, quantize, threads
        )
        depth = llm.depth if depth is None else depth
        if engine == "mtplx":
            rule: Verifier = verifier or ("token" if plant else "block")
            result = _own(llm, prompts, sampling, depth, rule, samples or TEXTS, seed or 0, plant)
        else:
            count = samples or (TEXTS if mode == "plain" else ASSISTED_TEXTS)
            result = _transformers(
                llm, prompts, sampling, depth, mode, assistant, (dtype, device), count, seed or 0
            )
    if head:
        result.settings["head"] = head
    if deterministic:
        result.settings["deterministic"] = True
    if quantize:
        result.settings["quantize"] = quantize
    result.settings["prompts"] = prompts

    # The page last: where it cannot be written, the work is not lost.
    if json:
        print(json_format.dumps(result.to_dict(), ensure_ascii=False, allow_nan=False))
    else:
        show.console().print(_table(result))
        for note in result.notes:
            print(f"note: {note}", file=sys.stderr)
        print(result.verdict)
    if html is not None:
        from mtplx.audit.report import html as page

        # A path may hold bytes that are no text.
        html.write_text(page(result), encoding="utf-8", errors="replace")
    if not result.passed:
        raise typer.Exit(FAILED)


def _only_lists_faults(plant: str) -> bool:
    from mtplx.audit.faults import FAULTS

    if plant == "list":
        for name, what in FAULTS.items():
            print(f"{name:20}{what}")
        return True
    if plant not in FAULTS:
        raise typer.BadParameter(f"--plant: no fault {plant!r}; there are {', '.join(FAULTS)}")
    return False


def _prompts(given: list[str] | None) -> list[str]:
    """Those given, checked before anything is loaded, or the usual ones."""
    if not given:
        from mtplx.audit.run import PROMPTS

        return list(PROMPTS)
    for text in given:
        try:
            text.encode()
        except UnicodeError:
            raise typer.BadParameter("--prompt: it is not UTF-8 text") from None
        if not text:
            raise typer.BadParameter("--prompt: it is empty")
    if len(set(given)) < len(given):
        raise typer.BadParameter("--prompt: one is given twice; draw more --samples instead")
    return given


def _sampling(**settings: Any) -> SamplerConfig:
    try:
        return SamplerConfig(**settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _check(
    engine: str,
    remote: bool,
    mode: str,
    assistant: str | None,
    plant: str | None,
    verifier: str | None,
    given: Sequence[str],
    html: Path | None,
) -> None:
    """Refuse what does not go together, before anything is loaded."""
    if not remote and engine not in ("mtplx", "transformers"):
        raise typer.BadParameter(
            f"--engine is mtplx, transformers or an address with http://, not {engine!r}"
        )
    if engine != "transformers" and (mode != "plain" or assistant):
        raise typer.BadParameter("--mode and --assistant are for --engine transformers")
    if (mode == "assistant") != (assistant is not None):
        raise typer.BadParameter("--mode assistant and --assistant MODEL go together")
    if engine != "mtplx" and (plant or verifier):
        raise typer.BadParameter("--plant and --verifier are for this engine's own verifiers")
    if remote and given:
        raise typer.BadParameter(f"{given[0]} is for models that are loaded here")
    own = {"--head", "--deterministic"}.intersection(given)
    if engine == "transformers" and own:
        raise typer.BadParameter(f"{min(own)} is for this engine's own texts")
    if plant and verifier not in (None, "token"):
        raise typer.BadParameter("--plant breaks the verifier `token`; leave out --verifier")
    if html is not None and not html.absolute().parent.is_dir():
        raise typer.BadParameter(f"--html: there is no directory {html.absolute().parent}")


def _own(
    llm: LLM,
    texts: Sequence[str],
    sampling: SamplerConfig,
    depth: int,
    verifier: Verifier,
    samples: int,
    seed: int,
    plant: str | None,
) -> Audit:
    from mtplx.audit.engines import OwnEngine
    from mtplx.audit.run import audit

    prompts = [llm.encode(text, raw=True) for text in texts]
    engine = OwnEngine(llm, prompts, sampling, depth, verifier, plant)
    settings: dict[str, Any] = {"depth": depth}
    if depth:
        settings["verifier"] = verifier
    with show.stages() as report:
        return audit(
            engine,
            llm.trunk,
            prompts,
            sampling,
            model=llm.name,
            depth=depth,
            samples=samples,
            seed=seed,
            settings=settings | _settings(sampling, seed) | _place(llm),
            fault=plant,
            progress=report,
        )


def _transformers(
    llm: LLM,
    texts: Sequence[str],
    sampling: SamplerConfig,
    depth: int,
    mode: Literal["plain", "mtp", "prompt-lookup", "assistant"],
    assistant: str | None,
    place: tuple[str | None, str | None],
    samples: int,
    seed: int,
) -> Audit:
    from mtplx.audit.engines import TransformersEngine
    from mtplx.audit.run import audit
    from mtplx.models.linear import linear_layers
    from mtplx.models.trunk import Trunk

    prompts = [llm.encode(text, raw=True) for text in texts]
    drafter = None
    if assistant is not None:
        drafter = options.load_llm(assistant, None, *place).trunk.model
    depth = max(depth, 1)
    engine = TransformersEngine(llm, prompts, sampling, depth, mode, drafter)
    # Its law is that of the same layers' code: in torch, where they are torch's.
    trunk = Trunk(llm.trunk.model) if linear_layers(llm.trunk.model) else llm.trunk
    settings: dict[str, Any] = {} if mode == "plain" else {"depth": depth}
    if assistant is not None:
        settings |= {"assistant": assistant}
    with show.stages() as report:
        return audit(
            engine,
            trunk,
            prompts,
            sampling,
            model=llm.name,
            depth=depth,
            samples=samples,
            seed=seed,
            settings=settings | _settings(sampling, seed) | _place(llm),
            progress=report,
        )


def _endpoint(
    address: str,
    model: str | None,
    prompts: Sequence[str],
    sampling: SamplerConfig,
    samples: int | None,
    seed: int | None,
    depth: int | None,
) -> Audit:
    from mtplx.audit.endpoint import Endpoint
    from mtplx.audit.run import audit

    depth = 3 if depth is None else depth
    engine = Endpoint(address, model, prompts, sampling, seeded=seed is not None)
    with show.stages() as report:
        return audit(
            engine,
            None,
            [[] for _ in prompts],
            sampling,
            model=engine.model,
            depth=depth,
            samples=samples or TEXTS,
            seed=seed or 0,
            settings=_settings(sampling, seed),
            progress=report,
        )


def _settings(sampling: SamplerConfig, seed: int | None) -> dict[str, Any]:
    neutral = show.sampling_settings(SamplerConfig())
    used = show.sampling_settings(replace(sampling, seed=seed))
    return {
        name: value
        for name, value in used.items()
        if name in ("temperature", "seed") or value != neutral[name]
    }


def _place(llm: LLM) -> dict[str, Any]:
    kind = str(llm.trunk.dtype).removeprefix("torch.")
    return {"dtype": kind, "device": str(llm.trunk.device)}


def _table(audit: Audit) -> Table:
    from mtplx.audit.report import rounding_words

    table = Table(
        title=escape(f"{audit.model}, {audit.engine}"),
        caption=rounding_words(audit) if audit.rounding else None,
    )
    table.add_column("sample")
    table.add_column("draws at")
    for name in ("number", "distance (95%)", "seen from", "least p, adjusted"):
        table.add_column(name, justify="right")
    for group in audit.groups:
        tests = [t for t in audit.tests if (t.sample, t.group) == (group.sample, group.name)]
        least = min(test.adjusted for test in tests)
        low, high = group.distance.low, group.distance.high
        table.add_row(
            group.sample,
            group.name,
            str(group.draws),
            f"{low:.3f} to {high:.3f}",
            f"{group.smallest_seen:.3f}",
            f"{least:.2g}",
            style="bold red" if least < audit.alpha else None,
        )
    return table
