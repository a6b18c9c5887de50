"""Small runs of a study, by the rules in its section `smoke`, so that two CPU cores can try the whole of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.common.config import ConfigError, keys_of
from tasks.common.config_hints import hint
from tasks.common.known_tasks import base_values, config_class_of, flat_values
from tasks.studies.config import ReportConfig, SmokeConfig, SweepConfig, comparable, spelled, value_label

LABEL = "Small scale (smoke run)"
"""Titles of small runs begin with it."""


def small(sweep: SweepConfig) -> SweepConfig:
    """Return a sweep with the labels, seeds and launcher of its rules for small runs, in a folder of its own.

    Raises ConfigError if it has no such rules, or a rule for a key that its task does not have.
    """
    rules = sweep.smoke
    if rules is None:
        raise ConfigError("smoke: there are no rules for small runs. Add the section smoke, or leave --smoke out.")
    _check_keys(rules, config_class_of(sweep.task))
    grid: dict[str, Any] = {}
    for key, values in sweep.grid.items():
        if isinstance(values, list):
            grid[key] = list(_kept({value_label(key, value): value for value in values}, rules.only).values())
        else:
            grid[key] = _kept(values, rules.only)
    kept = replace(
        sweep,
        title=f"{LABEL}: {sweep.title}",
        seeds=rules.seeds,
        launch=rules.launch,
        variants=_kept(sweep.variants, rules.only),
        grid=grid,
        output_dir=_beside(sweep.output_dir),
        runs_dir=_beside(sweep.runs_dir) if sweep.runs_dir else None,
        report=ReportConfig(),
        paper={},
    )
    axes, settings = list(kept.axes()), kept.setting_names()
    names, choose = kept.labels(), sweep.report.choose
    if choose is not None:
        methods = {method: [name for name in of if name in names] for method, of in choose.methods.items()}
        choose = replace(choose, methods={method: of for method, of in methods.items() if of})
        axes = replace(kept, report=replace(sweep.report, choose=choose, baselines=[])).shown_axes()
    return replace(
        kept,
        report=replace(sweep.report, choose=choose, baselines=_present(sweep.report.baselines, axes)),
        paper={setting: values for setting, values in sweep.paper.items() if setting in settings},
    )


def shrunk(overrides: Mapping[str, Any], base: Mapping[str, Any], rules: SmokeConfig) -> dict[str, Any]:
    """Return the keys of a run with the values that the rules put in their place.

    Args:
        overrides: keys that the study sets, by dotted key.
        base: keys of the base configuration.
        rules: the rules.

    Raises:
        ConfigError: a value has no replacement.
    """
    result = dict(overrides)
    for key, values in rules.replace.items():
        if key not in overrides and key not in base:
            continue
        written = spelled(overrides.get(key, base.get(key)))
        if written not in values:
            raise ConfigError(
                f"smoke.replace.{key}: there is nothing for the value {written}, only for {', '.join(values)}. Add it."
            )
        result[key] = values[written]
    return result


def rules_in_words(rules: SmokeConfig) -> str:
    """Say what the rules change, for a report.

    >>> rules_in_words(SmokeConfig(replace={"num_train_epochs": {"200": 4}}))
    'num_train_epochs 200 -> 4'
    """
    forced = (base_values(rules.file) if rules.file else {}) | flat_values(rules.settings)
    changes = [f"{key} = {spelled(value)}" for key, value in forced.items()]
    for key, values in rules.replace.items():
        changes.append(f"{key} " + ", ".join(f"{old} -> {spelled(new)}" for old, new in values.items()))
    return "; ".join(changes)


def _check_keys(rules: SmokeConfig, config_class: type | None) -> None:
    """Raise ConfigError for a rule whose key is no value of the task; keys of other scripts are not known here."""
    if config_class is None:
        return
    values = [name for name, key in keys_of(config_class).items() if key.section is None]
    for name in rules.replace:
        if name not in values:
            raise ConfigError(f"smoke.replace: unknown key {name}. {hint(name, values)}")


def _kept(labels: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Return the wanted labels; all if none is wanted."""
    return {label: value for label, value in labels.items() if label in wanted} or dict(labels)


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}_smoke")


def _present(baselines: list[str] | dict[str, str], axes: list[list[str]]) -> list[str] | dict[str, str]:
    """Return the baselines that a small study still has something to compare with."""
    if isinstance(baselines, dict):
        return {label: baseline for label, baseline in baselines.items() if comparable(axes, label, baseline)}
    return [baseline for baseline in baselines if comparable(axes, None, baseline)]
