"""The long description: the README without what works in the repository only.

Everything else is in ``setup.cfg``. The README's links and pictures lead to files beside it, which an index does not
have, and where a repository will lie is not known when a package is built.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

_NOTE = "What is named here as `docs/…` is in the source distribution, and so are charts of the figures."


def for_an_index(readme: str) -> str:
    """Return the README's text with every link to a file as the file's name, and without pictures.

    Parameters
    ----------
    readme
        Markdown.

    Returns
    -------
    str
        Markdown in which nothing leads to a file.
    """
    # In code a bracket is no link.
    parts = re.split(r"(^```.*?^```\n|`[^`\n]+`)", readme, flags=re.MULTILINE | re.DOTALL)
    text = "".join(part if part.startswith("`") else _unlinked(part) for part in parts)
    return text + f"\n{_NOTE}\n"


def _unlinked(text: str) -> str:
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", _named, text)


def _named(link: re.Match[str]) -> str:
    told, target = link[1], link[2]
    return told if not target or target == told else f"{told} (`{target}`)"


if __name__ == "__main__":
    setup(
        long_description=for_an_index(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
