"""The recipes of docs/pytorch.md: Lightning with automatic optimization, and timm's train script."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from dsgdac_accel import AdaptiveConsensus, GossipConfig, build_topology
from dsgdac_accel.simulation import Simulation
from tests.launching import CLIENTS, ROOT, torchrun
from tests.multiprocess.small_model import flat, make_model
from tests.workers import run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PAGE = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
TIMM_SCRIPT = CLIENTS / "hf_scripts" / "timm_train.py"
WORKERS = 2


# ---- Lightning


def batches() -> list[torch.Tensor]:
    return list(torch.randn(8 * WORKERS, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def loss_of(model, batch):
    return model(batch.squeeze(0)).square().mean()


def fit(rank: int, folder: str) -> dict:
    import lightning.pytorch as lightning  # takes seconds

    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    recipe: dict = {}
    exec(re.search(r"```py\n(.*?)```", PAGE, re.DOTALL)[1], recipe)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = make_model()
            self.seen, self.scored = [], []

        def training_step(self, batch, _):
            return loss_of(self.inner, batch)

        def validation_step(self, batch, _):
            self.scored.append(flat(self.inner).clone())
            self.log("score", loss_of(self.inner, batch), sync_dist=True)

        def on_train_batch_end(self, *_):
            self.seen.append(flat(self.inner).clone())

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module = Module()
    trainer = lightning.Trainer(
        strategy=recipe["GossipStrategy"](GossipConfig(power=2, timeout=30)), devices=WORKERS, accelerator="cpu",
        max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    in_order = DistributedSampler(batches(), WORKERS, rank, shuffle=False)
    trainer.fit(module, DataLoader(batches(), sampler=in_order), DataLoader(batches()[:2]))
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
    return {
        "own": module.seen[-1],
        "end": flat(module.inner),
        "scored": module.scored[-1],
        "saved": torch.cat([value.flatten() for value in saved.values()]),
    }


def expected() -> list[torch.Tensor]:
    models = [make_model() for _ in range(WORKERS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9) for optimizer in optimizers]
    lrs = []
    twin = torch.optim.SGD(make_model().parameters(), lr=0.1, momentum=0.9)
    planned = torch.optim.lr_scheduler.OneCycleLR(twin, 0.1, total_steps=9)
    for _ in range(9):
        lrs.append(twin.param_groups[0]["lr"])
        twin.step()
        planned.step()
    schedule = AdaptiveConsensus(power=2, planned_lrs=lrs)
    simulation = Simulation(models, optimizers, build_topology("one_peer_ring", WORKERS), schedule)
    shares = [batches()[rank::WORKERS] for rank in range(WORKERS)]
    for number in [*range(0, 8, 2)] * 2:
        for model, share in zip(models, shares, strict=True):
            model.zero_grad()
            for batch in share[number : number + 2]:
                (loss_of(model, batch) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        simulation.step()
        for scheduler in schedulers:
            scheduler.step()
    return [flat(model) for model in models]


def test_lightning_gossips_with_automatic_optimization(tmp_path):
    pytest.importorskip("lightning")
    first, second = run_workers(fit, WORKERS, str(tmp_path), timeout=120)
    x = expected()
    assert not torch.allclose(*x)
    mean = torch.stack(x).mean(0)
    for result, own in zip((first, second), x, strict=True):
        torch.testing.assert_close(result["own"], own, rtol=0, atol=1e-12)
        for what in ("scored", "saved", "end"):
            torch.testing.assert_close(result[what], mean, rtol=0, atol=1e-12)


# ---- timm

# The script ends with `if __name__ == "__main__": main()`, so this runs after training.
REPORT = '\nprint("TAKEN", gossip.steps[0].steps_taken, "RADIUS", gossip.metrics()["gossip/radius"], flush=True)\n'


def apply_recipe(script: str) -> str:
    """The script after the diff of the page."""
    recipe = re.search(r"## timm.*?```diff\n(.*?)```", PAGE, re.DOTALL)[1]
    for hunk in recipe.split("\n ...\n"):
        lines = hunk.splitlines()
        removed = "\n".join(line[1:] for line in lines if line.startswith("-"))
        added = "\n".join(line[1:] for line in lines if line.startswith("+"))
        if removed:
            assert script.count(f"{removed}\n") == 1
            script = script.replace(f"{removed}\n", f"{added}\n")
        else:
            script = f"{added}\n{script}"
    return script


@pytest.mark.data
def test_the_train_script_of_timm_gossips(tmp_path):
    pytest.importorskip("timm")
    if not TIMM_SCRIPT.exists():
        pytest.skip(f"{TIMM_SCRIPT} is not here")
    image = pytest.importorskip("PIL.Image")
    for split, count in (("train", 8), ("validation", 4)):
        for label in ("black", "white"):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                color = (255 if label == "white" else 0, 16 * number, 0)
                image.new("RGB", (32, 32), color).save(folder / f"{number}.png")
    script = tmp_path / "train.py"
    text = apply_recipe(TIMM_SCRIPT.read_text(encoding="utf-8"))
    script.write_text(text.replace("    gossip = ", "    global gossip\n    gossip = ") + REPORT, encoding="utf-8")
    done = subprocess.run(
        [*torchrun(WORKERS), str(script), str(tmp_path / "data"), "--device", "cpu", "--model", "test_resnet",
         "--num-classes", "2", "--img-size", "32", "--batch-size", "2", "--epochs", "2", "--workers", "0",
         "--dist-bn", "", "--lr", "0.05", "--warmup-epochs", "0", "--output", str(tmp_path / "output"),
         "--experiment", "run"],
        capture_output=True, text=True, timeout=150, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"TAKEN (\d+) RADIUS ([\d.e-]+)", done.stdout)
    assert [int(steps) for steps, _ in found] == [8] * WORKERS  # two epochs of 16 images in batches of 2
    assert min(float(radius) for _, radius in found) > 0
    assert (tmp_path / "output" / "run" / "summary.csv").exists()
