"""Finding and counting words."""

import re

WORD = re.compile(r"[a-z]+")


def count_words(text: str) -> dict[str, int]:
    """Map each word, in lower case, to how often it occurs; words stand in the order of their first use."""
    counts: dict[str, int] = {}
    for word in WORD.findall(text.lower()):
        counts[word] = counts.get(word, 0) + 1
    return counts


def top_words(counts: dict[str, int], limit: int) -> list[tuple[str, int]]:
    """Return the most frequent words first; words of equal count stand in alphabetical order."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]
