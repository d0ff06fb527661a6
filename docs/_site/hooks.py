"""What mkdocs cannot do by configuration: formulas as MathML, the repository's own pages, and the API reference."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import neuclip

ROOT = Path(__file__).parents[2]
# Pages of the repository that are not in docs/, and their place in the site.
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "data_prep/README.md": "ingestion.md",
}
# What `neuclip` offers, by where it is defined -> its heading.
PUBLIC = {".".join(place): f"## neuclip.{name}\n\n" for name, place in neuclip._PUBLIC.items()}
# A link or an image; a link's label may itself be an image.
LINK = re.compile(r"(!?\[(?:!\[[^\]]*\]\([^)]*\)|[^\]])*\])\(((?!https?://|#)[^)\s]+)\)", re.DOTALL)
FORMULA = re.compile(r'<(div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    """The API reference's pages in the navigation."""
    config.nav.append({"API reference": [{title: f"reference/{title}.md"} for title in packages()]})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add pages that are made here: the repository's own, and one of the API reference per package."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, source)))
    for title, modules in packages().items():
        body = "\n\n".join(PUBLIC.get(module, "") + f"::: {module}" for module in modules)
        files.append(File.generated(config, f"reference/{title}.md", content=f"# {title}\n\n{body}\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the site's own pages, or become plain text."""
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html_text: str, **_: Any) -> str:
    """TeX to MathML, which browsers draw themselves."""

    def mathml(match: re.Match[str]) -> str:
        tex = html.unescape(match[3]).strip().replace(r"\gt", ">").replace(r"\lt", "<")
        return convert(tex, display="block" if match[2] == "[" else "inline")

    return FORMULA.sub(mathml, html_text)


def packages() -> dict[str, list[str]]:
    """The public interface with what it offers, then the packages of the library with their public modules."""
    modules = {"neuclip": ["neuclip", *(".".join(place) for place in neuclip._PUBLIC.values())]}
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        inner = ("pipeline", "pipeline.errors")  # UserError is on the page of the public interface
        if path.read_text(encoding="utf-8").strip() and module not in inner:
            modules.setdefault(".".join(module.split(".")[:2]), []).append(module)
    return modules


def relinked(text: str, source: str) -> str:
    """`text` of the repository's file `source` with links that are right within the site."""

    def replace(match: re.Match[str]) -> str:
        label, (target, _, anchor) = match[1], match[2].partition("#")
        if label.startswith("[!["):
            label = f"[{LINK.sub(replace, label[1:-1])}]"
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path not in PAGES and not path.startswith("docs/"):
            return label[1:-1] if label.startswith("[![") else f"`{path}`" if label[0] != "!" else ""
        own, other = (PAGES.get(file, file.removeprefix("docs/")) for file in (source, path))
        page = posixpath.relpath(other, posixpath.dirname(own) or ".")
        return f"{label}({page}{'#' + anchor if anchor else ''})"

    return LINK.sub(replace, text).replace('="docs/', '="')
