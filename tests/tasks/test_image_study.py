"""The configurations of the small study: runs of one seed are pairs, whatever the algorithm and number of processes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import LoggerType

from dsgdac_accel import GossipConfig
from tasks.common import algorithms
from tasks.common.config import ConfigError, parse_config
from tasks.images.config import CifarConfig
from tasks.images.models import build_image_model
from tasks.images.run import ImageRun
from tests.launching import records
from tests.workers import run_workers

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALGORITHMS = ("sgd", "sam", "dsgd_ac", "dadam")

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


def study(name="digits_study", **changes):
    return replace(parse_config(CifarConfig, ["--config", str(CONFIGS / f"{name}.yaml")]), **changes)


def starting_points(rank, folder):
    """What a run begins with, by algorithm, and by one of them with another seed."""
    settings = [{"algorithm": algorithm, "seed": 3} for algorithm in ALGORITHMS] + [{"seed": 4}]
    found = []
    for number, changes in enumerate(settings):
        run = ImageRun(study(**changes, output_dir=Path(folder) / str(number)))
        model = run.accelerator.unwrap_model(run.model)
        order = torch.stack([batch["labels"] for _ in range(2) for batch in run.loader])
        found.append(
            {
                "training": (run.data.train_images, run.data.train_labels),
                "test": (run.data.test_images, run.data.test_labels),
                "order": (order,),
                "weights": tuple(parameter.detach().clone() for parameter in model.parameters()),
            }
        )
    return found


def same(first, second):
    return all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


def test_a_seed_gives_all_algorithms_the_same_split_noise_weights_and_order(tmp_path):
    ((*runs, of_another_seed),) = run_workers(starting_points, 1, str(tmp_path))
    reference = runs[0]
    assert [len(reference["training"][0]), len(reference["test"][0])] == [1000, 797]
    for run in runs[1:]:
        assert [same(run[what], reference[what]) for what in reference] == [True] * 4
    assert [same(of_another_seed[what], reference[what]) for what in reference] == [False] * 4


def train_in_turn(rank, folder, algorithms):
    """Optimizers and gammas at the end of short runs of a Transformer, whose losses are in their folders."""
    found = {}
    for algorithm in algorithms:
        config = study(
            "digits_transformer", algorithm=algorithm, learning_rate=0.01, num_train_epochs=3, warmup_epochs=1
        )
        data, gossip = replace(config.data, train_limit=300), replace(config.gossip, start_epoch=1)
        config = replace(config, data=data, gossip=gossip, eval_every=3)
        run = ImageRun(replace(config, logging_steps=1, sam_rho=0.5, output_dir=Path(folder) / algorithm))
        run.output.write_summary = lambda summary: None  # and no plots, which take longer than the rest
        run.train()
        optimizer = run.optimizer.optimizer
        found[algorithm] = type(optimizer), optimizer.defaults, [step.gamma for step in run.accelerator.gossip_steps]
    return found


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory):
    """By number of processes: the folder of the runs, and what they ended with."""
    wanted = {1: ("sgd", "sam", "adam"), 2: ("sam", "adam", "dadam", "dadam_ac")}
    folders = {count: tmp_path_factory.mktemp(f"by_{count}") for count in wanted}
    return {
        count: (folders[count], run_workers(train_in_turn, count, str(folders[count]), algorithms)[0])
        for count, algorithms in wanted.items()
    }


@pytest.mark.parametrize("algorithm", ["sam", "adam"])
def test_synchronous_algorithms_train_alike_on_any_number_of_processes(short_runs, algorithm):
    alone, shared = (records(folder / algorithm, "train/loss") for folder, _ in short_runs.values())
    assert len(alone) == 3 * 2
    assert shared == pytest.approx(alone, rel=1e-4)


def test_sam_takes_other_steps_than_sgd_from_the_same_start(short_runs):
    folder, _ = short_runs[1]
    of_sgd, of_sam = (records(folder / algorithm, "train/loss") for algorithm in ("sgd", "sam"))
    assert of_sam[1] == of_sgd[1]
    assert of_sam[6] != pytest.approx(of_sgd[6], rel=1e-4)


def test_adam_has_its_settings_and_gossips_with_the_gamma_of_its_algorithm(short_runs):
    config = study("digits_transformer")
    _, ended = short_runs[2]
    for algorithm in ("adam", "dadam", "dadam_ac"):
        kind, defaults, _ = ended[algorithm]
        assert kind is torch.optim.Adam
        assert (defaults["betas"], defaults["eps"]) == (config.betas, config.adam_epsilon)
        assert (defaults["weight_decay"], defaults["decoupled_weight_decay"]) == (0, False)
    assert ended["sam"][0] is torch.optim.SGD
    assert [ended[algorithm][2] for algorithm in ("adam", "dadam")] == [[], [1.0]]
    assert 0 < ended["dadam_ac"][2][0] < 0.2  # the last rate of the cosine is about a third, and squared


def optimizer_of(rank, folder):
    run = ImageRun(study("digits_transformer", weight_decay=0.5, decoupled_weight_decay=True, output_dir=Path(folder)))
    return run.optimizer.optimizer.__class__, run.optimizer.param_groups[0]["weight_decay"]


def test_decoupled_weight_decay_is_that_of_adamw(tmp_path):
    assert run_workers(optimizer_of, 1, str(tmp_path)) == [(torch.optim.AdamW, 0.5)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--betas", "[0.9, 1.0]"], "betas must be two numbers in"),
        (["--adam_epsilon", "0"], "adam_epsilon must be a finite number > 0"),
        (["--momentum", "1"], "momentum must be in .0, 1., below 1; got 1.0"),
        (["--seed", "4294967296"], "seed must be an integer from 0 to 4294967295; got 4294967296"),
        (["--learning_rate", "1e300"], "learning_rate must be a number > 0 and <= 3.4e.38; got 1e.300"),
        (["--weight_decay", "1e39"], "weight_decay must be"),
        (["--eval_batch_size", "1e20"], "eval_batch_size must be an integer from 1 to 9223372036854775807"),
        (["--data.test_limit", "0"], "test_limit must be an integer >= 1"),
        (["--data.resampling", "nearest"], "'bilinear', 'box'"),
        (["--algorithm", "asam"], "'sam'"),
    ],
)
def test_nonsense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(CifarConfig, settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gossip": GossipConfig(total_steps=2)}, "gossip.total_steps: the run has 3 steps, .*; got 2. Leave it out"),
        ({"log_with": ["tensorboard", "clearml"]}, "report_to: clearml is not installed here; there are tensorboard"),
    ],
)
def test_what_a_run_cannot_have_is_refused_before_it_begins(settings, message, monkeypatch):
    monkeypatch.setattr(algorithms, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    with pytest.raises(ValueError, match=message):
        algorithms.make_accelerator("dsgd_ac", settings.pop("gossip", GossipConfig()), total_steps=3, **settings)


def test_the_study_has_eight_workers_of_sixteen_images_and_the_paper_s_schedule():
    for name in ("digits_study", "cifar10_small", "digits_transformer"):
        config = study(name)
        assert config.global_batch_size == 8 * 16
        assert config.data.draw_by_seed
        assert (config.num_train_epochs, config.warmup_epochs, config.gossip.start_epoch) == (60, 3, 3)
        assert config.gossip.topology == "one_peer_ring"
        assert (config.crop_padding, config.flip, config.report_to) == (0, False, ())


def evaluate_in_bf16(rank, folder, algorithm):
    """The logged test loss of a run in bf16, that of its model in float32, and that under autocast."""
    changes = {"mixed_precision": "bf16", "calibrate": False, "gossip": GossipConfig(workers_per_process=2)}
    run = ImageRun(study(algorithm=algorithm, **changes, output_dir=Path(folder) / algorithm))
    run.evaluate(done=False, measure_curvature=False)
    with run.accelerator.deployed_model(run.model) as deployed, torch.no_grad():
        plain = build_image_model(run.config.model, run.data.num_classes, 1, run.data.image_size).eval()
        plain.load_state_dict(run.accelerator.unwrap_model(deployed).state_dict())
        inputs = run.inputs.plain(run.data.test_images)
        exact, rounded = (float(F.cross_entropy(m(inputs), run.data.test_labels)) for m in (plain, deployed))
    return records(Path(folder) / algorithm, "test/loss")[0], exact, rounded


@pytest.mark.parametrize("algorithm", ["sgd", "dsgd"])
def test_a_run_in_mixed_precision_is_evaluated_in_float32(tmp_path, algorithm):
    ((logged, exact, rounded),) = run_workers(evaluate_in_bf16, 1, str(tmp_path), algorithm)
    assert logged == pytest.approx(exact, rel=1e-6)
    assert logged != pytest.approx(rounded, rel=1e-6)


def decayed_parameters(rank, folder, no_decay):
    changes = {"no_decay": no_decay, "gossip": GossipConfig(workers_per_process=2)}
    run = ImageRun(study(**changes, output_dir=Path(folder)))
    groups = run.optimizer.param_groups
    return {(group["weight_decay"], parameter.ndim > 1) for group in groups for parameter in group["params"]}, sum(
        len(group["params"]) for group in groups
    )


@pytest.mark.parametrize(("no_decay", "of_biases_and_norms"), [(False, 5e-4), (True, 0.0)])
def test_biases_and_norms_are_left_out_of_weight_decay_on_request(tmp_path, no_decay, of_biases_and_norms):
    ((found, count),) = run_workers(decayed_parameters, 1, str(tmp_path), no_decay)
    assert found == {(5e-4, True), (of_biases_and_norms, False)}
    assert count == 2 * len(list(build_image_model("mlp", 10, 1, (8, 8)).parameters()))
