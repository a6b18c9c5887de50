"""Lanczos, trace, Q, A, B and gradient noise against dense algebra and scipy."""

from __future__ import annotations

import math
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dsgdac_accel import VirtualWorkers
from dsgdac_accel.curvature import (
    HessianOperator,
    Spectrum,
    consensus_errors,
    flatten,
    gradient_noise_alignment,
    hutchinson_trace,
    lanczos,
    measure_curvature,
    measure_penalty,
    set_parameters,
)

DTYPES = [torch.float32, torch.float64]


class Matrix:
    """The product with a symmetric matrix, which counts its calls."""

    def __init__(self, matrix):
        self.matrix, self.dim, self.dtype = matrix, len(matrix), matrix.dtype
        self.device = matrix.device
        self.calls = 0

    def __call__(self, v):
        self.calls += 1
        return self.matrix @ v


def diagonal(*values, dtype=torch.float32):
    return Matrix(torch.diag(torch.tensor(values, dtype=dtype)))


def with_spectrum(eigenvalues, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    vectors, _ = torch.linalg.qr(torch.randn(*[len(eigenvalues)] * 2, generator=generator, dtype=torch.float64))
    matrix = vectors @ torch.diag(torch.as_tensor(eigenvalues, dtype=torch.float64)) @ vectors.T
    return Matrix(((matrix + matrix.T) / 2).to(dtype))


# ---- Lanczos


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_ends_early_where_the_krylov_space_is_exhausted(dtype):
    hvp = diagonal(3, 3, 3, -5, dtype=dtype)
    values, _ = lanczos(hvp, iterations=30)
    assert hvp.calls < 5
    assert values[0].item() == pytest.approx(3, rel=1e-5)
    assert values[-1].item() == pytest.approx(-5, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 2.0, -1e-12])
def test_multiples_of_the_identity_take_one_product(value, dtype):
    hvp = diagonal(*[value] * 6, dtype=dtype)
    spectrum = lanczos(hvp)
    assert hvp.calls == 1
    assert spectrum.values.tolist() == pytest.approx([value])
    assert spectrum.residuals.item() <= 1e-6 * abs(value)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_all_eigenvalues_of_a_small_matrix_are_found(dtype, tolerance):
    hvp = with_spectrum([9.0, 4.0, 1.0, 0.5, -0.1, -3.0], dtype=dtype)
    expected = torch.linalg.eigvalsh(hvp.matrix.double()).flip(0)
    values, residuals = lanczos(hvp, iterations=100)
    torch.testing.assert_close(values, expected, rtol=0, atol=9 * tolerance)
    assert residuals.max() < 20 * tolerance


def test_residuals_bound_the_error_and_are_those_of_the_ritz_vectors():
    hvp = with_spectrum(torch.linspace(-1, 1, 80).pow(3).tolist())
    values, residuals = lanczos(hvp, iterations=12)
    exact = torch.linalg.eigvalsh(hvp.matrix)
    assert ((exact - values[:, None]).abs().amin(1) <= residuals * (1 + 1e-9)).all()
    # The Krylov space of 12 products by a QR decomposition; its start vector is that of the seed.
    start = torch.randn(80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    krylov = [start]
    for _ in range(11):
        basis, _ = torch.linalg.qr(torch.stack(krylov, dim=1))
        krylov.append(hvp.matrix @ basis[:, -1])
    basis, _ = torch.linalg.qr(torch.stack(krylov, dim=1))
    ritz, coefficients = torch.linalg.eigh(basis.T @ hvp.matrix @ basis)
    vectors = basis @ coefficients
    torch.testing.assert_close(values, ritz.flip(0), rtol=1e-9, atol=1e-11)
    expected = (hvp.matrix @ vectors - vectors * ritz).norm(dim=0).flip(0)
    torch.testing.assert_close(residuals, expected, rtol=1e-6, atol=1e-11)


def test_no_ghost_copies_appear_where_plain_lanczos_loses_orthogonality():
    hvp = with_spectrum([1e4, 1e3, *torch.linspace(0, 1, 98).tolist()], dtype=torch.float32)
    assert (lanczos(hvp, iterations=60).values > 999).sum() == 2


def test_residuals_are_relative_to_the_value_except_for_values_near_zero():
    def relative(value, residual):
        return Spectrum(torch.tensor([2.0, value]), torch.tensor([0.0, residual])).relative_residual(-1)

    assert relative(-0.5, 0.001) == pytest.approx(0.002)
    assert relative(1e-12, 1e-9) == pytest.approx(1e-9 / (1e-6 * 2))
    assert Spectrum(torch.zeros(1), torch.zeros(1)).relative_residual(0) == 0


def test_start_vectors_depend_on_the_seed_alone():
    hvp = with_spectrum([3.0, 2.0, 1.0, 0.0])
    first, again, other = (lanczos(hvp, 1, seed=seed).values for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("form", [torch.stack, tuple, iter])
def test_consensus_errors_may_be_rows_of_a_tensor_or_come_one_by_one(form):
    deltas = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    matrix = torch.diag(torch.tensor([4.0, 1.0, 0.0, -2.0]).double())
    dense = (deltas @ matrix * deltas).sum()
    errors = list(deltas)
    penalty = measure_penalty(form(errors), Matrix(matrix))
    assert penalty.exposure(4.0) == pytest.approx(float(dense) / 4)
    assert penalty.alignment(4.0) == pytest.approx(float(dense / 4 / deltas.square().sum()))


def test_invalid_arguments_are_refused_by_name():
    net, batches = nn.Linear(3, 2), [torch.randn(4, 3)]
    mean_square = lambda model, x: model(x).square().mean()  # noqa: E731
    for name, value in (("iterations", 2.5), ("probes", True), ("noise_batches", -1), ("seed", -1), ("seed", 2**70)):
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            measure_curvature(net, mean_square, batches, **{name: value})
    with pytest.raises(ValueError, match="iterations must be an integer >= 1; got 0"):
        lanczos(diagonal(1.0), iterations=0)
    with pytest.raises(ValueError, match="probes must be an integer >= 1; got 0"):
        hutchinson_trace(diagonal(1.0), probes=0)
    with pytest.raises(ValueError, match=r"shape \(2,\); got \(3,\)"):
        measure_penalty([torch.ones(3)], diagonal(1.0, 2.0))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="iteration 1 is not finite"):
            lanczos(diagonal(1.0, bad))


# ---- a network with thousands of parameters


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def digits_like(count, rows):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, 16, generator=generator), torch.randint(5, (rows,), generator=generator))
        for _ in range(count)
    ]


def middle_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 5)
    )


@pytest.mark.slow
def test_ends_of_the_spectrum_agree_with_scipy_on_thousands_of_parameters():
    from scipy.sparse.linalg import LinearOperator, eigsh

    net, batches = middle_net(), digits_like(2, 32)
    hvp = HessianOperator(net, classify, batches)
    assert hvp.dim > 3000
    exact = HessianOperator(net.double(), classify, [(x.double(), y) for x, y in batches])
    operator = LinearOperator((hvp.dim,) * 2, matvec=lambda v: exact(torch.from_numpy(v.ravel())).numpy(), dtype=float)
    start = numpy.random.default_rng(0).normal(size=hvp.dim)
    bottom, top = eigsh(operator, 2, which="BE", v0=start, tol=1e-6, return_eigenvectors=False)
    net.float()
    values = lanczos(hvp, iterations=80).values
    assert values[0].item() == pytest.approx(top, rel=1e-4)
    assert values[-1].item() == pytest.approx(bottom, rel=1e-3)
    thirty = lanczos(hvp, iterations=30)
    assert thirty.values[0].item() == pytest.approx(top, rel=1e-4)
    assert abs(thirty.values[-1].item() - bottom) <= thirty.residuals[-1].item() * 1.01


# ---- trace, Q, A, B


def test_the_worked_example():
    hvp = diagonal(-7, 4, 1)
    delta = torch.tensor([1.0, 1.0, 0.0])
    top = lanczos(hvp).values[0]
    assert top.item() == pytest.approx(4), "the largest, not the largest in magnitude"
    penalty = measure_penalty([delta, -delta], hvp)
    assert (penalty.value, penalty.exposure(4.0), penalty.alignment(4.0)) == (-6, -1.5, -0.375)
    assert hutchinson_trace(hvp, probes=1).value == -2
    assert hutchinson_trace(hvp, probes=3) == (-2, 0)


def probe_variance(matrix):
    """Var[u' H u] = 2 (||H||_F^2 - sum H_ii^2) for Rademacher u."""
    return 2 * (matrix.square().sum() - matrix.diagonal().square().sum())


def test_the_trace_is_unbiased_with_an_honest_standard_error():
    hvp = with_spectrum(torch.linspace(-2, 5, 40).tolist())
    exact = torch.trace(hvp.matrix).item()
    estimates = [hutchinson_trace(hvp, probes=30, seed=seed) for seed in range(60)]
    off = torch.tensor([(estimate.value - exact) / estimate.stderr for estimate in estimates])
    assert off.mean().abs() < 4 / math.sqrt(60)
    assert 0.7 < off.std() < 1.4
    assert estimates[0].stderr == pytest.approx((probe_variance(hvp.matrix) / 30).sqrt().item(), rel=0.4)
    assert math.isnan(hutchinson_trace(hvp, probes=1).stderr)


def test_undefined_figures_are_nan():
    delta = torch.tensor([1.0, 0.0])
    for hvp, top in ((diagonal(0, 0), 0.0), (diagonal(1, 1), math.nan), (diagonal(1, 1), math.inf)):
        penalty = measure_penalty([delta, -delta], hvp)
        assert math.isnan(penalty.exposure(top))
        assert math.isnan(penalty.alignment(top))
    vanished = measure_penalty([torch.zeros(2)] * 2, diagonal(1, 2))
    assert vanished.exposure(2.0) == measure_penalty([], diagonal(1, 2)).exposure(2.0) == 0
    assert math.isnan(vanished.alignment(2.0))


class Identity:
    def __init__(self, dim):
        self.dim, self.dtype, self.device = dim, torch.float32, torch.device("cpu")

    def __call__(self, v):
        return v


def test_small_terms_of_a_sum_are_not_lost():
    d = 200_000
    delta = torch.full((d,), 1e-2)
    delta[0] = 1e4
    exact = 2 * (1e8 + (d - 1) * 1e-4)
    assert measure_penalty([delta, -delta], Identity(d)).squared_norm == pytest.approx(exact, rel=1e-9)


# ---- networks


def dense(hvp):
    return torch.stack([hvp(unit) for unit in torch.eye(hvp.dim, dtype=hvp.dtype)], dim=1)


def small_case(workers=3, spread=0.05):
    """A network at the mean of its workers, in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double()
    batches = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))) for _ in range(4)]
    states = []
    for _ in range(workers):
        states.append({name: p.detach() + spread * torch.randn_like(p) for name, p in net.named_parameters()})
    deltas, mean = consensus_errors(states, net)
    set_parameters(net, mean)
    return net, batches, deltas


def test_a_report_holds_what_dense_algebra_gives():
    net, batches, deltas = small_case()
    report = measure_curvature(net, classify, batches, deltas, iterations=60, probes=200)
    hvp = HessianOperator(net, classify, batches)
    hessian, delta = dense(hvp), torch.stack(deltas)
    values = torch.linalg.eigvalsh(hessian)
    penalty = torch.trace(delta @ hessian @ delta.T)
    noise = torch.stack([hvp.batch_gradient(b) for b in range(4)])
    torch.testing.assert_close(noise.mean(0), hvp.gradient)
    noise = noise - noise.mean(0)
    quadratic = torch.trace(noise @ hessian @ noise.T)
    exact = {
        "lambda_1": values[-1],
        "lambda_min": values[0],
        "penalty": penalty,
        "Q": penalty / values[-1],
        "A": penalty / values[-1] / delta.square().sum(),
        "A_grad_raw": quadratic / 4 / values[-1],
        "A_grad": quadratic / values[-1] / noise.square().sum(),
        "batches": 4,
        "batch_size": 8,
    }
    found = report.as_dict()
    for name, value in exact.items():
        assert found.pop(name) == pytest.approx(float(value), rel=1e-8), name
    assert abs(found.pop("trace") - torch.trace(hessian)) < 4 * found["trace_stderr"]
    assert abs(found.pop("B") - torch.trace(hessian) / hvp.dim / values[-1]) < 4 * found["B_stderr"]
    stderr = probe_variance(hessian).div(200).sqrt().item()
    assert found.pop("trace_stderr") == pytest.approx(stderr, rel=0.25)
    assert found.pop("B_stderr") == pytest.approx(stderr / hvp.dim / values[-1].item(), rel=0.25)
    assert found.pop("lambda_1_residual") < 1e-8
    assert found.pop("lambda_min_residual") < 1e-8
    assert not found, "keys without a check"
    assert all(type(value) is float for value in report.as_dict().values())


def test_gradient_noise_of_some_batches_is_measured_against_the_mean_of_all():
    net, batches, _ = small_case()
    hvp = HessianOperator(net, classify, batches)
    two = gradient_noise_alignment(hvp, 2.0, max_batches=2)
    noise = [hvp.batch_gradient(b) - hvp.gradient for b in (0, 2)]
    forms = torch.stack([xi @ hvp(xi) for xi in noise]) / 2.0
    assert two.raw == pytest.approx(forms.mean().item())
    assert two.normalized == pytest.approx((forms.sum() / sum(xi @ xi for xi in noise)).item())
    assert math.isnan(gradient_noise_alignment(HessianOperator(net, classify, batches[:1]), 2.0, 1).normalized)
    x, y = batches[0]
    reordered = HessianOperator(net, classify, [(x, y), (x.flip(0), y.flip(0))])  # they differ by rounding alone
    assert gradient_noise_alignment(reordered, 2.0, 2).raw != 0
    assert math.isnan(gradient_noise_alignment(reordered, 2.0, 2).normalized)
    assert gradient_noise_alignment(hvp, 2.0, max_batches=9) == gradient_noise_alignment(hvp, 2.0, max_batches=4)
    with pytest.raises(ValueError, match="max_batches must be an integer >= 1; got 0"):
        gradient_noise_alignment(hvp, 2.0, max_batches=0)


def test_rounding_is_judged_by_worker():
    net, batches, _ = small_case()
    hvp = HessianOperator(net, classify, batches)
    rounding = 8 * torch.finfo(torch.float64).eps * hvp.point.norm()
    direction = torch.nn.functional.normalize(torch.randn(hvp.dim, dtype=torch.float64), dim=0)
    for factor, expected in ((0.9, True), (1.1, False)):
        assert measure_penalty([factor * rounding * direction] * 4, hvp).rounding is expected


def test_a_negative_top_eigenvalue_leaves_errors_positive():
    torch.manual_seed(0)
    net, batches = nn.Linear(3, 1, bias=False), [torch.randn(8, 3)]
    report = measure_curvature(net, lambda model, x: -model(x).square().sum(), batches, probes=5)
    assert report.lambda_1 < 0 < report.B
    assert report.B_stderr > 0


def test_alignment_at_rounding_level_is_nan():
    net, batches, deltas = small_case()
    for wide in (True, False):
        if not wide:
            net, batches = net.float(), [(x.float(), y) for x, y in batches]
        hvp = HessianOperator(net, classify, batches)
        unit = torch.stack(deltas).to(hvp.dtype)
        unit /= unit.norm()
        rounding = torch.finfo(hvp.dtype).eps * hvp.point.norm()
        assert math.isnan(measure_penalty(unit * rounding, hvp).alignment(1.0))
        assert math.isfinite(measure_penalty(unit * 100 * rounding, hvp).alignment(1.0))
        assert math.isfinite(measure_penalty(unit * rounding, hvp).exposure(1.0))


def test_errors_below_the_rounding_of_the_mean_are_exact():
    ulp = 2.0**-23
    errors, _ = consensus_errors([{"weight": torch.tensor([[x]])} for x in (1.0, 1.0 + ulp)], nn.Linear(1, 1, False))
    assert [error.item() for error in errors] == [-ulp / 2, ulp / 2]


def test_a_synchronous_baseline_and_parts_left_out():
    net, batches, _ = small_case()
    report = measure_curvature(net, classify, batches, probes=0, noise_batches=0)
    assert report.Q == report.penalty == 0
    for name in ("A", "B", "B_stderr", "trace", "trace_stderr", "A_grad", "A_grad_raw"):
        assert math.isnan(getattr(report, name)), name


def test_a_report_warns_of_the_largest_eigenvalue_alone():
    torch.manual_seed(0)
    net, x = nn.Linear(40, 1, bias=False), torch.randn(64, 40)
    x[:, 0] *= 10  # one eigenvalue far above a bulk that reaches to 0
    batches, options = [(x, torch.zeros(64, 1))], {"probes": 0, "noise_batches": 0}
    mean_square = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    warned = []
    for iterations in range(1, 7):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = measure_curvature(net, mean_square, batches, iterations=iterations, **options)
        warned.append(len(caught) == 1)
        assert warned[-1] == (report.lambda_1_residual > 1e-3 * report.lambda_1)
        assert all(warning.filename == __file__ for warning in caught)
    assert 0 < sum(warned) < len(warned)
    assert report.lambda_min_residual > 1e-2 * report.lambda_min


# ---- flat vectors and saved workers


def test_consensus_errors_are_deviations_from_the_mean_of_all_workers():
    nets = [nn.Linear(3, 2) for _ in range(4)]
    flats = torch.stack([flatten(net) for net in nets])
    errors, mean = consensus_errors([net.state_dict() for net in nets], nets[0])
    torch.testing.assert_close(mean, flats.mean(0))
    torch.testing.assert_close(torch.stack(errors), flats - flats.mean(0))
    set_parameters(nets[0], mean)
    assert torch.equal(flatten(nets[0]), mean)


def test_virtual_workers_are_measured_at_their_average():
    with pytest.raises(ValueError, match=r"got VirtualWorkers of 3.*`deployed_model`"):
        HessianOperator(VirtualWorkers(nn.Linear(3, 2), 3), classify, digits_like(1, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(3, 3, bias=False)
        self.outside = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.outside.weight = self.inside.weight


def test_tied_weights_are_found_under_any_of_their_names_and_counted_once():
    net = Tied()
    assert len(flatten(net)) == 9 + 6
    state = net.state_dict()
    expected = flatten(net, state)
    for left_out in ("inside.weight", "outside.weight"):
        assert torch.equal(flatten(net, {name: v for name, v in state.items() if name != left_out}), expected)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(3, 3).state_dict(), r"weight: \(3, 3\) instead of \(2, 3\)"),
        (nn.Linear(3, 2, bias=False).state_dict(), r"without bias\)"),
        (nn.Sequential(nn.Linear(3, 2)).state_dict(), r"without weight; without bias; with 0\.bias and 1 more"),
        (nn.Linear(3, 2).state_dict() | dict.fromkeys("wxyz"), "with w; with x; with y and 1 more"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(other, message):
    net = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=f"worker 1: the values are of another model .*{message}"):
        consensus_errors([net.state_dict(), other], net)


def test_vectors_of_another_shape_and_no_workers_are_refused():
    net = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"shape \(8,\) for this model; got \(7,\)"):
        set_parameters(net, torch.zeros(7))
    with pytest.raises(ValueError, match="at least one worker"):
        consensus_errors([], net)
