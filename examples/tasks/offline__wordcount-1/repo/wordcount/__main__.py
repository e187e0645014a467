"""Print the most frequent words of a file."""

import sys
from pathlib import Path

from wordcount.counting import count_words, top_words
from wordcount.report import render

if len(sys.argv) != 2:
    sys.exit("usage: python -m wordcount FILE")
text = Path(sys.argv[1]).read_text(encoding="utf-8")
print(render(top_words(count_words(text), 10)))
