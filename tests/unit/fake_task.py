"""A task in miniature for the tests of sweeps: the command line and the files of a real one, results by a formula.

    test_loss = learning_rate * power + seed,  test_accuracy = 1 / (1 + power + seed)

The key `behavior` chooses an ending: fail exits with an error, silent writes no summary, wait sleeps with a child that
ignores interrupts, and meet waits until another run has started.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

EPOCHS, STEPS = 3, 4
"""Epochs of every run, and steps of an epoch."""


def loss(learning_rate, power, seed):
    return learning_rate * power + seed


def accuracy(power, seed):
    return 1 / (1 + power + seed)


def radius(epoch, power, seed):
    return (epoch + 1) * (1 + power) + seed


def set_key(tree, path, value):
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def read_settings(words):
    settings = yaml.safe_load(Path(words[1]).read_text())
    for word in words[2:]:
        key, _, text = word.removeprefix("--").partition("=")
        set_key(settings, key, yaml.safe_load(text))
    return settings


def run(settings):
    folder, behavior, seed = Path(settings["output_dir"]), settings.get("behavior"), settings["seed"]
    lr, power = settings["learning_rate"], settings["gossip"]["power"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with open(folder / "starts.txt", "a") as starts:
        starts.write("started\n")
    if behavior == "wait":
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child inherits that
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        signal.signal(signal.SIGINT, before)
        (folder / "child.txt").write_text(str(child.pid))
        time.sleep(60)
    if behavior == "meet":
        deadline = time.monotonic() + 20
        while len(list(folder.parent.parent.glob("*/*/config.yaml"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    if behavior == "fail":
        print("\rprogress 10 %\rprogress 20 %")
        sys.exit("error: the data are not there")
    with open(folder / "metrics.jsonl", "w") as log:
        for epoch in range(EPOCHS):
            step = (epoch + 1) * STEPS
            values = {
                "gossip/radius": radius(epoch, power, seed),
                "gossip/lr": lr,
                "test/accuracy": 0.1 * epoch,
            }
            values |= {"curvature/Q": float(epoch), "curvature/A": 0.2, "curvature/B": 0.1, "curvature/lambda_1": 2.0}
            log.write(json.dumps({"step": step, "epoch": epoch} | values) + "\n")
    if behavior == "silent":
        return
    summary = {
        "algorithm": settings["algorithm"],
        "seed": seed,
        "seconds": 90.0,
        "test_loss": loss(lr, power, seed),
    }
    summary |= {"test_accuracy": accuracy(power, seed), "curvature": {"lambda_1": 2.0 * lr}}
    (folder / "summary.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    if sys.argv[1] == "curvature":
        print("curvature asked for", *sys.argv[2:])
        sys.exit(7)
    run(read_settings(sys.argv[1:]))
