"""What is read before a lease, and what is left out."""

from verl_mux.memory.model_files import read_ahead, weights_of


def test_weights_are_safetensors_or_what_there_was_before_them(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "old.bin").touch()
    assert [file.name for file in weights_of(str(tmp_path))] == ["old.bin"]
    for part in (2, 1):
        (tmp_path / f"model-{part}.safetensors").touch()
    assert [file.name for file in weights_of(str(tmp_path))] == ["model-1.safetensors", "model-2.safetensors"]


def test_a_model_of_the_hub_is_read_where_its_files_are_here(tmp_path, monkeypatch):
    asked = []

    def here(name, local_files_only):
        asked.append((name, local_files_only))
        if name != "maker/model":
            raise FileNotFoundError(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", here)
    (tmp_path / "model.safetensors").touch()
    assert weights_of("maker/model") == [tmp_path / "model.safetensors"]
    assert weights_of("maker/other") == []
    assert asked == [("maker/model", True), ("maker/other", True)]


def test_files_are_read_while_they_have_room(tmp_path):
    files = [tmp_path / name for name in ("a", "gone", "b", "c")]
    for file, size in zip(files[::2], (3000, 2000), strict=True):
        file.write_bytes(bytes(size))
    files[3].write_bytes(bytes(1000))
    assert read_ahead(files) == 6000
    assert read_ahead(files, most=5500) == 5000
    assert read_ahead([]) == 0
