"""What a data folder of somebody else names outside of itself never becomes training text."""

import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data_pipeline.document import refuse_bad_row
from data_pipeline.errors import DataError
from data_pipeline.sources import open_sources
from data_pipeline.sources.containment import check_card
from data_pipeline.sources.hf_dataset import HfDataset


def documents(spec: str) -> list[str]:
    sources = open_sources([spec], "text")
    return ["".join(document.blocks) for source in sources for document in source.documents(refuse_bad_row)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of one row, beside a file and a saved data set that are not its own."""
    from datasets import Dataset

    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    Dataset.from_dict({"text": ["secret"]}).save_to_disk(tmp_path / "other")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rows.jsonl").write_text('{"text": "own"}\n')
    return tmp_path / "folder"


def card(**configuration: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        metadata = {"configs": [{"config_name": "default", **configuration}]}
        values = {key: json.loads(json.dumps(value).replace("OUTSIDE", str(folder.parent)))
                  for key, value in metadata.items()}  # fmt: skip
        (folder / "README.md").write_text(f"---\n{json.dumps(values)}\n---\nA data set.\n")

    return write


def link(name: str, target: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).symlink_to(target)

    return write


def link_to_a_folder(folder: Path) -> None:
    card(data_files="inner/*.jsonl")(folder)
    (folder / "inner").symlink_to("..")


def standalone_card(folder: Path) -> None:
    (folder / ".huggingface.yaml").write_text("configs: [{config_name: a, data_files: [../secret.jsonl]}]\n")


def saved_elsewhere(folder: Path) -> None:
    state = json.loads((folder.parent / "other" / "state.json").read_text())
    state["_data_files"] = [{"filename": "../other/data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def split_elsewhere(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (folder / "train").symlink_to("../other")


LEADS_OUT: dict[str, Callable[[Path], None]] = {
    "card with ..": card(data_files="../secret.jsonl"),
    "card with a split": card(data_files=[{"split": "train", "path": ["a", "OUTSIDE/*.jsonl"]}]),
    "card with a folder": card(data_dir=".."),
    "card with a URL": card(data_files="https://192.0.2.1/a.jsonl"),
    "card with a chain": card(data_files="zip://a.jsonl::../a.zip"),
    "card of its own": standalone_card,
    "link": link("more.jsonl", "../secret.jsonl"),
    "link to a folder": link_to_a_folder,
    "saved files": saved_elsewhere,
    "saved split": split_elsewhere,
}


@pytest.mark.parametrize("case", LEADS_OUT)
def test_a_data_set_that_leads_out_of_its_folder_is_one_sentence(case: str, folder: Path) -> None:
    LEADS_OUT[case](folder)
    with pytest.raises(DataError, match=r"outside|elsewhere") as caught:
        documents(f"dataset:{folder}")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_folder_of_text_does_not_follow_links_out_of_it_but_a_pattern_does(folder: Path) -> None:
    (folder / "more.jsonl").symlink_to("rows.jsonl")
    assert documents(str(folder)) == ["own", "own"]
    (folder / "more.jsonl").unlink()
    (folder / "more.jsonl").symlink_to("../secret.jsonl")
    with pytest.raises(DataError, match=r"more\.jsonl leads outside its folder, to .*/secret\.jsonl: copy it into"):
        documents(str(folder))
    assert documents(f"{folder}/*.jsonl") == ["secret", "own"]


def test_a_card_inside_and_the_links_of_the_hubs_cache_are_read(folder: Path, tmp_path: Path) -> None:
    card(data_files=[{"split": "train", "path": "rows*.jsonl"}, {"split": "test", "path": "test.jsonl"}])(folder)
    (folder / "test.jsonl").write_text('{"text": "test"}\n')
    assert documents(f"dataset:{folder}") == ["own"]
    assert documents(f"dataset:{folder}:test") == ["test"]

    repository = tmp_path / "hub" / "datasets--some--thing"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs" / "5ba1").write_text('{"text": "cached"}\n')
    (snapshot / "rows.jsonl").symlink_to("../../blobs/5ba1")
    assert documents(f"dataset:{snapshot}") == documents(str(snapshot)) == ["cached"]
    (snapshot / "more.jsonl").symlink_to("../../../../secret.jsonl")
    with pytest.raises(DataError, match="leads outside its folder"):
        documents(f"dataset:{snapshot}")


def test_a_card_that_repeats_itself_without_end_is_one_sentence(folder: Path) -> None:
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    for merged in ("configs: *a11", "<<: [*a11, *a11]"):
        (folder / "README.md").write_text(f"---\na0: &a0 [x]\n{levels}{merged}\n---\n")
        with pytest.raises(DataError, match="more than 100,000 values, with those its aliases repeat"):
            check_card(folder / "README.md")


@pytest.mark.parametrize("metadata", ["[" + "a," * 2000, "x" * 1_000_000])
def test_a_card_that_is_too_large_is_not_read_to_its_end(
    metadata: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list has no end: reading on to it would be a mistake of syntax."""
    monkeypatch.setattr("data_pipeline.sources.containment._MOST_VALUES", 1000)
    (folder / "README.md").write_text(f"---\nconfigs: {metadata}\n---\n")
    with pytest.raises(DataError, match=r"has more than 1,000(,000 characters of metadata| values)"):
        check_card(folder / "README.md")


def test_a_card_with_thousands_of_configurations_is_read(folder: Path) -> None:
    names = [f"language-{number}" for number in range(2000)]
    entries = (
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: data/{name}/train/*\n" for name in names
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(entries)}---\n")
    check_card(folder / "README.md")


def test_a_pipe_in_place_of_a_card_is_one_sentence(folder: Path) -> None:
    os.mkfifo(folder / ".huggingface.yaml")
    with pytest.raises(DataError, match=r"\.huggingface\.yaml is no file: move it away"):
        documents(f"dataset:{folder}")


def test_a_reader_that_opens_files_beside_those_listed_is_refused(folder: Path) -> None:
    (folder / "rows.jsonl").unlink()
    card(data_files="task.toml")(folder)
    (folder / "task.toml").write_text("schema_version = '1'\n")
    (folder / "instruction.md").symlink_to("../secret.jsonl")
    with pytest.raises(DataError, match="is in the format 'harbor', whose reader may open other files too: convert it"):
        documents(f"dataset:{folder}")


def test_what_other_columns_name_is_not_opened(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from datasets import Features, Image, Value

    image = str(folder.parent / "no.png")  # opening it would fail
    features = Features({"text": Value("string"), "image": Image()})
    rows = pyarrow.Table.from_pylist([{"text": "own", "image": {"bytes": None, "path": image}}], features.arrow_schema)
    pyarrow.parquet.write_table(rows, folder.parent / "rows.parquet")
    assert documents(str(folder.parent / "rows.parquet")) == ["own"]

    (folder / "rows.jsonl").write_text(json.dumps({"text": "own", "image": image}))
    described = "---\ndataset_info:\n  features:\n  - {name: text, dtype: %s}\n  - {name: image, dtype: image}\n---\n"
    (folder / "README.md").write_text(described % "string")
    assert documents(f"dataset:{folder}") == ["own"]
    (folder / "README.md").write_text(described % "image")
    with pytest.raises(DataError, match="has Image in column 'text': it must hold strings"):
        documents(f"dataset:{folder}")


def test_a_repository_of_the_hub_may_not_name_files_of_this_machine(tmp_path: Path) -> None:
    source = HfDataset("dataset:some/thing", "text")
    source._check_files(None, {"train": ["hf://datasets/some/thing@0123/a.parquet"]})
    for name in (str(tmp_path / "a.jsonl"), "https://192.0.2.1/a.jsonl", "s3://bucket/a.jsonl"):
        with pytest.raises(DataError, match="names a file elsewhere"):
            source._check_files(None, {"train": [name]})


class Hub(BaseHTTPRequestHandler):
    """A hub with one repository, whose card names a file of the reader's machine."""

    CARD = b"---\nconfigs:\n- config_name: default\n  data_files: /etc/*\n---\n"

    def do_GET(self) -> None:
        sha = "0123456789" * 4
        if self.path.startswith("/api/datasets/some/thing"):
            content = json.dumps({"id": "some/thing", "sha": sha, "siblings": [{"rfilename": "README.md"}]}).encode()
        elif self.path == f"/datasets/some/thing/resolve/{sha}/README.md":
            content = self.CARD
        else:
            self.send_error(500)
            return
        self.send_response(200)
        headers = {"Content-Type": "application/json", "Content-Length": len(content), "ETag": '"5ba1"'}
        for name, value in (headers | {"X-Repo-Commit": sha}).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_card_of_the_hub_is_checked_before_datasets_searches_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    def searches(name: str) -> None:
        raise AssertionError("it looks for the files at once")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset_builder", searches)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        with pytest.raises(DataError, match=r"README\.md names data files outside its folder, '/etc/\*': fetch them"):
            documents("dataset:some/thing")
        with pytest.raises(DataError, match=r"dataset:some/other cannot be loaded \(.*500.*\): check the name"):
            documents("dataset:some/other")
        server.shutdown()


def test_a_folder_called_like_a_format_is_that_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would take the name for its own reader of that format and read the current folder."""
    monkeypatch.chdir(folder.parent)
    folder.rename(folder.parent / "json")
    assert documents("dataset:json") == ["own"]
