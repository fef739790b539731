"""What is shown of an example: images, texts, tokens and tables, as HTML and as a line of text."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._html import picture, table

Marks = Mapping[int, tuple[int, str]]  # by position of a token: how strong, from 1 to LEVELS, and what it stands for
LEVELS = 4
_SIDE = 256  # pixels of a picture at most; larger ones are made smaller
_SHARP = 64  # pixels at least; smaller ones are made larger by whole numbers, so that each of theirs is sharp
_PLAIN_MODES = ("1", "L", "RGB", "RGBA", "I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # of PIL: levels of grey or light
_LINE = 60  # characters in a terminal


def to_html(thing: Any, name: str, marks: Marks | None = None, kind: str = "good") -> str:
    """What a function ``show`` has returned; all text is escaped.

    Args:
        thing: an image (H, W), (C, H, W) or (H, W, C); a text; a list of strings, which are tokens; a mapping of names
            to any of these; None for nothing.
        name: of the example, which is what a picture is called by those who cannot see it.
        marks: the tokens to be marked.
        kind: "good" or "bad", the colour of marks.
    """
    if thing is None:
        return ""
    if is_image(thing):
        return picture(pixels(thing), f"image of {name}")
    if isinstance(thing, Mapping):
        return _mapping(thing, name, marks, kind)
    if isinstance(thing, (list, tuple)) and all(isinstance(token, str) for token in thing):
        tokens = "".join(_token(i, token, marks or {}, kind) for i, token in enumerate(thing))
        return f'<p class="text">{tokens.lstrip()}</p>'
    if isinstance(thing, (list, tuple)):
        return "".join(to_html(part, name, marks, kind) for part in thing)
    return f'<p class="text">{escape(str(thing))}</p>'


def _mapping(parts: Mapping[Any, Any], name: str, marks: Marks | None, kind: str) -> str:
    """Images above, because they need no name; everything else in a table."""
    images = [to_html(value, f"{name}, {key}") for key, value in parts.items() if is_image(value)]
    rest = [(key, value) for key, value in parts.items() if not is_image(value)]
    rows = [(f'<span class="quiet">{escape(str(key))}</span>', _cell(value, name, marks, kind)) for key, value in rest]
    return "".join(images) + (table(("", ""), rows) if rows else "")


def _cell(value: Any, name: str, marks: Marks | None, kind: str) -> str:
    """A number or a text as it is, without a paragraph of its own."""
    if isinstance(value, (Mapping, list, tuple)) or value is None:
        return to_html(value, name, marks, kind)
    return escape(_plain(value))


def _token(i: int, token: str, marks: Marks, kind: str) -> str:
    if i not in marks:
        return escape(token)
    level, said = marks[i]
    edge = len(token) - len(token.lstrip())  # spaces before a word stay outside of its mark
    text = f'<mark class="{kind} level-{level}" title="{escape(said)}">{escape(token[edge:])}</mark>'
    return escape(token[:edge]) + text


def to_line(thing: Any) -> str:
    """The same in a few words, for a terminal."""
    if thing is None:
        return ""
    if is_image(thing):
        height, width, _ = _channels_last(_tensor(thing)).shape
        return f"image {width}×{height}"
    if isinstance(thing, Mapping):
        parts = [f"{key} {to_line(value)}" for key, value in thing.items() if not is_image(value)]
        return _short(", ".join(parts) or ", ".join(to_line(value) for value in thing.values()))
    if isinstance(thing, (list, tuple)):
        tokens = all(isinstance(token, str) for token in thing)
        return _short("".join(thing) if tokens else ", ".join(to_line(part) for part in thing))
    return _short(_plain(thing))


def _plain(value: Any) -> str:
    return str(value.item()) if isinstance(value, Tensor) and value.numel() == 1 else str(value)


def _short(text: str) -> str:
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))  # no commands to the terminal
    return line if len(line) <= _LINE else line[: _LINE - 1] + "…"


# Images.


def is_image(thing: Any) -> bool:
    """A tensor, an array or a PIL image of two dims, or of three of which one is for channels."""
    if not isinstance(thing, Tensor) and not _has_numbers(thing):
        return False
    shape = tuple(_tensor(thing).shape)
    return 0 not in shape and (len(shape) == 2 or (len(shape) == 3 and (shape[0] <= 4 or shape[2] <= 4)))


def _has_numbers(thing: Any) -> bool:
    """An array or a PIL image; texts, dates and objects of NumPy are arrays, too, and no images."""
    told = getattr(thing, "__array_interface__", None)
    return told is not None and told["typestr"][1] in "biufc"


def pixels(thing: Any) -> Tensor:
    """(H, W, C) of bytes: numbers from 0 to 1 as they are, others from the lowest to the highest."""
    image = _channels_last(_tensor(thing))
    if image.dtype != torch.uint8:
        image = _bytes(image.detach().cpu().double())
    height, width, _ = image.shape
    if max(height, width) > _SIDE:
        scale = _SIDE / max(height, width)
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        smaller = F.interpolate(image.double().permute(2, 0, 1)[None], size, mode="area")[0].permute(1, 2, 0)
        return smaller.round().clamp(0, 255).to(torch.uint8)
    times = max(1, -(-_SHARP // max(height, width)))
    return image.repeat_interleave(times, 0).repeat_interleave(times, 1)


def _bytes(image: Tensor) -> Tensor:
    image = image.nan_to_num(0.0, 0.0, 0.0)
    low, high = float(image.min()), float(image.max())
    if low < 0 or high > 1:
        image = (image - low) / (high - low) if high > low else torch.zeros_like(image)
    return (image * 255).round().to(torch.uint8)


def _channels_last(image: Tensor) -> Tensor:
    if image.ndim == 2:
        return image.unsqueeze(2)
    return image.permute(1, 2, 0) if image.shape[0] <= 4 else image


def _tensor(thing: Any) -> Tensor:
    if isinstance(thing, Tensor):
        return thing.to_dense() if thing.layout != torch.strided else thing
    numpy = import_module("numpy")
    mode = getattr(thing, "mode", None)  # of PIL
    if isinstance(mode, str) and mode not in _PLAIN_MODES:  # numbers of a palette, of inks, of hues
        thing = thing.convert("RGBA" if mode in ("LA", "PA", "La", "RGBa") or "transparency" in thing.info else "RGB")
    found = torch.from_numpy(numpy.array(thing, order="C"))  # a copy: PIL's own must not be written to
    return found.permute(2, 0, 1) if mode is not None and found.ndim == 3 else found  # PIL has channels last
