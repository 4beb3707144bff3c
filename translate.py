"""Translates with a trained model: `python translate.py "明日は天気"`.

Text in, text out, as bytes from end to end: UTF-8 whatever the locale, one line out for
each line in. The work is done by the SavedModel that `train.py` wrote.
"""

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from transformer_tf import explaining
from transformer_tf.client import connect, is_server
from transformer_tf.config import MAX_BEAM_SIZE, ConfigError, DecodingConfig
from transformer_tf.exports import DEFAULT_RUN, find_export
from transformer_tf.flags import OneLineParser, one_line
from transformer_tf.formats import FORMATS, render
from transformer_tf.lines import translate_lines

if TYPE_CHECKING:
    from transformer_tf.lines import Answer

# Lines are read, translated and written a window at a time, so that memory does not
# depend on the size of the input.
WINDOW_LINES = 2048

DESCRIPTION = """\
Translates lines of text. Only translations go to standard output, one line for each
line in, in the same order; an empty line gives an empty line."""

EPILOG = f"""{FORMATS}
exit codes: 0 done, 2 wrong use or no model, 5 a damaged model or a full disk"""


class CommandError(Exception):
    """What stops the command, in one line."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(one_line(message))
        self.exit_code = exit_code


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="translate.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("text", nargs="*", metavar="TEXT", help="what to translate (else: --input)")
    add("--input", metavar="FILE", help="lines to translate (else: standard input)")
    add("--output", metavar="FILE", help="where to write (else: standard output)")
    add(
        "--model",
        metavar="RUN_OR_EXPORT_OR_URL",
        help="directory that train.py wrote, an export in it, or a TensorFlow Serving: "
        "http://HOST:8501/v1/models/NAME, grpc://HOST:8500/NAME "
        f"(default: {DEFAULT_RUN}, or what comes along until you have trained one)",
    )
    add(
        "--beam_size", type=int, metavar="N", help="hypotheses side by side, 1 = greedy"
    )
    add("--length_penalty", type=float, metavar="ALPHA", help="more = longer")
    add("--extra_length", type=int, metavar="N", help="most tokens beyond the source's")
    add("--nbest", type=int, metavar="N", help="print the N best translations")
    add("--scores", action="store_true", help="print the score of each translation")
    add("--json", action="store_true", help="print a JSON object for each line")
    add("--reference", metavar="FILE", help="report BLEU and chrF against these lines")
    add("--target_lang", metavar="LANG", help="for BLEU (default: that of the run)")
    explaining.add_flags(parser)
    return parser


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Checks what can be checked without a model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.text and options.input:
        parser.error("TEXT and --input exclude each other, expected one of them")
    if options.beam_size is None and (options.nbest or 1) > DecodingConfig.beam_size:
        options.beam_size = min(options.nbest, MAX_BEAM_SIZE)
    try:
        explaining.check_flags(options)
        DecodingConfig(**decoding_options(options))
    except ConfigError as error:
        parser.error(f"--{str(error).removeprefix('--')}")
    beam_size = options.beam_size or DecodingConfig.beam_size
    if options.nbest is not None and not 1 <= options.nbest <= beam_size:
        parser.error(
            f"--nbest is {options.nbest}, expected 1 to {beam_size}, the beam size"
        )
    return options


def decoding_options(options: argparse.Namespace) -> dict[str, Any]:
    """What the user asked for; the export knows the rest."""
    names = ("beam_size", "length_penalty", "extra_length")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


# --- Reading and writing ----------------------------------------------------------


def open_file(path: str, mode: str) -> BinaryIO:
    try:
        return open(path, mode)
    except OSError as error:
        action = "read" if mode == "rb" else "write"
        raise CommandError(f"cannot {action} {path}: {error.strerror}") from error


def standard(stream: TextIO | None) -> BinaryIO:
    if stream is None:
        raise CommandError("standard input or output is closed, expected an open one")
    return stream.buffer


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines end at a line feed and nowhere else."""
    for line in file:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def windows(lines: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    lines = iter(lines)
    while window := list(itertools.islice(lines, size)):
        yield window


# --- Translating ------------------------------------------------------------------


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keeps TensorFlow's greetings from standard error.

    They are written to the file descriptor by C++ before any setting can stop them.
    Errors are not lost: they are exceptions.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def open_model(model: str | Path, hurry: bool) -> Callable[..., "Answer"]:
    """The way to ask a server or an export about sentences.

    In a hurry TensorFlow does not optimize the graph before the first answer: that
    takes 0.5 s, and makes a sentence 5 % faster.
    """
    if is_server(str(model)):
        with silence():
            return connect(str(model))
    with silence():
        # Not before, since it takes seconds: a mistake is answered at once.
        try:
            import tensorflow as tf

            from transformer_tf.translator import asker, load
        except ImportError as error:
            raise CommandError(
                f"cannot import TensorFlow ({error}), run `pip install -e .`"
            ) from error
        if hurry:
            tf.config.optimizer.set_experimental_options(
                {"disable_meta_optimizer": True}
            )
        return asker(load(model))


def translate_stream(
    ask: Callable[..., "Answer"],
    lines: Iterable[bytes],
    output: BinaryIO,
    options: argparse.Namespace,
    window: int,
) -> Iterator[bytes]:
    """Writes the translation of each line; yields the best ones, for the scores."""
    number = 0
    search = {**decoding_options(options), "nbest": options.nbest or 1}
    for some in windows(lines, window):
        for sentence in translate_lines(ask, some, **search):
            if sentence.truncated:
                warn(
                    f"line {number + 1} is longer than the model reads; its end is lost"
                )
            output.write(render(sentence, number, options))
            number += 1
            yield sentence.nbest[0][0]
        output.flush()


def report_scores(
    translations: Sequence[bytes], references: Sequence[bytes], target_lang: str
) -> None:
    """Prints BLEU and chrF with their signatures on standard error."""
    from transformer_tf.scores import score

    if not translations and not references:
        raise CommandError("there is nothing to score, expected lines to translate")
    if len(translations) != len(references):
        raise CommandError(
            f"{len(translations)} translations but {len(references)} lines in the "
            "--reference, expected one for each"
        )
    texts, targets = (
        [line.decode(errors="replace") for line in side]
        for side in (translations, references)
    )
    print(score(texts, targets, target_lang), file=sys.stderr)


def target_lang_of(model: str | Path) -> str:
    """What the run that an export belongs to translates into."""
    import yaml

    config = Path(model).parent.parent / "config.yaml"
    if not config.is_file():
        return "en"
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    return settings.get("target_lang", "en")


def warn(message: str) -> None:
    print(f"translate.py: {message}", file=sys.stderr)


def explain(options: argparse.Namespace) -> str:
    """What --explain prints, of numbers or of a model's best translation; with
    --attention alone, that translation."""
    if options.model and is_server(options.model):
        raise CommandError(
            "--explain and --attention look inside a run, which a server does not show;"
            " name one with --model"
        )
    with silence():
        if options.q:
            return explaining.explain_numbers(options)
        export = find_export(options.model)
        from export import load_run
        from transformer_tf.explain import see
        from transformer_tf.graphs import spell

        model, tokenizer, translator = load_run(export)
        text = os.fsencode(options.text[0]).decode(errors="replace")
        target = translator.best_ids(text, **decoding_options(options))
        seen = see(text, target, model, tokenizer)
        shown = spell([target], tokenizer).numpy()[0].decode(errors="replace")
        if options.attention:
            explaining.draw(options, seen, text, shown)
        return explaining.explain_text(options, seen) if options.explain else shown


# --- The command ------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    if options.explain or options.attention:
        standard(sys.stdout).write(explain(options).encode() + b"\n")
        return
    model = options.model
    if not (model and is_server(model)):
        model = find_export(model)
    with contextlib.ExitStack() as files:
        # All files are opened before the model: a mistake is answered at once.
        window = WINDOW_LINES
        if options.text:
            lines: Iterable[bytes] = [os.fsencode(text) for text in options.text]
        else:
            if options.input:
                source = files.enter_context(open_file(options.input, "rb"))
            else:
                source = standard(sys.stdin)
                if source.isatty():
                    window = 1  # somebody is waiting for the answer to each line
            lines = read_lines(source)
        references = None
        if options.reference:
            file = files.enter_context(open_file(options.reference, "rb"))
            references = list(read_lines(file))
        if options.output:
            refuse_overwriting(options)
            # What is there stays until there is something to write.
            output = files.enter_context(open_file(options.output, "ab"))
        else:
            output = standard(sys.stdout)
        ask = open_model(model, hurry=bool(options.text))
        if options.output and os.path.isfile(options.output):
            output.truncate(0)
        translations = translate_stream(ask, lines, output, options, window)
        if references is None:
            for _ in translations:
                pass
        else:
            target_lang = options.target_lang or target_lang_of(model)
            report_scores(list(translations), references, target_lang)


def refuse_overwriting(options: argparse.Namespace) -> None:
    for name in ("input", "reference"):
        path = getattr(options, name)
        with contextlib.suppress(FileNotFoundError):
            if path and os.path.samefile(path, options.output):
                raise CommandError(
                    f"--output is the file of --{name}, expected another"
                )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_options(argv)
    try:
        run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read has seen enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        exit_code = getattr(error, "exit_code", None)  # of our own: it says all
        warn(str(error) if exit_code else f"cannot read or write: {error.strerror}")
        return exit_code or 5
    except (CommandError, ConfigError) as error:
        warn(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
