"""The dashboards' colours: told apart by the colour-blind, seen on light and on dark ground."""

from itertools import combinations

import pytest

from dashboards import settings

COLOURS = {
    "ok": settings.OK,
    "warning": settings.WARNING,
    "critical": settings.CRITICAL,
    "neutral": settings.NEUTRAL,
}
GROUNDS = {"light": "#ffffff", "dark": "#181b1f"}
"""Grafana's panels."""

LEAST_CONTRAST = 3.0
"""For graphics and large text, as WCAG 2.1 asks for."""
LEAST_DISTANCE = 25.0
"""In CIE 1976 Lab, where 2.3 is just noticeable."""

# Machado, Oliveira and Fernandes (2009), of full severity, for linear RGB.
VISIONS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)

Matrix = tuple[tuple[float, float, float], ...]
Vector = tuple[float, ...]


def linear(colour: str) -> Vector:
    """The linear RGB of a colour such as `#2a7fd4`."""
    shares = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return tuple(
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )


def times(matrix: Matrix, vector: Vector) -> Vector:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def lab(rgb: Vector) -> Vector:
    """CIE 1976 Lab of linear RGB."""
    shares = (value / white for value, white in zip(times(TO_XYZ, rgb), WHITE, strict=True))
    x, y, z = (
        share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in shares
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: str, vision: Matrix) -> Vector:
    """What somebody sees of a colour."""
    return lab(tuple(min(1.0, max(0.0, each)) for each in times(vision, linear(colour))))


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG defines it."""
    darker, lighter = sorted(times(TO_XYZ, linear(each))[1] for each in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("vision", VISIONS.values(), ids=VISIONS)
def test_colours_are_told_apart(vision: Matrix) -> None:
    """Any two colours are far apart, for those who see no red or no green as well."""
    distances = {
        f"{one} and {other}": sum(
            (a - b) ** 2
            for a, b in zip(seen(COLOURS[one], vision), seen(COLOURS[other], vision), strict=True)
        )
        ** 0.5
        for one, other in combinations(COLOURS, 2)
    }
    assert {pair: each for pair, each in distances.items() if each < LEAST_DISTANCE} == {}


@pytest.mark.parametrize("ground", GROUNDS.values(), ids=GROUNDS)
def test_colours_are_seen_on_their_ground(ground: str) -> None:
    """Each colour has the contrast that graphics need, in the light and in the dark theme."""
    found = {name: contrast(colour, ground) for name, colour in COLOURS.items()}
    assert {name: each for name, each in found.items() if each < LEAST_CONTRAST} == {}


def test_what_cannot_be_told_apart_is_found() -> None:
    """A red and a green of one lightness are the same to those who see no green."""
    vision = VISIONS["deuteranopia"]
    red, green = (seen(each, vision) for each in ("#b4432e", "#6f7a26"))
    assert sum((a - b) ** 2 for a, b in zip(red, green, strict=True)) ** 0.5 < LEAST_DISTANCE
