"""Make the long description from the README. Everything else is in ``setup.cfg``.

The README's links and pictures lead to files of the repository, which a package index does not have. The address of the
repository is not known when the package is built.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

_NOTE = "The source distribution contains the files named `docs/…` here, and charts of the figures."


def format_for_index(readme: str) -> str:
    """Return the README's text without pictures; a link to a file becomes the link's text and the file's name.

    Parameters
    ----------
    readme
        Markdown.

    Returns
    -------
    str
        Markdown without links to files.
    """
    # Brackets in code are not links.
    parts = re.split(r"(^```.*?^```\n|`[^`\n]+`)", readme, flags=re.MULTILINE | re.DOTALL)
    text = "".join(part if part.startswith("`") else _remove_links(part) for part in parts)
    return text + f"\n{_NOTE}\n"


def _remove_links(text: str) -> str:
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", _format_link, text)


def _format_link(link: re.Match[str]) -> str:
    text, target = link[1], link[2]
    return text if not target or target == text else f"{text} (`{target}`)"


if __name__ == "__main__":
    setup(
        long_description=format_for_index(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
