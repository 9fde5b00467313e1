"""Finished runs as rows of a store: what a row keeps of its run, so that anybody can train it again to the bit."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError, ensure, files, json_text, read_json
from fl_lightning.results import (
    CONFIG,
    DIRECTIONS,
    EXECUTION,
    PROVENANCE,
    ROW,
    SUMMARY,
    Store,
    config_files,
    config_text,
    group_id,
    is_private,
    read_config,
)
from fl_lightning.results.metrics import FILE
from fl_lightning.trainer import RunFolder


def add(run: Path, store: Store, name: str, suite: str | None = None) -> None:
    """Puts a run into a store, without writing it; the checks of a row with the same weights stay, the newest last.

    Args:
        run: The folder of a run that has ended, or of a row, such as one of another store.
        store: The store.
        name: The row's name.
        suite: The rules by which a study has trained it, see `frozen`.

    Raises:
        UserError: If the run cannot be a row, or the store has a row of this name with other weights.
    """
    if (run / ROW).is_file():
        texts = {
            path.relative_to(run).as_posix(): path.read_bytes().decode()
            for path in sorted(run.rglob("*"))
            if path.is_file()
        }
    else:
        ensure((run / SUMMARY).is_file(), f"{run}: the run has not ended; let it end first")
        texts = row_files(run, ran(run))
    about = json.loads(texts[ROW])
    stored = next((line["about"] for line in store.lines if line["row"] == name), about)
    ensure(
        stored["weights"] == about["weights"],
        f"{store.folder / name}: a row with other weights; remove it, or give another folder by --into",
    )
    checks = stored["checks"] + [check for check in about["checks"] if check not in stored["checks"]]
    about |= {"checks": sorted(checks, key=lambda check: check["date"])} | ({"suite": suite} if suite else {})
    store.put(name, {**texts, ROW: json_text(about, indent=1)})


def ran(run: Path) -> dict[str, Any]:
    """Returns what the last checkpoint of a run knows of it, such as a hash of its weights.

    Raises:
        UserError: If it is not that of a whole run.
    """
    path = RunFolder(run).last
    try:
        content = files.load(path)
        identity, server = content["identity"], content["server"]
        import torch  # takes seconds; a page needs none

        weights_hash = sha256()
        for name in sorted(server):
            weights_hash.update(name.encode() + server[name].contiguous().view(torch.uint8).numpy().tobytes())
        return {
            "kind": content["kind"],
            "method": identity["model"],
            "data": identity["data"],
            "rounds": content["round"],
            "weights": weights_hash.hexdigest()[:16],
        }
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: no checkpoint of a whole run ({error}); a row needs its run's last one") from None


def row_files(run: Path, ran: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of a row, by file name.

    Args:
        run: The folder of a run.
        ran: What the checkpoint knows of it, see `ran`.

    Raises:
        UserError: If a file of the run is missing or damaged.
    """
    configs = config_files(run)
    ensure(len(configs) == 1, f"{run}: has {len(configs)} configs; a row is a run of one config, without changes")
    run_config, run_starts = read_config(configs[0]), starts(run)
    ensure(
        not is_private(run_config),
        f"{run}: a run under trainer.privacy, whose folder is not public; publish its net, by fl-lightning export",
    )
    config = portable(run_config)
    ensure(
        not any(start.get("made_by") == "a program" for start in _read(run)),
        f"{run}: a program has made its objects and weights; a row is a run of `fl-lightning fit`",
    )
    engines = {start["engine"] for start in run_starts}
    ensure(len(engines) == 1, f"{run}: trained by {len(engines)} engines; a row is a run of one engine")
    config["trainer"]["engine"] = engines.pop()  # where it was auto
    about = {
        "settings": group_id(config),
        "seed": config["trainer"]["seed"],
        "data_seed": config["data"]["init_args"]["seed"],
        **ran,
        "starts": run_starts,
        "checks": [],
    }
    optional = [*run.glob(DIRECTIONS), *run.glob("flatness*/*.json")]
    texts = {path.relative_to(run).as_posix(): path.read_bytes().decode() for path in (run / FILE, *optional)}
    return {CONFIG: config_text(config), ROW: json_text(about, indent=1), **texts}


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without what belongs to one machine: names, folders and loggers of the run, paths of files."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(setting) for key, setting in value.items()}
        if isinstance(value, list):
            return list(map(moved, value))
        return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value

    left_out = set(EXECUTION) - {
        "engine", "client_block", "compile", "accelerator", "devices", "threads", "client_memory", "callbacks"
    }  # fmt: skip
    trainer = {key: value for key, value in config["trainer"].items() if key not in left_out}
    return dict(moved({**config, "trainer": trainer}))


def digest(row: Path) -> str:
    """Returns a hash of the settings and metrics of a row, from its folder; a check is one of both."""
    return sha256(b"".join((row / name).read_bytes() for name in (CONFIG, FILE))).hexdigest()[:16]


def about(row: Path) -> dict[str, Any]:
    """Returns the content of ``row.json`` in a row's folder.

    Raises:
        UserError: If it is not readable.
    """
    return dict(read_json(row / ROW, dict[str, Any]))


def starts(run: Path) -> list[dict[str, Any]]:
    """Returns of each start what its bits depend on; nothing of a run that does not say."""
    return [
        {
            **{key: start.get(key) for key in ("round", "date", "engine", "precision")},
            **{key: start["machine"].get(key) for key in ("cpu", "device", "threads", "processes")},
            "torch": start["versions"]["torch"],
            "commit": (start["code"]["package"] or {}).get("commit"),
            "changed": bool((start["code"]["package"] or {}).get("changes")),
        }
        for start in _read(run)
    ]


def _read(run: Path) -> list[dict[str, Any]]:
    """Returns what a run has noted of each of its starts."""
    return list(read_json(run / "provenance.json", PROVENANCE, {}).get("starts", []))
