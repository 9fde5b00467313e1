"""The index of the command line is that of the code, and what is answered from it is what the parser answers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning.commands import COMMANDS
from fl_lightning.commands.shared.arguments import config_names
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.commands.shared.index import FILE, ArgumentsError, help_of, index, keys_of
from fl_lightning.commands.shared.messages import explain
from fl_lightning.commands.shared.parser import Command, check_early


@pytest.mark.slow
def test_the_index_is_that_of_the_code() -> None:
    # in a process of its own, since a help lists classes in the order in which they are imported
    command = [sys.executable, "-m", "tests.command_index", "--print"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    current, stored = json.loads(printed), json.loads(FILE.read_text(encoding="utf-8"))
    if current["made with"] != stored["made with"]:  # a help shows types as Python and jsonargparse write them
        for content in (current, stored):
            del content["made with"], content["texts"]
            for entry in content["commands"].values():
                del entry["help"]
    assert current == stored, "index.json is out of date: run `make renew`"


def test_help_has_every_option() -> None:
    for name, command in index()["commands"].items():
        shown = help_of(name, full=True)
        assert shown.startswith(f"usage: fl-lightning {name}")
        assert all(f"--{option}" in shown for option in command["options"])


def line_of(function: object, *args: str) -> str | None:
    try:
        function(*args)  # type: ignore[operator]
    except (ArgumentsError, ValueError) as error:
        return explain(error)
    return None


SLIPS = """
--model NoSuch
--model FedSam
--config quickstart --model FedSam
--config quickstart --model.ascent SAMM
--config quickstart --model=FedGF --model.ascent SAMM
--config quickstart --data Digit
--config quickstart --data.partition iid
--config quickstart --data.augment Nothing
--config quickstart --trainer.sampler Unifrom
--config quickstart --trainer.aggregation Foo
--config quickstart --trainer.privacy Foo
--config quickstart --trainer.max_round 3
--trainer.max_round=3
--trainer.tf3
--config quickstart --lr 0.1
--lr 0.1
--lr 0.1 --trainer.foo 3
--lr=0.1
--seed 1
--seed_everything 1
--config quickstart --model.lr 0.1
--config quickstart --model FedSAM --model.roh 0.1
--config quickstart --model FedSAM --model.ascent SAM
--config quickstart --model.optimizer Adam
--config quickstart --model.roh "it's"
--config quickstart --model.averagin=SWA
--config quickstart --data.alpha 0.1
quickstart
runs/nothing/last.ckpt
mine.yaml
--ckpt_path runs/nothing/last.ckpt
--epochs 3
--net DigitsMLP
--nonsense 3
--trainer.max_epochs 3
--config quickstart --model.optimizer RMSprop
--config quickstart --model fedsam
--config quickstart some thing
--config quickstart --max-rounds 3
--config nosuch
--config quickstrat
--config configs/nosuch.yaml
--config quickstart --trainer.engine batchd
""".strip().splitlines()


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_name_is_refused_in_the_same_words(slip: str) -> None:
    args = ["fit", *shlex.split(slip)]
    line = line_of(check_early, *args)
    assert line is not None and line == line_of(FederatedCLI, *args)


@pytest.mark.parametrize(
    "text", ["model:\n\ta: 1", "a: {b", "a: 1\na: 2", "a: *b", "a: 1\n---\na: 2", "a: &b [*b]", "a: \0"]
)
def test_a_config_that_is_no_yaml_is_refused_in_the_same_words(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    args = ["fit", f"--config={tmp_path / 'a.yaml'}"]
    line = line_of(check_early, *args)
    assert line is not None and line == line_of(FederatedCLI, *args)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("--lr 0.1", "lr = 0.1: no such setting (did you mean model.optimizer.lr?)"),
        ("--model.lr 0.1", "did you mean model.optimizer.lr?"),
        ("--seed 1", "did you mean data.seed or trainer.seed?"),
        ("--data.alpha 0.1", "did you mean data.partition.alpha?"),
        ("--trainer.max_epochs 3", "did you mean trainer.max_rounds?"),
        ("--max-rounds 3", "did you mean trainer.max_rounds?"),
        ("--epochs 3", "did you mean trainer.max_rounds or trainer.local_epochs?"),
        ("--net DigitsMLP", "did you mean model.net?"),
        ("--model=FedGF --model.ascent SAM", "no such setting of this class; "),
        ("quickstart", "quickstart: give a config as --config quickstart"),
        ("mine.yaml", "as in --config=mine.yaml"),
        ("--model FedSem", "did you mean FedSAM, "),
        ("--model fedsam", "did you mean FedSAM, "),
        ("--data.partition iid", "did you mean IID?"),
        ("--trainer.aggregation mean", "choose from CoordinateMedian, Krum, MultiKrum, NormClipping, TrimmedMean. "),
        ("--model.optimizer Adam", "did you mean AdamW? An optimizer of torch.optim goes by TorchOptimizer, as in "),
        (
            "--model.optimizer RMSprop",
            "goes by TorchOptimizer, as in --model.optimizer TorchOptimizer --model.optimizer.name Adam",
        ),
        (
            "--data FashionMNIST",
            "did you mean FEMNIST? Another data set of torchvision goes by TorchvisionData, as in "
            "--data TorchvisionData --data.name MNIST",
        ),
        ("--data Mnist", "as in --data TorchvisionData --data.name MNIST"),
        ("--ckpt_path none/last.ckpt", "ckpt_path = none/last.ckpt: no such file; give a checkpoint file"),
    ],
)
def test_the_common_slips_get_the_right_key(slip: str, meant: str) -> None:
    config = [] if "ckpt" in slip else ["--config=quickstart"]
    line = line_of(check_early, "fit", *config, *shlex.split(slip))
    assert line is not None and meant in line


@pytest.mark.parametrize(("slip", "kind"), [("path=a.npz", "Arrays"), ("num_clients=5", ""), ("partition.alpha=5", "")])
def test_a_setting_of_the_data_before_their_class(slip: str, kind: str) -> None:
    """The line names what was given, and what goes before it."""
    line = line_of(FederatedCLI, "fit", "--model=FedAvg", "--model.net=DigitsMLP", f"--data.{slip}", "--data=Digits")
    assert line is not None and f"data.{slip.replace('=', ' = ')}: give its class first: --data {kind}" in line


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("--trainer.precision fp16", "trainer.precision = fp16: choose from 32-true, 64-true, bf16-mixed"),
        ("--model.optimizer torch.optim.Adam", "--model.optimizer TorchOptimizer --model.optimizer.name Adam"),
        ("--trainer.loggers NoLogger", "--trainer.loggers+=lightning.pytorch.loggers.CometLogger"),
        ("--trainer.loggers+=TensorBordLogger", "trainer.loggers = TensorBordLogger: no such class; did you mean T"),
        ("--trainer.callbacks [Trajectory", "give [Trajectory], or --trainer.callbacks+=Trajectory"),
        ("--model.help FedSamm", "model.help = FedSamm: no such class; did you mean FedSAM, "),
        (
            "--data FederatedDataModule",
            "data = FederatedDataModule: an abstract class; give one below it that defines l",
        ),
        (
            "--trainer.sampler CohortSampler",
            "CohortSampler: an abstract class; give one below it that defines __call__",
        ),
        ("--model.ascent fl_lightning.Ascent", "Ascent: an abstract class; give one below it that defines __call__"),
        ("--trainer.faults 0.5", "trainer.faults = 0.5: no such class; choose from Faults. A class of your own"),
        ("--model.metrics acc", "model.metrics = acc: expected a list; give [acc], or --model.metrics+=acc"),
        ("--model.metrics a,b", "model.metrics = a,b: expected a list; give [a,b]"),
        ("--trainer.callbacks mine.Own", "callbacks = mine.Own: expected a list; give [mine.Own], or --trainer.cal"),
        (
            "--data=HuggingFace --data.inputs=a --data.dataset.path=b",
            "data.dataset has no settings of its own; give --da",
        ),
        (
            "--trainer.name.part a",
            "trainer.name.part = a: trainer.name has no settings of its own; give --trainer.name V",
        ),
        ("--model.ascent=null --model.ascent.rho=1", "model.ascent.rho = 1: give its class first: --model.ascent ASAM"),
        ("--model.optimizer.help Adam", "model.optimizer.help = Adam: no such class; did you mean AdamW?"),
        ("--model.ascent SGD", "model.ascent = SGD: not taken here; choose from ASAM, LESAM, SAM"),
        (
            "--trainer.callbacks '[{class_path: FlatnessMonitor, init_args: {every: 2}}]'",
            "trainer.callbacks.every = 2: no such setting",
        ),
        (
            "--model.ascent '{class_path: SAM, rho: 0.1}'",
            "model.ascent.rho = 0.1: the settings of a class stand under init_args, as in {class_path: SAM, ",
        ),
        ("--model.net torch.nn.Linear", "--model.net.in_features, --model.net.out_features: missing; give a value"),
        ("--model.net LoRA --model.net.net torch.nn.Linear --model.net.targets [a]", "--model.net.net.in_features, "),
        ("--data.partition FromFile", "--data.partition.path: missing; give a value"),
    ],
)
def test_slips_that_only_the_parser_sees(slip: str, meant: str) -> None:
    line = line_of(FederatedCLI, "fit", "--config=quickstart", *shlex.split(slip))
    assert line is not None and meant in line
    assert "+=a,b" not in line


def test_lists_of_a_subcommand_need_no_brackets() -> None:
    args = ["--clients", "2,5", "--splits=train,test", "--labels", "[A]", "--compare", "a"]
    config = FederatedCLI("landscape", "--config=quickstart", "--ckpt_path=x", *args).config
    assert config.clients == [2, 5] and config.splits == ["train", "test"]
    assert config.labels == ["A"] and config.compare == ["a"]
    config = FederatedCLI("flatness", "--config=quickstart", "--ckpt_path=x", "--metrics", "LambdaMax,LPF").config
    assert [metric.class_path for metric in config.metrics] == ["fl_lightning.LambdaMax", "fl_lightning.LPF"]
    assert FederatedCLI("flatness", "--config=quickstart", "--ckpt_path=x", "--metrics", "null").config.metrics is None


@pytest.mark.parametrize(
    ("args", "flag", "places"),
    [
        (["compare", "--importance", "a", "b"], "importance", {"runs": ["a", "b"]}),
        (["compare", "a", "--importance"], "importance", {"runs": ["a"]}),
        (["compare", "--importance", "true", "a"], "importance", {"runs": ["a"]}),
        (["compare", "--importance=true", "a"], "importance", {"runs": ["a"]}),
        (["reproduce", "--dry-run", "fedsam", "1"], "dry_run", {"paper": "fedsam", "table": "1"}),
        (["runs", "--delete", "--yes", "a"], "delete", {"folders": ["a"]}),
    ],
)
def test_a_flag_may_stand_before_a_place(args: list[str], flag: str, places: dict[str, object]) -> None:
    config = Command(*args).config
    assert config[flag] is True and {name: config[name] for name in places} == places
    off = Command("compare", "--importance", "false", "a").config
    assert off["importance"] is False and off["runs"] == ["a"]


@pytest.mark.parametrize(
    ("model", "optimizer", "line"),
    [
        ("LocalMuon", "SGD", "model.optimizer = SGD: not taken here; choose from Muon"),
        ("LocalMuon", "TorchOptimizer", "model.optimizer = TorchOptimizer: not taken here; choose from Muon"),
        ("FedAdamW", "Adam", "model.optimizer = Adam: no such class; did you mean AdamW?"),
    ],
)
def test_an_optimizer_that_the_algorithm_does_not_take_is_not_offered(model: str, optimizer: str, line: str) -> None:
    args = [f"--model={model}", "--model.net=DigitsMLP", "--data=Digits", f"--model.optimizer={optimizer}"]
    assert line_of(FederatedCLI, "fit", *args) == line


def test_a_file_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.ckpt").write_bytes(b"x")
    (tmp_path / "half.yaml").write_text("model: {rho: 0.1")
    message = line_of(check_early, "flatness", "--ckpt_path", "mine.ckpt")
    assert message == "ckpt_path = mine.ckpt: no config.yaml of its run lies above it; give --config"
    with pytest.raises(ArgumentsError) as error:
        FederatedCLI("fit", "--config=half.yaml")
    line = explain(error.value, ["half.yaml"])
    assert line is not None and "line 1, column" in line and "string" not in line
    (tmp_path / "mine.py").touch()  # read as YAML, an empty file is null
    for key in ("model.net", "trainer.callbacks"):
        message = line_of(FederatedCLI, "fit", "--config=quickstart", f"--{key}=mine.py")
        assert message == f"{key} = mine.py: no dotted path of a class; give one, such as mine.CLASS"
    parsed = FederatedCLI("fit", "--config=quickstart", "--model.init_weights=mine.py")  # a setting that is no class
    assert parsed.config.model.init_args.init_weights == "mine.py"
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    message = line_of(check_early, "interpolate", "run", "run")
    assert message is not None and message.endswith("give a checkpoint file, 'last' or 'best'")


def test_a_key_of_a_file_is_named_in_full(tmp_path: Path) -> None:
    net = "{class_path: DigitsMLP, init_args: {hidden: [1]}}"
    (tmp_path / "a.yaml").write_text(f"model: {{class_path: FedAvg, init_args: {{net: {net}}}}}\ndata: Digits\n")
    line = line_of(FederatedCLI, "fit", f"--config={tmp_path / 'a.yaml'}")
    assert line == "model.net.hidden = [1]: expected a whole number"


def test_config_after_settings() -> None:
    line = line_of(FederatedCLI, "fit", "--data.partition.alpha=0.1", "--config=quickstart")
    assert line is not None and "--config, if there is one, goes first" in line


@pytest.mark.parametrize("name", [name for name in COMMANDS if index()["commands"][name]["complete"]])
def test_help_is_two_screens(name: str) -> None:
    lines = help_of(name).splitlines()
    assert len(lines) <= 100 and max(len(line) for line in lines if line[:1] == " ") <= 80
    assert "--help=all" in help_of(name) and len(help_of(name, full=True).splitlines()) > 200
    for key in re.findall(r"^  --(\w+\.[\w.]+)", help_of(name).partition("all settings:")[0], re.MULTILINE):
        assert key in keys_of(key.rpartition(".")[2])


def test_help_lists_the_classes_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        FederatedCLI("fit", "--model.help=FedSAM")
    shown = " ".join(capsys.readouterr().out.split())
    nets, losses = (
        shown.partition(f"--model.{name} {name.upper()} ")[2].partition("classes: ")[2] for name in ("net", "loss")
    )
    assert nets.startswith("FullyConnected, ") and "PixelCrossEntropy" not in nets.partition(")")[0]
    assert losses.startswith("PixelCrossEntropy, or a loss of torch.nn)")
    assert "(type: samples or uniform or null, " in shown and not re.search(
        "Optional|Literal|Union|checked later", shown
    )


PASSES = """
--config quickstart
--config quickstart --model FedSAM --model.rho 0.1 --trainer.max_rounds=3.0 --trainer.seed 1e3
--config quickstart --model my_methods.Mine --model.nothing 3 --model.ascent Other
--config quickstart --model.optimizer TorchOptimizer --model.optimizer.name Adam
--config quickstart --model.loss CrossEntropyLoss --model.net torch.nn.Linear
--config quickstart --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss
--config quickstart --trainer.loggers None --data.partition null
--config quickstart --model LocalObjective --model.ascent Ascent
--config quickstart --model.class_path FedAvg --model.init_args.relaxed_init 0.5
--config quickstart --model.parts '[{class_path: other.Part}]' --model.mine 3
--config quickstart --model fl_lightning.algorithms.fedsam.FedSAM --model.rho 0.1
--config quickstart --model.help=FedSAM
--config quickstart --model.loss '{class_path: my.Loss, init_args: {weights: {0: 1.0, 1: 2.0}}}'
--config quickstart --values model.rho=0.1,0.2 --seeds 0,1
--config quickstart --print_config
--config here.yaml --model Mine
--model model
""".strip().splitlines()


@pytest.mark.parametrize("line", PASSES)
def test_the_rest_is_left_to_the_parser(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.yaml").write_text("model: my_methods.Mine  # a class of one's own\n")
    Path("model").write_text("class_path: FedAvg\n")  # a file is a setting's value, too
    check_early("fit", *shlex.split(line))


def test_every_config_passes() -> None:
    for name in config_names():
        if not name.startswith("sweeps/"):
            check_early("fit", f"--config={name}", "--trainer.max_rounds=3")
