"""The wheel and the sdist as they would be uploaded: metadata, the README as a description, files, extras."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import fusedmoe

pytest.importorskip("build", reason="builds the package; in the dev extra")
pytest.importorskip("hatchling", reason="builds the package; in the dev extra")
markdown_it = pytest.importorskip("markdown_it", reason="reads the README as PyPI does; comes with rich")

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/fusedmoe/fusedmoe"
EXTRAS = {"blackwell", "cu13", "demo", "dev", "docs", "te", "test", "transformers"}
SUFFIXES = (".md", ".py")
NAMED_EXTRA = re.compile(r"""(?:fusedmoe|["']\.)\[([a-z0-9,]+)\]""")  # fusedmoe[te], ".[transformers]"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(wheel.read(name))


def links(markdown):
    """Targets of the links and images of a page in Markdown."""
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(markdown)
    for token in chain.from_iterable([token, *(token.children or ())] for token in tokens):
        for attribute in ("href", "src"):
            if attribute in token.attrs:
                yield token.attrs[attribute]


def description(metadata):
    return metadata.get_payload(decode=True).decode()


def test_the_wheel_holds_the_package_alone(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {f"fusedmoe/{file.relative_to(ROOT / 'fusedmoe')}" for file in (ROOT / "fusedmoe").rglob("*.py")}
    assert names >= expected | {"fusedmoe/py.typed"}
    assert {name.partition("/")[0] for name in names} == {"fusedmoe"}


def test_the_sdist_holds_what_building_and_testing_takes(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "Makefile"}
    assert "tests/integrations/test_package.py" in names


def test_metadata(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("fusedmoe", fusedmoe.__version__)
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls.keys() >= {"Homepage", "Documentation", "Changelog", "Issues"}
    for url in urls.values():
        assert url.startswith(REPOSITORY)
        if "/blob/main/" in url:
            assert (ROOT / url.partition("/blob/main/")[2]).is_file(), url


def test_the_readme_is_the_description_with_links_that_lead_somewhere(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = list(links(description(metadata)))
    assert len(targets) > 10
    for target in targets:
        assert urlsplit(target).scheme == "https", target
        if target.startswith(REPOSITORY):
            kind, branch, path = target[len(REPOSITORY) + 1 :].split("/", 2)
            assert (kind in ("blob", "raw"), branch) == (True, "main"), target
            assert (ROOT / path.partition("#")[0]).exists(), target
    back = re.sub(rf"\({re.escape(REPOSITORY)}/(?:blob|raw)/main/", "(", description(metadata))
    assert back.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_every_extra_that_is_named_exists():
    folders = [ROOT / folder for folder in ("docs", "examples", "fusedmoe")]
    files = [ROOT / "README.md", *(f for folder in folders for f in folder.rglob("*.*") if f.suffix in SUFFIXES)]
    found = [names for file in files for names in NAMED_EXTRA.findall(file.read_text(encoding="utf-8"))]
    named = {extra for names in found for extra in names.split(",")}
    assert "transformers" in named
    assert named <= EXTRAS
