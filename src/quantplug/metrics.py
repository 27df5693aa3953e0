"""Metrics of labelled data, by name, as functions, or as functions of a user's own file.

Before: what a model returned for all samples, and their labels. After: one number for each sample, or one for all.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quantplug.core.errors import ArtefactError, ConfigError, did_you_mean, first_line, shown
from quantplug.core.files.whole import kind_at

Score: TypeAlias = Callable[[Any, Tensor], Any]
"""Takes what the model returns for all samples and their labels; returns one number for each sample, or one for all."""


def chosen_metric(metric: str | Score) -> tuple[Score, str]:
    """Returns a metric and its name.

    Raises:
        ConfigError: there is no metric of that name.
    """
    if callable(metric):
        return metric, getattr(metric, "__name__", "metric")
    if metric not in METRICS:
        raise ConfigError(
            f"There is no metric '{metric}'{did_you_mean(str(metric), METRICS)}; choose one of {list(METRICS)}, or "
            "pass a function of outputs and labels."
        )
    return METRICS[metric], metric


def _hits(outputs: Any, labels: Tensor, count: int) -> Tensor:
    scores = outputs[0] if isinstance(outputs, tuple | list) else outputs
    if not isinstance(scores, Tensor) or scores.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
        raise ConfigError(
            f"top{count} takes scores [samples, classes] and integer labels [samples], found {_shape(scores)} and "
            f"{_shape(labels)}; pass a metric of your own."
        )
    if int(labels.min()) < 0 or int(labels.max()) >= scores.shape[1]:
        raise ConfigError(
            f"Labels go from {int(labels.min())} to {int(labels.max())}, and the model has {scores.shape[1]} classes; "
            "number the classes from 0."
        )
    best = scores.topk(min(count, scores.shape[1]), 1).indices
    return (best == labels[:, None]).any(1).double()


def _shape(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def top1(outputs: Any, labels: Tensor) -> Tensor:
    """Returns for each sample whether its label has the highest score.

    Raises:
        ConfigError: the outputs are no scores of classes, or the labels no classes.
    """
    return _hits(outputs, labels, 1)


def top5(outputs: Any, labels: Tensor) -> Tensor:
    """Returns for each sample whether its label is among the five highest scores; raises as `top1` does."""
    return _hits(outputs, labels, 5)


METRICS: dict[str, Score] = {"top1": top1, "top5": top5}


def scores_of(name: str, score: Score, outputs: Any, labels: Tensor) -> Tensor | float:
    """Returns one number for each sample, or one for all.

    Args:
        name: of the metric.
        score: the metric.
        outputs: what the model returned for all samples.
        labels: of all samples.

    Raises:
        ConfigError: the metric fails, or returns something else.
    """
    try:
        found = score(outputs, labels)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"Metric '{name}' fails ({first_line(error)}); it is called with all outputs and all labels."
        ) from error
    value = torch.as_tensor(found).detach().double() if isinstance(found, Tensor | float | int) else None
    if value is None or not bool(value.isfinite().all()) or value.numel() not in (1, len(labels)):
        raise ConfigError(
            f"Metric '{name}' returned {_text(found)} for {len(labels)} samples; let it return one finite number for "
            "each sample, or one."
        )
    return value.flatten() if value.dim() and value.numel() == len(labels) else float(value)


def _text(found: Any) -> str:
    return _shape(found) if isinstance(found, Tensor) and found.numel() > 1 else shown(repr(found))


def metric_of(text: str, *, trust: bool) -> str | Score:
    """Returns a metric by its name, or the function that "file.py:function" names.

    Args:
        text: what the command line was given.
        trust: whether a file may be run.

    Raises:
        ConfigError: there is no such metric or function.
        ArtefactError: the file is missing, may not be run, or fails.
    """
    path, separator, name = text.rpartition(":")
    if not separator and not text.endswith(".py"):
        return chosen_metric(text)[1]
    if not path.endswith(".py") or not name:
        raise ConfigError(f"'{text}' names no function of a file; write it as my_metric.py:function.")
    if kind_at(Path(path)) != "file":
        raise ArtefactError(f"There is no file '{path}' with a metric; check the path.")
    if not trust:
        raise ArtefactError(
            f"'{path}' is a program, which would run here with all your rights; pass --trust if you know it."
        )
    return _function_of(path, name)


def _function_of(path: str, name: str) -> Score:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ArtefactError(f"'{path}' fails when it is run ({first_line(error)}); mend it.") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"'{path}' has no function '{name}'{did_you_mean(name, vars(module))}; name one that it has.")
    score: Score = found
    return score
