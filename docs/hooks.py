"""mkdocs' hook: the README is the first page, with a card for each task, and files outside of docs/ are on
the site if pages link to them.

Links are written as they lead on the repository's own pages; the site has the folder docs/ at its top.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CONTRIBUTING.md", "benchmarks/*.md", "benchmarks/*.csv", "benchmarks/results/*", "examples/*")
OUTSIDE += ("configs/*.json",)
CARDS = ("deepspeed", "huggingface", "megatron", "fsdp2", "fit", "checkpoints", "support", "faster")
CARDS += ("finetune", "performance", "watch", "symptoms")


def cards() -> str:
    """Title and first sentence of the pages by task."""
    lines = []
    for name in CARDS:
        title, _, rest = (ROOT / f"docs/{name}.md").read_text().partition("\n")
        paragraph = re.search(r"^[A-Z`].*?$\n\n", rest, re.M | re.S)[0]
        bare = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))
        sentence = re.split(r"(?<=[.:])\s", bare, maxsplit=1)[0].rstrip(":")
        lines.append(f"- [**{title.removeprefix('# ')}**]({name}.md)\n\n    {sentence}")
    return '<div class="grid cards" markdown>\n\n' + "\n\n".join(lines) + "\n\n</div>\n\n"


def on_files(files, config):
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    name = page.file.src_uri
    if name.startswith("benchmarks/"):
        # hundreds of rows that hide every other hit of a search
        page.meta["search"] = {"exclude": True}
    if name == "index.md":
        before, table, after = markdown.partition("<!-- begin:")
        markdown = before + cards() + table + after
    if (ROOT / "docs" / name).exists():
        # of a page in docs/, the folder above
        return markdown.replace("](../", "](")
    return markdown.replace("](docs/", "](")
