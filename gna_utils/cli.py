"""The command line: ``gna run``, ``build``, ``serve``, ``train``, ``models``, ``doctor``.

Each command imports what it needs when it runs, so that ``gna --help`` answers at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from . import __version__
from .errors import GnaError

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 130, 128 + signal.SIGTERM


class _Terminated(BaseException):
    """SIGTERM as an exception, so that it ends a run as orderly as Ctrl-C does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it went well, 2 with a sentence on stderr when it cannot be done."""
    options = _parser().parse_args(arguments)
    try:
        with _terminable():
            return options.command(options) or 0
    except GnaError as error:
        print(f"gna: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("gna: stopped; nothing was left half-written.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _Terminated:
        print("gna: terminated; nothing was left half-written.", file=sys.stderr)
        return EXIT_TERMINATED
    except BrokenPipeError:  # the reader of our output went away, as in `gna models | head`
        sys.stderr.close()
        return 0


@contextmanager
def _terminable() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not break off the tidying
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gna", description="Run the chapters of the book, build its site, look at this machine."
    )
    parser.add_argument("--version", action="version", version=f"gna {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run one chapter, on another model or with other parameters")
    run.add_argument("chapter", help="01, retrieval_tasks, 01_retrieval_tasks or the path of a notebook")
    run.add_argument(
        "-p", dest="pairs", action="append", default=[], metavar="NAME=VALUE", help="a parameter"
    )
    run.add_argument("--parameters", action="store_true", help="list the chapter's parameters and stop")
    run.add_argument("--out", metavar="DIR", help="where results go (default: _build/runs)")
    run.add_argument("--force", action="store_true", help="run even if the same run is there already")
    _add_timeout(run)
    run.set_defaults(command=_run)

    build = commands.add_parser("build", help="run the chapters that changed and build the site")
    build.add_argument(
        "--only", metavar="CHAPTER", action="append", default=[], help="run this one only, reuse the others"
    )
    build.add_argument("--force", action="store_true", help="run the chapters and make the pages in any case")
    _add_timeout(build)
    build.set_defaults(command=_build)

    serve = commands.add_parser("serve", help="show the built site on this machine")
    serve.add_argument("--port", type=int, default=8000, help="default: 8000")
    serve.set_defaults(command=_serve)

    train = commands.add_parser(
        "train", help="train one of the tiny models, or go on with a stopped training"
    )
    train.add_argument("name", metavar="NAME", help="tiny-transformer, tiny-mamba2, ... (see `gna models`)")
    train.add_argument("--seed", type=int, default=0, help="default: 0")
    train.add_argument("--rate", type=float, help="the highest learning rate (default: that of the recipe)")
    train.add_argument("--steps", type=int, help="stop after this many steps (default: all of the recipe)")
    train.add_argument("--out", metavar="DIR", help="default: _build/training/NAME-seedSEED-rateRATE")
    train.add_argument("--again", action="store_true", help="start anew even if there is a checkpoint")
    train.set_defaults(command=_train)

    doctor = commands.add_parser("doctor", help="print versions, devices, weights and disk space")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(command=_doctor)

    models = commands.add_parser("models", help="list the models that can be loaded by name")
    models.set_defaults(command=_models)
    return parser


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="for one cell (default: 3600)")


def _seconds(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of seconds above 0")
    return int(text)


def _run(options: argparse.Namespace) -> None:
    from .runs import execute, parameters

    given = parameters.parse_pairs(options.pairs)
    if options.parameters:
        chapter = execute.find_project().chapter(options.chapter)
        print(f"{chapter.name}:\n{parameters.describe(parameters.read(chapter.source(), chapter.path.name))}")
        return
    prepared = execute.plan(options.chapter, given, options.out)
    if prepared.record and not options.force:
        print(f"this run is there already, from {prepared.record.started}; --force runs it again")
        record = prepared.record
    else:
        record = execute.execute(prepared, timeout=options.timeout)
    print(f"executed notebook: {record.executed}\nrecord: {prepared.folder / 'record.json'}")


def _build(options: argparse.Namespace) -> None:
    from .runs.build import build_site

    names = [name for entry in options.only for name in entry.split(",") if name]
    if options.only and not names:
        raise GnaError(f"--only '{options.only[0]}' names no chapter: give its number, topic or name.")
    print(build_site(names, force=options.force, timeout=options.timeout))


def _serve(options: argparse.Namespace) -> None:
    from .runs.serve import serve

    try:
        serve(options.port)
    except KeyboardInterrupt:
        print()


def _train(options: argparse.Namespace) -> None:
    from .training import train

    folder = train(
        options.name,
        seed=options.seed,
        rate=options.rate,
        steps=options.steps,
        out=options.out,
        again=options.again,
    )
    print(f"model: {folder}\nrecord: {folder / 'training.json'}")


def _doctor(options: argparse.Namespace) -> None:
    from .runs import doctor

    content = doctor.report()
    print(doctor.as_json(content) if options.json else doctor.text(content))


def _models(options: argparse.Namespace) -> None:
    from .catalogue import registry

    cards = sorted(registry().values(), key=lambda card: (card.cached is None, card.name))
    width = max(len(card.name) for card in cards)
    for card in cards:
        size = f"{card.parameters / 1e6:,.{0 if card.parameters >= 1e7 else 1}f}M" if card.parameters else "?"
        where = {True: "here", False: "to fetch", None: "hub"}[card.cached]
        print(f"{card.name:<{width}}  {size:>9}  {where:<8}  {card.licence}, {card.what}")
        if card.accuracies:
            found = ", ".join(f"{task} {value:.2f}" for task, value in card.accuracies.items())
            print(f"{'':<{width}}  held-out accuracy: {found}")


if __name__ == "__main__":
    sys.exit(main())
