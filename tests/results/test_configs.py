"""In which settings two configs differ."""

from __future__ import annotations

from typing import Any

from fl_lightning.results.configs import changes, differences


def config(**trainer: Any) -> dict[str, Any]:
    ascent = {"class_path": "fl_lightning.SAM", "init_args": {"rho": trainer.pop("rho", 0.1)}}
    net = {"class_path": "fl_lightning.DigitsMLP", "init_args": {"hidden": trainer.pop("hidden", 64)}}
    return {
        "model": {"class_path": "fl_lightning.FedAvg", "init_args": {"net": net, "ascent": ascent}},
        "data": {"class_path": "fl_lightning.Digits", "init_args": {"seed": 0}},
        "trainer": {"seed": 0, "max_rounds": 3, "engine": "auto", "callbacks": None, **trainer},
    }


def test_the_same() -> None:
    assert differences(config(), config(engine="graphed", devices=2, name="x", callbacks=[{"class_path": "A"}])) == []


def test_settings_by_their_key_on_the_command_line() -> None:
    lines = differences(config(), config(seed=1, rho=0.2, hidden=8, max_rounds=5, engine="batched"))
    assert lines == [
        "model.net.hidden = 64 (here: 8)",
        "model.ascent.rho = 0.1 (here: 0.2)",
        "trainer.seed = 0 (here: 1)",
        "trainer.max_rounds = 3 (here: 5)",
    ]


def test_of_another_class_only_the_class() -> None:
    changed = config()
    changed["model"]["init_args"]["ascent"] = {"class_path": "fl_lightning.ASAM", "init_args": {"rho": 0.7, "eta": 0.2}}
    assert differences(config(), changed) == ["model.ascent = SAM (here: ASAM)"]
    changed["model"]["init_args"]["ascent"] = None
    assert differences(config(), changed) == ["model.ascent = SAM (here: None)"]
    changed["model"] = {"class_path": "fl_lightning.FedDyn", "init_args": {}}
    assert differences(config(), changed) == ["model = FedAvg (here: FedDyn)"]


def test_settings_that_only_one_has_do_not_count() -> None:
    assert differences(config(), config(new=1)) == differences(config(new=1), config()) == []


def test_settings_of_the_parts_of_a_list() -> None:
    def parts(*rates: float) -> dict[str, Any]:
        settings = config()
        listed = [{"class_path": "mine.TopK", "init_args": {"rate": rate}} for rate in rates]
        settings["model"]["init_args"]["parts"] = listed or None
        return settings

    assert differences(parts(0.1), parts(0.2)) == ["model.parts.TopK.rate = 0.1 (here: 0.2)"]
    assert differences(parts(0.1), parts(0.1, 0.3)) == ["model.parts = mine.TopK (here: mine.TopK, mine.TopK)"]
    here = ["model.parts.TopK: not set -> mine.TopK", "model.parts.TopK.rate: not set -> 0.1"]
    assert changes(parts(), parts(0.1)) == ["model.parts: None -> mine.TopK", *here]
    assert changes(parts(0.1, 0.1), parts(0.1, 0.3)) == ["model.parts.TopK_2.rate: 0.1 -> 0.3"]


def test_an_empty_list_is_named() -> None:
    one, other = config(mean=[0.5]), config(mean=[])
    assert changes(one, other) == ["trainer.mean: 0.5 -> empty"]
    assert differences(one, other) == ["trainer.mean = 0.5 (here: empty)"]


def test_long_values_that_differ_at_their_end() -> None:
    one, other = (config(default_root_dir=None, resume=f"{'x' * 70}{end}") for end in "ab")
    (line,) = changes(one, other)
    assert line.startswith("trainer.resume: xxx") and len(line) < 160
