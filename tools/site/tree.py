"""Gathers the pages of the site as Markdown in one folder, and has Zensical make HTML of them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from tools.site import navigation
from tools.site.navigation import ELSEWHERE, FOLDER, REPLACED
from tools.site.reference import REFERENCE

ROOT: Final = Path(__file__).resolve().parents[2]

PICTURE: Final = re.compile(r"^!\[[^\]]*\]\(([^)]+\.svg)\)$", re.MULTILINE)

LINK: Final = re.compile(r"(\[[^\]]*\]\()(?!\w+:|#)([^)\s#]+)(#[\w-]+)?\)")

FENCE: Final = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2$", re.MULTILINE | re.DOTALL)

LANGUAGES: Final = {".py": "python", ".mjs": "javascript", ".toml": "toml", ".env": "sh"}

EXTENSIONS: Final[Mapping[str, Any]] = {
    "attr_list": {},
    "md_in_html": {},
    "tables": {},
    # Anchors as GitHub has them: the same links work there.
    "toc": {
        "permalink": True,
        "slugify": {"object": "pymdownx.slugs.slugify", "kwds": {"case": "lower"}},
    },
    "pymdownx.highlight": {"pygments_lang_class": True},
    "pymdownx.superfences": {},
}

THEME: Final[Mapping[str, Any]] = {
    "font": False,  # the reader's own: none is fetched
    "language": "en",
    "features": [
        "content.code.copy",
        "navigation.footer",
        "navigation.top",
        "search.highlight",
    ],
    "palette": [
        {
            "media": "(prefers-color-scheme: light)",
            "scheme": "default",
            "toggle": {"icon": "lucide/sun", "name": "Switch to dark mode"},
        },
        {
            "media": "(prefers-color-scheme: dark)",
            "scheme": "slate",
            "toggle": {"icon": "lucide/moon", "name": "Switch to light mode"},
        },
    ],
}


def build(work: Path, site: Path) -> list[str]:
    """Write the HTML to `site`, and the Markdown that it is made of below `work`. Returns the
    faults."""
    pages = work / "pages"
    gather(pages)
    found = list(navigation.faults(pages))
    if found:
        return found
    configuration = {
        "site_name": "Seqgate",
        "site_description": "Exactly-once publishing and order per key, for many consumers",
        "docs_dir": "pages",
        "site_dir": "site",
        "nav": navigation.as_configured(),
        "theme": THEME,
        "extra": {"generator": False},
        "extra_css": ["site.css"],
        "markdown_extensions": EXTENSIONS,
    }
    (work / "mkdocs.yml").write_text(yaml.safe_dump(configuration, sort_keys=False))
    generated = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", "mkdocs.yml"],
        cwd=work,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if generated.returncode:
        return [generated.stdout + generated.stderr]
    shutil.rmtree(site, ignore_errors=True)
    (work / "site").rename(site)
    return []


def gather(into: Path) -> None:
    """Write all pages below `into`, which is emptied before."""
    shutil.rmtree(into, ignore_errors=True)
    for page, text in _pages().items():
        file = into / page
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            file.write_bytes(text)
        else:
            file.write_text(text)


def sources() -> dict[Path, str]:
    """The Markdown files of the repository that are pages, and their pages."""
    found = {file: file.relative_to(ROOT / FOLDER).as_posix() for file in _documents(".md")}
    return found | {
        ROOT / file: f"{page}.md" for file, page in ELSEWHERE.items() if file not in REPLACED
    }


def _documents(*suffixes: str) -> Iterator[Path]:
    for file in sorted((ROOT / FOLDER).rglob("*")):
        if file.suffix in suffixes:
            yield file


def _pages() -> dict[str, str | bytes]:
    found: dict[str, str | bytes] = {
        f"reference/{name}.md": write() for name, write in REFERENCE.items()
    }
    linked: set[Path] = set()
    for file, page in sources().items():
        found[page] = _with_links(file, page, linked)
    for file in sorted(linked):
        found[_of_source(file)] = _source(file)
    for file in _documents(".svg", ".css", ".json"):
        found[file.relative_to(ROOT / FOLDER).as_posix()] = file.read_bytes()
    return found


def _with_links(file: Path, page: str, linked: set[Path]) -> str:
    """A page whose links lead to pages. Adds the files that get pages of their own to `linked`."""
    text = file.read_text()
    fences = [match.span() for match in FENCE.finditer(text)]

    def to_page(match: re.Match[str]) -> str:
        if any(start <= match.start() < end for start, end in fences):
            return match[0]
        target = _target(file, match[2], linked)
        return f"{match[1]}{os.path.relpath(target, Path(page).parent)}{match[3] or ''})"

    return PICTURE.sub(partial(_drawn, file.parent), LINK.sub(to_page, text))


def _drawn(folder: Path, match: re.Match[str]) -> str:
    """A picture as a part of its page, whose colours it takes. Alone it has colours of its own."""
    drawn = re.sub(r"<style>.*?</style>\n", "", (folder / match[1]).read_text())
    return f'<div class="picture">\n{drawn}</div>'


def _target(file: Path, name: str, linked: set[Path]) -> str:
    """The page that a link of a file leads to."""
    target = Path(os.path.normpath(file.parent / name))
    if target.is_dir() and (target / "README.md").exists():
        target /= "README.md"
    known = ELSEWHERE.get(target.relative_to(ROOT).as_posix())
    if known is not None:
        return f"{known}.md"
    if target.is_relative_to(ROOT / FOLDER):
        return target.relative_to(ROOT / FOLDER).as_posix()
    if not target.is_file():
        raise FileNotFoundError(f"{file.relative_to(ROOT)}: {name} has no page")
    linked.add(target)
    return _of_source(target)


def _of_source(file: Path) -> str:
    return f"source/{file.relative_to(ROOT).as_posix()}.md"


def _source(file: Path) -> str:
    name, language = file.relative_to(ROOT).as_posix(), LANGUAGES.get(file.suffix, "text")
    code = f"````{language}\n{file.read_text()}````\n"
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{code}"
