"""A hook of mkdocs: links from a page to a file outside of `docs/` are plain text on the site, which has pages alone.

In the repository they lead to the file. A link that leads nowhere at all still ends the build.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:|#|mailto:)[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Returns the text of a page for the site."""
    folder, root = posixpath.dirname(page.file.src_uri), Path(config.docs_dir).parent

    def text(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, found[2]))
        outside = not target.startswith("docs/") and (root / target).exists()
        return found[1] if outside else found[0]

    return _LINK.sub(text, markdown)
