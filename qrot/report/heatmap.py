"""Activations as a picture: tokens or layers down, channels across."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, UInt8

from qrot.report.svg import Number, number, svg, words

WIDTH, LEFT, TOP, HEIGHT = 400, 30, 22, 190


def heat(
    cells: Float[np.ndarray, "down channels"],
    limits: tuple[Number, Number],
    *,
    title: str,
    size: tuple[int, int],
    down: str = "tokens",
    loud: Sequence[Sequence[Number]] = (),
) -> str:
    """|x| on a logarithmic scale of colours.

    Args:
        cells: |x|, each the largest of what it stands for.
        limits: the ends of the scale: so much or less, so much or more.
        title: of the picture, for those who do not see it.
        size: what goes down, and channels, that the cells stand for.
        down: what goes down, in the plural.
        loud: channels to name, and their largest |x|.

    Returns:
        The picture as SVG.
    """
    low, high = np.log(limits)
    share = (np.log(np.maximum(cells, limits[0])) - low) / max(high - low, 1e-9)
    indices = np.clip(np.rint(share * 255), 0, 255).astype(np.uint8)
    count, channels = size
    picture = base64.b64encode(_png(indices, _palette())).decode()
    parts = [
        f'<image x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT}" height="{HEIGHT}" '
        f'preserveAspectRatio="none" class="cells" href="data:image/png;base64,{picture}"/>',
        words(LEFT - 5, TOP + 10, "0", "tick", "end"),
        words(LEFT - 5, TOP + HEIGHT, str(count - 1), "tick", "end"),
        words(LEFT, TOP + HEIGHT + 15, "channel 0", "tick"),
        words(WIDTH, TOP + HEIGHT + 15, str(channels - 1), "tick", "end"),
    ]
    last = []
    for channel, largest in loud:
        x = LEFT + (channel + 0.5) / channels * (WIDTH - LEFT)
        if all(abs(x - other) > 70 for other in last):
            text = f"{channel}: {number(largest)}"
            half = 3.2 * len(text)
            parts.append(words(min(max(x, LEFT + half), WIDTH - half), 11, text, "tick", "middle"))
            parts.append(f'<path class="mark" d="M{x:.4g} {TOP - 7}v5"/>')
            last.append(x)
    label = f"{title}: {count} {down} by {channels} channels, largest {number(float(cells.max()))}"
    return svg(WIDTH, TOP + HEIGHT + 20, label, parts)


def scale_bar(limits: tuple[Number, Number]) -> str:
    """What the colours mean."""
    ramp = np.arange(256, dtype=np.uint8)[None, :]
    picture = base64.b64encode(_png(ramp, _palette())).decode()
    low, high = (number(x) for x in limits)
    parts = [
        f'<image x="0" y="4" width="200" height="8" preserveAspectRatio="none" class="cells" '
        f'href="data:image/png;base64,{picture}"/>',
        words(0, 26, f"≤ {low}", "tick"),
        words(100, 26, "|x|, logarithmic", "tick", "middle"),
        words(200, 26, f"≥ {high}", "tick", "end"),
    ]
    return svg(200, 30, f"Colours from {low} or less, dark, to {high} or more, bright", parts)


def _palette() -> UInt8[np.ndarray, "256 3"]:
    """Light from dark evenly, to be read without colour as well; not as light as paper."""
    shares = np.linspace(0, 0.9, 256)
    return (mpl.colormaps["magma"](shares)[:, :3] * 255).round().astype(np.uint8)


def _png(indices: UInt8[np.ndarray, "height width"], palette: UInt8[np.ndarray, "256 3"]) -> bytes:
    """A PNG of colours out of a palette (PNG specification, ISO/IEC 15948, colour type 3)."""
    height, width = indices.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    lines = np.concatenate([np.zeros((height, 1), np.uint8), indices], axis=1)  # filter 0: none
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            chunk(b"PLTE", palette.tobytes()),
            chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            chunk(b"IEND", b""),
        ]
    )
