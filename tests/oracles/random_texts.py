"""Random texts that try a tokenizer: words, numbers, white space, contractions, all planes."""

import random
from collections.abc import Callable

WHITE = " \t\n\r\x0b\x0c\x85\xa0\u2003\u2028\u3000"
ENGLISH = (
    *("the", "of", "and", "in", "was", "it", "for", "on", "He", "IT", "U.S.", "x=1"),
    *("don't", "we'll", "I'M", "they've"),
)
SCRIPTS = (
    *((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA)),
    *((0x620, 0x64A), (0x904, 0x939), (0xE01, 0xE2E), (0x3041, 0x30FE), (0x4E00, 0x9FA5)),
    *((0xAC00, 0xD7A3), (0x1F300, 0x1F64F)),
)


def texts(n: int, seed: int) -> list[str]:
    """Texts of up to 12 parts, the same for one seed. They hold no half of a surrogate pair."""
    chance = random.Random(seed)
    return [
        "".join(chance.choice(PARTS)(chance) for _ in range(chance.randrange(13))) for _ in range(n)
    ]


def _word(chance: random.Random) -> str:
    first, last = chance.choice(SCRIPTS)
    return "".join(chr(chance.randint(first, last)) for _ in range(chance.randint(1, 8)))


def _plane(chance: random.Random) -> str:
    """Characters of every plane, assigned or not."""
    plane = chance.randrange(17) * chance.randrange(2)
    code = plane << 16 | chance.randrange(1 << 16)
    return "" if 0xD800 <= code < 0xE000 else chr(code)


PARTS: tuple[Callable[[random.Random], str], ...] = (
    lambda chance: chance.choice(ENGLISH),
    lambda chance: " " + chance.choice(ENGLISH),
    _word,
    lambda chance: " " + _word(chance),
    lambda chance: "".join(chance.choices("0123456789", k=chance.randint(1, 9))),
    lambda chance: chance.choice(WHITE) * chance.randint(1, 5),
    lambda chance: "".join(chance.choices(WHITE, k=chance.randint(1, 4))),
    lambda chance: "".join(
        chance.choices("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", k=chance.randint(1, 4))
    ),
    lambda chance: (
        chance.choice("'\u2019") + chance.choice(("s", "T", "re", "VE", "ll", "d", "x", "M"))
    ),
    lambda chance: chr(chance.randrange(32)) + chr(0x7F + chance.randrange(33)),
    lambda chance: "a" + chr(0x300 + chance.randrange(0x6F)) + "e\u0301\u0323",
    lambda chance: chance.choice("²½Ⅷ٣५①") + chance.choice(("", "1", "x")),
    _plane,
    _plane,
)
