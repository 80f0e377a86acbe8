"""mkdocs' hook: the README is the first page, and files outside of docs/ that pages link to are on the site.

Links are written as they lead on the repository's own pages; the site has the folder docs/ at its top.
"""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CONTRIBUTING.md", "benchmarks/*.md", "benchmarks/*.csv", "benchmarks/results/*", "examples/*")
OUTSIDE += ("configs/*.json",)


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
    if (ROOT / "docs" / name).exists():
        # of a page in docs/, the folder above
        return markdown.replace("](../", "](")
    return markdown.replace("](docs/", "](")
