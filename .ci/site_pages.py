"""Pages of the site that are no files of docs/: README and others of the top level, and the API from docstrings."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import dsgdac_accel

ROOT = Path(__file__).resolve().parents[1]
CONSTANTS = {"EXIT_STOPPED", "__version__"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of other files."""
    pages = {
        name: (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md")
    }
    pages["index.md"] = pages.pop("README.md")
    names = sorted(set(dsgdac_accel.__all__) - CONSTANTS)
    pages["api.md"] = "# API\n\n" + "\n\n".join(f"::: dsgdac_accel.{name}" for name in names)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


class Examples(griffe.Extension):
    """Shows examples of docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the lines from `>>>` to the end of a paragraph."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^>>> (.+\n?)+", r"```pycon\n\g<0>\n```", obj.docstring.value)
