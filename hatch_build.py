"""The README as the package's description, with absolute links to the files of the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?![a-z]+:|#)[^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Provide the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, metadata["urls"]["Homepage"]),
        }


def with_absolute_links(text: str, repository: str) -> str:
    """Return Markdown whose relative links lead to the files' pages on GitHub, and relative images to the files."""
    return LINK.sub(
        lambda m: f"{m['image']}[{m['text']}]({repository}/{'raw' if m['image'] else 'blob'}/main/{m['target']})", text
    )
