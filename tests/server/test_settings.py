"""Settings: precedence, strictness; the table of what is forced: conflicts, welcome wishes, the
way out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from config import determinism
from config.determinism import Conflict, Force, Refuse
from config.device import detect
from config.settings import PROFILES, Settings, SettingsError, load


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for key in list(os.environ):
        if key.startswith(("SAMEBITS_", "VLLM_")):
            monkeypatch.delenv(key)


def test_flags_over_environment_over_profile(tmp_path: Path, monkeypatch) -> None:
    profile = tmp_path / "p.env"
    profile.write_text("SAMEBITS_PORT=1\nSAMEBITS_MAX_NUM_SEQS=2\nSAMEBITS_BLOCK_SIZE=32\n")
    monkeypatch.setenv("SAMEBITS_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("SAMEBITS_PORT", "4")
    found = load({"port": "5"}, profile=str(profile))
    assert (found.port, found.max_num_seqs, found.block_size) == (5, 3, 32)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("SAMEBITS_MAX_NUM_SEQ", "3", "did you mean SAMEBITS_MAX_NUM_SEQS"),
        ("SAMEBITS_PORT", "70000", "SAMEBITS_PORT=70000"),
        ("SAMEBITS_DEVICE", "tpu", "SAMEBITS_DEVICE=tpu"),
        ("SAMEBITS_SEED_POLICY", "fixed:x", "SAMEBITS_SEED_POLICY=fixed:x"),
        ("SAMEBITS_MAX_NUM_BATCHED_TOKENS", "15", "16"),
    ],
)
def test_a_bad_value_names_key_value_and_what_was_expected(monkeypatch, key, value, words) -> None:
    monkeypatch.setenv(key, value)
    with pytest.raises(SettingsError, match=words):
        load()


def test_a_misspelt_key_in_a_profile_names_its_line(tmp_path: Path) -> None:
    profile = tmp_path / "p.env"
    profile.write_text("# a comment\nSAMEBITS_PROT=1\n")
    with pytest.raises(SettingsError, match=r"line 2: SAMEBITS_PROT=1.*SAMEBITS_PORT"):
        load(profile=str(profile))


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.env")), ids=lambda p: p.stem)
def test_every_shipped_profile_loads_and_fits_its_device(path: Path) -> None:
    settings = load(profile=path.stem)
    assert settings.device != "auto"
    kinds = [type(row) for row in determinism.table(settings.device)]
    assert Force in kinds and Refuse in kinds


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_forced_variable_conflicts_with_another_value(device: str) -> None:
    rows = [r for r in determinism.table(device) if isinstance(r, Force) and r.kind == "env"]
    assert rows
    for row in rows:
        faults = determinism.check(load(), device, {row.name: "surely-not-this"})
        assert any(f"{row.name}=surely-not-this" in f and "Remedy" in f for f in faults), row.name
        fine = determinism.check(load(), device, {} if row.value is None else {row.name: row.value})
        assert not any(f.startswith(f"{row.name}=") for f in fine), row.name


def test_the_seeds_flag_is_welcome_on_every_device() -> None:
    for device in ("cpu", "cuda", "npu"):
        faults = determinism.check(load(), device, {"VLLM_BATCH_INVARIANT": "1"})
        assert not any("VLLM_BATCH_INVARIANT" in f for f in faults)
    forced = determinism.resolve(load(), "cpu", {"VLLM_BATCH_INVARIANT": "1"})
    assert forced.env["VLLM_BATCH_INVARIANT"] is None


def test_its_opposite_stops_the_start_and_names_both() -> None:
    with pytest.raises(Conflict, match="VLLM_BATCH_INVARIANT=0.*SAMEBITS_DETERMINISM=off"):
        determinism.resolve(load(), "cpu", {"VLLM_BATCH_INVARIANT": "0"})


def test_determinism_off_is_the_only_way_out() -> None:
    settings = load({"determinism": "off", "quantization": "fp8"})
    forced = determinism.resolve(settings, "cpu", {"VLLM_BATCH_INVARIANT": "0"})
    assert forced.options == {} and forced.env == {"SAMEBITS_DETERMINISM": "off"}


def test_every_row_says_why_and_where_it_was_read() -> None:
    for device in ("cpu", "cuda", "npu"):
        for row in determinism.table(device):
            assert row.reason and row.source and not row.reason.endswith(".")


def test_device_detection_gives_its_reason(tmp_path: Path) -> None:
    assert detect("npu").kind == "npu"
    assert detect("auto", device_nodes=str(tmp_path)).kind == "cpu"
    (tmp_path / "davinci0").touch()
    found = detect("auto", device_nodes=str(tmp_path))
    assert found.kind == "cpu" and "vllm-ascend is not installed" in found.reason


def test_every_setting_has_a_flag(capsys) -> None:
    from server.cli import main

    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in Settings.model_fields)
