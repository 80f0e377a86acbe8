"""The pages match the code: generated parts are up to date, and repeated parts are equal."""

import json
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import coat_ds
from coat_ds import CoatAdamW
from coat_ds.config import CoatConfig
from coat_ds.doctor import dry_run
from coat_ds.log import listed
from coat_ds.optim.accounting import planned_bytes, states_line
from coat_ds.plan.read import meta_model
from coat_ds.zero.status import ON
from tests.pages import README, block, names_of_examples

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize(
    "script, page",
    [
        ("api.py", "docs/api.md"),
        ("configuration.py", "docs/configuration.md"),
        ("notebook.py", "examples/finetune.ipynb"),
        ("support.py", "docs/support.md"),
    ],
)
def test_a_generated_page_is_that_of_its_script(script, page):
    made = runpy.run_path(str(DOCS / script))["text"]()
    assert (DOCS.parent / page).read_text() == made, f"run python docs/{script} > {page}"


def test_the_page_of_the_api_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    for name in coat_ds.__all__:
        assert f"`coat_ds.{name}`" in page or isinstance(getattr(coat_ds, name), ModuleType), name


def test_pages_show_what_the_readme_shows():
    # tests/test_readme.py runs this diff
    assert block("diff") in (DOCS / "deepspeed.md").read_text()
    pages = (DOCS / "huggingface.md").read_text()
    for line in block("python").splitlines():
        assert line.split("  #")[0] in pages


def test_json_of_the_pages_is_accepted():
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    configs = [json.loads(found) for found in re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S)]
    blocks = [config["coat"] for config in configs if "coat" in config]
    assert len(blocks) > 3 and all(CoatConfig.from_dict(found).enabled for found in blocks)


def test_every_page_is_reached_from_the_readme():
    pages = {path.name for path in DOCS.glob("*.md")}
    assert {page for page in pages if f"](docs/{page})" not in README} == set()


def test_the_log_that_is_shown_is_that_of_llama_2_7b():
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
    model = meta_model({"model_type": "llama", "num_attention_heads": 32, **sizes})
    (layers,) = dry_run.check({"coat": {"enabled": True}, "bf16": {"enabled": True}}, model)
    (shown,) = re.findall(r"^```\n(COAT: .*?)\n```$", (DOCS / "deepspeed.md").read_text(), re.M | re.S)
    # the beta2 of the page's config
    optimizer = CoatAdamW(model.float().named_parameters(), betas=(0.9, 0.95))
    line = states_line(optimizer, planned_bytes(optimizer) | {"by_codec": {}}).replace("()", "(...)")
    assert shown == f"COAT: {listed(ON, [line, *layers.text.split('; ')])}"


def test_the_summary_that_is_shown_is_that_of_a_small_llama(tmp_path):
    summary = coat_ds.conversion_of(coat_ds.convert(names_of_examples(str(tmp_path))["model"])).summary()
    assert f"'{summary}'" in " ".join((DOCS / "huggingface.md").read_text().split())
