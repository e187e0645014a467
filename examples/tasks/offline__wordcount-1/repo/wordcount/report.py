"""Showing counts to people."""


def render(rows: list[tuple[str, int]]) -> str:
    """Return one line per word, the counts in a column of their own."""
    width = max((len(word) for word, _ in rows), default=0)
    return "\n".join(f"{word:<{width}}  {count}" for word, count in rows)
