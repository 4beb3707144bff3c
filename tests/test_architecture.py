"""The house of the README holds: who may import whom, and what stays small."""

import ast
import importlib.util
from pathlib import Path

import pytest

from data_pipeline import tokenizer
from transformer_tf import config

ROOT = Path(__file__).parents[1]

# Top to bottom: a module imports only from modules above it in its own package.
FLOORS = {
    "data_pipeline": [
        "errors",
        "keys",
        "splits",
        "tatoeba_ja_en",
        "sources",
        "corpus",
        "tokenizer",
        "shards",
        "encoded",
        "buckets",
        "batches",
    ],
    "transformer_tf": [
        "config",
        "flags",
        "run_directory",
        "exports",
        "interrupt",
        "attention",
        "dropout",
        "layers",
        "model",
        "devices",
        "cluster",
        "loss",
        "update",
        "training",
        "checkpoints",
        "decoding",
        "explain",
        "tables",
        "paper",
        "fonts",
        "attention_plot",
        "attention_page",
        "explaining",
        "export_check",
        "lines",
        "formats",
        "client",
        "serving",
        "graphs",
        "translator",
        "self_check",
        "scores",
        "reporting",
    ],
}
MODULES = [(package, name) for package, names in FLOORS.items() for name in names]
PACKAGES = [path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()]


def files_of(package, name):
    folder = ROOT / package / name
    return (
        sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    )


def imports_of(path):
    """Dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", FLOORS)
def test_every_module_has_its_floor(package):
    found = {
        path.stem
        for path in (ROOT / package).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert found - {"__init__"} == set(FLOORS[package])


def test_the_readme_shows_the_house():
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = readme[readme.index("## The house") :]
    for package, name in MODULES:
        assert f" {name} " in shown, f"README does not list {package}/{name}"


@pytest.mark.parametrize(("package", "name"), MODULES)
def test_a_module_imports_only_from_above(package, name):
    floors = FLOORS[package]
    above = floors[: floors.index(name)]
    for path in files_of(package, name):
        for imported in imports_of(path):
            first, *rest = imported.split(".")
            if first == package and rest and rest[0] in floors:
                assert rest[0] in [*above, name], f"{path} imports {imported}"


def test_the_two_packages_do_not_know_each_other():
    for package, other in (PACKAGES, PACKAGES[::-1]):
        for path in (ROOT / package).rglob("*.py"):
            for imported in imports_of(path):
                assert imported.split(".")[0] != other, f"{path} imports {imported}"


def test_both_packages_mean_the_same_by_the_special_ids():
    names = ("PAD_ID", "UNK_ID", "BOS_ID", "EOS_ID")
    for name in names:
        assert getattr(tokenizer, name) == getattr(config, name)


def test_translating_imports_nothing_of_the_data_side():
    imported = set(imports_of(ROOT / "translate.py"))
    assert not any(name.startswith("data_pipeline") for name in imported)


@pytest.mark.parametrize(("package", "name"), MODULES)
def test_no_room_is_crowded(package, name):
    for path in files_of(package, name):
        assert len(path.read_text("utf-8").splitlines()) <= 350, path


@pytest.mark.parametrize("name", ["train.py", "session.py", "translate.py"])
def test_no_command_is_crowded(name):
    assert len((ROOT / name).read_text("utf-8").splitlines()) <= 360


@pytest.mark.parametrize(("package", "name"), MODULES)
def test_every_module_says_what_it_answers(package, name):
    for path in files_of(package, name):
        if path.name != "__init__.py" or package == path.parent.name:
            assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path


SCRIPTS = [*ROOT.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_of_ours_is_there(path):
    """Their imports stand in functions, where no other test would miss a name."""
    ours = (*PACKAGES, "train", "session", "export", "translate")
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ours:
            module = importlib.import_module(node.module)
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                assert hasattr(module, alias.name) or importlib.util.find_spec(name)
