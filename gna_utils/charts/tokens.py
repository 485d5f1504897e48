"""A prompt as its tokens, with segments marked: text that can be read, copied and heard."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import GnaError
from .rows import require_words
from .style import LIGHT

VISIBLE = {"\n": "↵", "\t": "⇥", "\r": "␍", " ": "·"}
BORDERS = ("solid", "dashed", "dotted", "double")  # colour never stands alone

_STYLE = """
figure.gna-tokens{margin:1em 0;text-align:left}
figure.gna-tokens figcaption{font-weight:600;margin:0 0 .4em;text-align:left;color:inherit}
.gna-tokens p{font-family:ui-monospace,monospace;line-height:2;overflow-wrap:anywhere;margin:0}
.gna-tokens .t{padding:.15em .1em;margin-right:1px;border-bottom:2px solid transparent;white-space:pre}
.gna-tokens .w{opacity:.45}
.gna-tokens ul{display:flex;flex-wrap:wrap;gap:.3em 1.2em;list-style:none;padding:0;margin:.6em 0 0}
.gna-tokens li{font-size:.9em;margin:0}
"""


def show_token(text: str) -> str:
    """Return a token with its whitespace visible.

    >>> show_token(" fox"), show_token("\\n"), show_token("")
    ('·fox', '↵', '∅')
    """
    return "".join(VISIBLE.get(character, character) for character in text) or "∅"


def token_texts(tokenizer, input_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, with real spaces and newlines (not the marks of the vocabulary file)."""
    ids = [int(i) for i in input_ids]
    return [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids]


def token_roles(encoded) -> list[str | None]:
    """Return for each token of an encoded example the part it plays, as names for ``segments``.

    >>> token_strip(texts, token_roles(encoded), title="A prompt", description="...")  # doctest: +SKIP

    The parts are "right segment" (the one that holds the answer), "other segment", "summary token" and
    "query position"; other tokens, such as a heading, play none.
    """
    roles: list[str | None] = [None] * len(encoded.input_ids)
    for number, (start, stop) in enumerate(encoded.segments):
        name = "right segment" if number == encoded.target else "other segment"
        roles[start:stop] = [name] * (stop - start)
    for position in encoded.summary:
        roles[position] = "summary token"
    roles[encoded.query] = "query position"
    return roles


def segment_names(segments: Sequence[str | None] | None, length: int) -> list[str | None]:
    names = [None] * length if segments is None else list(segments)
    if len(names) != length:
        raise GnaError(
            f"there are {length} tokens, but {len(names)} segment names: one name or None per token"
        )
    return names


@dataclass(frozen=True)
class TokenStrip:
    """The tokens of a prompt, shown as HTML by a notebook."""

    tokens: tuple[str, ...]
    segments: tuple[str | None, ...]
    title: str
    description: str

    def _repr_html_(self) -> str:
        kinds = list(dict.fromkeys(name for name in self.segments if name is not None))
        rules = "".join(_rule(i) for i in range(len(kinds)))
        body = "".join(_token(text, name, kinds) for text, name in zip(self.tokens, self.segments))
        legend = "".join(
            f'<li><span class="t k{i}">{html.escape(k)}</span></li>' for i, k in enumerate(kinds)
        )
        return (
            f'<figure class="gna-tokens" aria-label="{html.escape(self.description)}">'
            f"<style>{_STYLE}{rules}</style>"
            f"<figcaption>{html.escape(self.title)}</figcaption><p>{body}</p>"
            + (f"<ul>{legend}</ul>" if kinds else "")
            + "</figure>"
        )

    def __repr__(self) -> str:
        return "|".join(map(show_token, self.tokens))


def token_strip(
    tokens: Sequence[str], segments: Sequence[str | None] | None = None, *, title: str, description: str
) -> TokenStrip:
    """Show the tokens of a prompt as text, each in the colour of its segment or kind.

    >>> kinds = ["key", None, "value", None]
    >>> token_strip(["fox", ":", " lemon", "\\n"], kinds, title="A line", description="A key and its value.")
    fox|:|·lemon|↵

    ``segments`` holds one name (or None) per token. Spaces and newlines are made visible; a newline also
    breaks the line.
    Raises GnaError without title or description, and when the lengths differ.
    """
    require_words(title, description)
    names = segment_names(segments, len(tokens))
    return TokenStrip(tuple(tokens), tuple(names), title, description)


def _rule(index: int) -> str:
    colour, border = LIGHT[index % len(LIGHT)], BORDERS[index // len(LIGHT) % len(BORDERS)]
    # A translucent ground keeps the text readable on a light page and on a dark one.
    return f".gna-tokens .k{index}{{background:{colour}38;border-bottom:2px {border} {colour}}}\n"


def _token(text: str, name: str | None, kinds: list[str]) -> str:
    shown = (
        "".join(f'<span class="w">{VISIBLE[c]}</span>' if c in VISIBLE else html.escape(c) for c in text)
        or '<span class="w">∅</span>'
    )
    kind = f' k{kinds.index(name)}" title="{html.escape(name)}' if name is not None else ""
    return f'<span class="t{kind}">{shown}</span>' + "<br>" * text.count("\n")
