"""The site: Sphinx, furo and MyST. ``make docs`` builds it into ``build/docs``."""

from __future__ import annotations

import os
import re
from configparser import ConfigParser
from importlib.metadata import entry_points
from pathlib import Path

import click
from docutils import nodes
from docutils.nodes import Node
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

SETUP = ConfigParser()
SETUP.read(Path(__file__).parents[1] / "setup.cfg")

project = SETUP["metadata"]["name"]
copyright = "the authors of celery-sqs-backoff"  # noqa: A001  # Sphinx's name
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_inline_tabs",
    "sphinxcontrib.mermaid",
    "notfound.extension",
]
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3  # as GitHub makes them
copybutton_prompt_text = "$ "
html_theme = "furo"
html_title = project
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name types and units
autodoc_class_signature = "mixed"
add_module_names = False

#: Other projects' inventories come over the network, which a build at home may not have.
IS_PUBLISHED = os.environ.get("READTHEDOCS") == "True"
if IS_PUBLISHED:
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "celery": ("https://docs.celeryq.dev/en/stable", None),
        "kombu": ("https://docs.celeryq.dev/projects/kombu/en/stable", None),
    }
#: Names of others. Our own names must exist.
nitpick_ignore_regex = [("py:.*", r"(?!celery_sqs_backoff).*")]


class CommandHelp(SphinxDirective):
    """Show the output of a command's ``--help``."""

    required_arguments = 1

    def run(self) -> list[Node]:
        name = self.arguments[0]
        [entry] = entry_points(group="celery.commands", name=name)
        command: click.Command = entry.load()
        context = click.Context(command, info_name=f"celery -A proj {name}", max_content_width=80)
        text = command.get_help(context)
        return [nodes.literal_block(text, text, language="text")]


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Copy ``llms.txt`` to the site, with links to its pages."""
    text = (Path(__file__).parents[1] / "llms.txt").read_text()
    pages = re.sub(r"\(docs/([\w-]+)\.md\)", r"(\1.html)", text)
    (Path(app.outdir) / "llms.txt").write_text(pages)


def setup(app: Sphinx) -> None:
    """Add a directive and a file that no extension has."""
    app.add_directive("command-help", CommandHelp)
    app.connect("build-finished", write_llms_txt)
