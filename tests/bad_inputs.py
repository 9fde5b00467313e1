"""Bad input for ``fl-lightning fit`` and other commands, and what the line that refuses it says."""
# ruff: noqa: E501

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FLOATS = {
    "": "model.optimizer.lr model.optimizer.momentum model.optimizer.weight_decay model.optimizer.clip "
    "model.optimizer.lr_decay model.relaxed_init data.val_fraction trainer.client_memory",
    "--model=FedSAM": "model.rho",
    "--model=FedASAM": "model.rho model.eta",
    "--model=FedAdam": "model.server_lr model.beta1 model.beta2 model.tau",
    "--model=FedAvgM": "model.beta model.server_lr",
    "--model=FedCM": "model.alpha",
    "--model=FedDyn": "model.beta",
    "--model=FedGF": "model.rho model.rho_g model.T_D model.c",
    "--model=FedGMT": "model.gamma model.tau model.ema_alpha model.beta",
    "--model=FedGloSS": "model.rho model.rho0",
    "--model=FedNTD": "model.gamma model.tau",
    "--model=FedProx": "model.mu",
    "--model=FedSpeed": "model.alpha",
    "--model=SCAFFOLD": "model.cv_scale",
    "--model.ascent=SAM": "model.ascent.rho model.ascent.rho0 model.ascent.eps",
    "--model.averaging=SWA": "model.averaging.start model.averaging.lr_min",
    "--model.averaging=EMA": "model.averaging.alpha",
    "--model.server_update=ServerAdam": "model.server_update.lr model.server_update.tau",
    "--model.optimizer.schedule=Cosine": "model.optimizer.schedule.floor",
    "--model.optimizer.schedule=Poly": "model.optimizer.schedule.power",
    "--data.partition=Dirichlet": "data.partition.alpha data.partition.power",
    "--data.augment=Augment": "data.augment.mixup",
    "--trainer.sampler=BernoulliSampler": "trainer.sampler.p",
}
INTS = {
    "": "trainer.max_rounds trainer.clients_per_round trainer.local_epochs trainer.local_steps trainer.eval_every "
    "trainer.eval_last trainer.threads trainer.client_block trainer.num_nodes data.num_clients data.batch_size "
    "data.eval_batch_size data.workers model.net.hidden model.net.num_classes",
    "--model=FedGF": "model.W",
    "--model.averaging=SWA": "model.averaging.cycle",
    "--data.augment=Augment": "data.augment.window",
    "--data.partition=FLSimPathological": "data.partition.classes",
    "--trainer.callbacks+=Checkpoints": "trainer.callbacks.every_n_rounds trainer.callbacks.save_top_k",
}
SPLIT = "--data=Arrays --data.path=good.npz --data.num_clients=3 --data.partition=FromFile --data.partition.path="
BY_HAND = r"""
--trainer.name=/absolute -> trainer.name = /absolute: give a folder below default_root_dir
--trainer.name= -> trainer.name = '': give a folder
--trainer.name=. -> trainer.name = .: give a folder
--trainer.name=a/../b -> trainer.name = a/../b: give a folder
--trainer.name=LONG -> trainer.name = xxxx
--trainer.seed=-1 -> trainer.seed = -1: give a whole number of 0 or more
--data.seed=-1 -> data.seed = -1: give a whole number of 0 or more
--trainer.threads=100000 -> trainer.threads = 100000: give a whole number from 1 to 1,024
--trainer.client_memory=1e308 -> trainer.client_memory = 1e+308: give a finite number from 0 to 1,000,000
--trainer.local_steps=1000000000000 -> trainer.local_steps = 1000000000000: give a whole number from 1 to 1,000,000
--trainer.local_epochs=100000000 -> trainer.local_epochs = 100000000: give a whole number from 1 to 10,000
--trainer.devices=100000 --trainer.strategy=ddp -> trainer.devices = 100000: give a whole number from -1 to 1,024
--trainer.accelerator=quantum -> trainer.accelerator = quantum
--trainer.seed=? -> trainer.seed = ?: no value of YAML
--trainer.faults=x -> trainer.faults = x: no such class; choose from Faults.
--trainer.max_time=5 -> trainer.max_time = 5: give DD:HH:MM:SS
--trainer.engine=fast -> trainer.engine = fast
--trainer.engine=sequential --trainer.compile=true -> trainer.compile = True: only with engine graphed
--trainer.callbacks+=Checkpoints --trainer.callbacks+=Checkpoints -> Checkpoints is there 2 times; give it once
--trainer.callbacks+=Results --trainer.callbacks.target=.nan -> Results.target = nan: give a finite number
--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.metrics+=Spectrum --trainer.callbacks.metrics.k=10000000 -> Spectrum.k = 10000000: the net has 610 weights; give at most 610
--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.metrics+=LPF --trainer.callbacks.metrics.sigma=.inf -> LPF.sigma = inf: give a finite number above 0
--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.metrics+=LPF --trainer.callbacks.metrics.draws=1 -> LPF.draws = 1: give a whole number of at least 2
--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.metrics=[] -> name some
--trainer.loggers=x -> trainer.loggers = x: no such class; choose from CSVLogger, TensorBoardLogger, WandbLogger
--trainer.sampler=ReplaySampler --trainer.sampler.rounds=empty_trace.json -> holds 0 rounds, trainer.max_rounds = 2: take a longer trace
--trainer.sampler=ReplaySampler --trainer.sampler.rounds=deep.json -> trainer.sampler.rounds = deep.json: not a JSON list
--trainer.sampler=ReplaySampler --trainer.sampler.rounds=[[0,0],[1]] -> trainer.sampler.rounds[0] = [0, 0]: give different ids
--data.std=[.inf] -> data.std = [inf]: give a list, each a finite number of at least 1e-12
--data.std=[0] -> data.std = [0.0]: give a list
--data.std=[1e-320] -> data.std = [1e-320]: give a list
--data.mean=[.nan] -> data.mean = [nan]: give a list, each a finite number
--data.mean=[1,2] -> data.mean = [1.0, 2.0]: samples have shape (1, 8, 8)
--data.val_fraction=0.9999 -> data.val_fraction = 0.9999: leaves nothing to train on
--data.val_fraction=1 -> data.val_fraction = 1.0: give a finite number from 0 to below 1
--data.augment=Augment --data.augment.crop=1000 -> data.augment.crop = 1000: larger than the images
--data.augment=Augment --data.augment.cutout=1000 -> data.augment.cutout = 1000: larger than the images
--data.augment=Augment --data.augment.crop=-1 -> data.augment.crop = -1: give a whole number of 0 or more
--data.augment=Augment --data.augment.granularity=image -> data.augment.granularity = image
--data=Arrays --data.path=u8.npz --data.num_clients=3 --data.scale=-1 -> data.scale = -1.0: give a finite number
--data=Arrays --data.path=u8.npz --data.num_clients=3 --data.scale=0 -> data.scale = 0.0: give a finite number
--data=Arrays --data.path=word.yaml --data.num_clients=3 -> data.path = 'word.yaml' is not a readable .npz file
SPLIThuge.json -> data.partition.path = 'huge.json' is not a split
SPLITdeep.json -> data.partition.path = 'deep.json' is not a split
SPLITempty_split.json -> data.partition.path = 'empty_split.json' is not a split in a known format (ValueError('no client'))
SPLITtrace.json -> data.num_clients = 3, but 'trace.json' has 2 clients
--model.parts+=Personal --model.parts.keep=[head] -> model.parts: Personal.keep = head: matches none of 1.weight, 1.bias, 3.weight, 3.bias
--model.parts+=Personal --model.parts.share=[last:x] -> model.parts: Personal.share = last:x: give a number of layers, such as last:1
--model.parts+=Personal --model.parts.keep=[] --model.parts.share=[] -> Personal: keep and share are both given; give one of them
--model.parts+=Personal --model.parts.epochs_alone=-1 -> epochs_alone = -1: give a whole number of 0 or more
--model.parts+=Personal --model.parts+=Ditto -> model.parts: Personal and Ditto both train clients by themselves; take one
--model.parts+=Personal --data.val_fraction=0.1 -> so there is no global model for data.val_fraction = 0.1, which must be 0
--model.parts+=Personal --trainer.callbacks+=FlatnessMonitor --trainer.callbacks.metrics=[LPF] -> so there is no global model for LPF
--model.parts+=Personal --trainer.callbacks+=FlatnessMonitor --trainer.callbacks.metrics=[LambdaMax] --trainer.callbacks.metrics.parameters=["3.*"] -> some stay with each client
--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.metrics+=ClientLambdaMax --trainer.callbacks.metrics.clients=own -> ClientLambdaMax.clients = own: no part gives clients models of their own
--trainer.callbacks+=FlatnessMonitor --trainer.callbacks.metrics+=ClientEvaluation --trainer.callbacks.metrics.adapt_epochs=2 -> ClientEvaluation.adapt_epochs = 2: no part gives clients
--model=FedAdamW --model.parts+=Personal -> model.parts: FedAdamW averages optimizers' states whole
--model.parts+=Ditto --model.optimizer=SGD --model.optimizer.momentum=0.9 --model.optimizer.state=keep -> model.optimizer.state = keep: model.parts trains each client
--trainer.sampler=UniformSampler --trainer.sampler.clients_per_round=3 --trainer.sampler.held_out=4 -> there are only 2 clients
--model=FedAvg --model.weighting=sum -> model.weighting = sum
--model=FedDyn --model.prox=cubed -> model.prox = cubed
--model=FedGloSS --model.sigma_ref=none -> model.sigma_ref = none
--model=FedGloSS --model.warmup=-1 -> model.warmup = -1: give a whole number of 0 or more
--model.buffers=mean -> model.buffers = mean
--model.optimizer.schedule=Cosine --model.optimizer.schedule.floor=-1 -> floor = -1.0: give a finite number from 0 to 1
--model.optimizer.schedule=Poly --model.optimizer.schedule.power=1e30 -> power = 1e+30: give a finite number from 0 to 100
--model.optimizer.schedule=Cyclic --model.optimizer.schedule.floor=1e30 -> floor = 1e+30: give a finite number from 0 to 1
--model.averaging=SWA --model.averaging.start=2.5 -> model.averaging.start = 2.5: give a fraction below 1, or a round
--model.loss=torch.nn.CrossEntropyLoss --model.loss.label_smoothing=-1 -> model.loss.label_smoothing = -1.0: give a number
--model.loss=torch.nn.CrossEntropyLoss --model.loss.label_smoothing=.nan -> model.loss.label_smoothing = nan: give a number
--model.loss=torch.nn.CrossEntropyLoss --model.loss.label_smoothing=1 -> model.loss.label_smoothing = 1.0: give a number
--model.loss=torch.nn.CrossEntropyLoss --model.loss.reduction=nonsense -> model.loss.reduction = nonsense: a minibatch
--model.loss=torch.nn.CrossEntropyLoss --model.loss.weight=[1] -> model.loss.weight = [1]: no Tensor
--model.loss=Nonsense -> model.loss = Nonsense: no such class; choose from PixelCrossEntropy.
--model.net= -> model.net = '': no such class; choose from BiSeNetV2, DigitsCNN
--model.net=Nonsense -> model.net = Nonsense: no such class; choose from BiSeNetV2, DigitsCNN
--model.net=os.system -> model.net = os.system: no Module; give its class
--model.net=subprocess.Popen -> model.net = subprocess.Popen: no Module; give its class
--model.net.hidden=1000000000 -> model.net.hidden = 1000000000: give a whole number from 1 to 1,000,000
--model.net=HsuCNN --model.net.in_channels=0 -> model.net.in_channels = 0: give a whole number
--model={class_path:5} -> model = {class_path:5}: no such class; a mapping is {class_path: NAME}, with a space after the colon
--config=twice.yaml -> config = twice.yaml: line 4: trainer is there twice; give it once
--config=self.yaml -> config = self.yaml: line 1: *a stands within itself
--config=nested.yaml -> config = nested.yaml: line 1: nested deeper than 50
--config=laughs.yaml -> config = laughs.yaml: line 8: unfolds to more than 100,000 values
"""
COMPARED = {
    "text": (None, b"round,server/test/acc\n1,abc\n", "not a table of metrics (line 2"),
    "rounds": (None, b"round,server/test/acc\nx,0.5\n", "not a table of metrics (line 2"),
    "bytes": (None, bytes(range(128, 256)) * 3, "no metrics.csv with a round"),
    "empty": (None, b"", "no metrics.csv with a round"),
    "broken": ("a: [", b"round,server/test/acc\n1,0.5\n", "config.yaml: not readable (ParserError"),
    "list": ("- 1", b"round,server/test/acc\n1,0.5\n", "config.yaml: no mapping of settings"),
    "tags": (
        "!!python/object:os.system x",
        b"round,server/test/acc\n1,0.5\n",
        "config.yaml: not readable (ConstructorError",
    ),
    "twice": ("a: 1\na: 2", b"round,server/test/acc\n1,0.5\n", "line 2: a is there twice"),
}
"""Run folders that cannot be compared: config, metrics, and the complaint."""


def bad_inputs() -> list[tuple[str, str]]:
    """Returns arguments of ``fit``, and what the line that refuses them holds."""
    rows = [
        (f"{before} --{key}={value}".strip(), f"{key.rpartition('.')[2]} = {expected}")
        for before, keys in FLOATS.items()
        for key in keys.split()
        for value, expected in ((".nan", "nan: give "), (".inf", "inf: give "), ("abc", "abc: expected a number"))
    ]
    rows += [
        (f"{before} --{key}={value}".strip(), f"{key.rpartition('.')[2]} = {expected}")
        for before, keys in INTS.items()
        for key in keys.split()
        for value, expected in (("0", "0: give a whole number"), ("2.5", "2.5: expected a whole number"))
    ]
    by_hand = BY_HAND.replace("SPLIT", SPLIT).replace("LONG", 300 * "x").strip().splitlines()
    return rows + [(args, expected) for args, expected in (row.split(" -> ") for row in by_hand)]


def write_bad_files(folder: Path) -> None:
    """Writes the files that the table names, and ``COMPARED``."""
    x, y = np.random.default_rng(0).integers(0, 255, (40, 8, 8)).astype(np.uint8), np.arange(40) % 4
    np.savez(folder / "u8.npz", x_train=x, y_train=y, x_test=x[:8] + 1, y_test=y[:8])
    (folder / "huge.json").write_text(json.dumps({"0": [10**30], "1": [1], "2": [2]}))
    (folder / "deep.json").write_text("[" * 5000 + "]" * 5000)
    (folder / "empty_split.json").write_text("{}")
    (folder / "empty_trace.json").write_text("[]")
    (folder / "twice.yaml").write_text(
        "model: FedAvg\ndata: Digits\ntrainer: {max_rounds: 3}\ntrainer: {clients_per_round: 1}\n"
    )
    (folder / "self.yaml").write_text("a: &a [*a]\n")
    (folder / "nested.yaml").write_text("[" * 900 + "]" * 900)
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 5)}]" for i in range(1, 12)]
    (folder / "laughs.yaml").write_text("\n".join(["a0: &a0 [1, 1]", *lines]))
    for name, (config, metrics, _) in COMPARED.items():
        (run := folder / "compared" / name / "version_0").mkdir(parents=True)
        (run / "metrics.csv").write_bytes(metrics)
        if config is not None:
            (run / "config.yaml").write_text(config)
