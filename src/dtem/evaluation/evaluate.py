"""`dtem.evaluate`: a model with and without merging on the same images, for all tasks."""

import copy
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dtem import integrations, schedule
from dtem.adapters.attach import is_patched
from dtem.data import labels
from dtem.data.sources import Source
from dtem.errors import DtemError, require
from dtem.evaluation.captioning import evaluate_captioners
from dtem.evaluation.classification import evaluate_classifiers
from dtem.evaluation.evaluation_report import EvaluationReport, public_name, save_record
from dtem.evaluation.knn import NUM_NEIGHBOURS
from dtem.evaluation.segmentation import evaluate_segmenters
from dtem.evaluation.variants import REFERENCE, Adapters, RunSettings, Setup, check_methods, patched_variants
from dtem.handle import Handle
from dtem.integrations.weight_sharing import share
from dtem.models.factory import ImageSize, create_model
from dtem.models.segmenter import PRESETS
from dtem.tasks import task_of
from dtem.tasks.captioning.evaluator import MAX_NEW_TOKENS, NUM_BEAMS
from dtem.tasks.segmentation.inference import Inference
from dtem.tasks.segmentation.mask_datasets import open_pairs

DEFAULT_R = {
    "classification": "8,13,16",
    "segmentation": "20%,30%,40%,50%",
    "captioning": "4,8,10,13",
}
_TASKS_OF = {
    "batch_size": ("classification", "captioning"),
    "knn": ("classification",),
    **dict.fromkeys(("window", "stride", "short_side"), ("segmentation",)),
    **dict.fromkeys(("num_beams", "max_new_tokens", "proportional_decoder"), ("captioning",)),
}
"""Options that not every task has."""


def evaluate(
    model: str | nn.Module | Handle,
    data: str | os.PathLike[str] | Source,
    r: object = None,
    *,
    methods: str | Sequence[str] = (REFERENCE,),
    adapters: Adapters = (),
    batch_size: int | None = None,
    workers: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    limit: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    shortcut: bool = False,
    keep_listed: bool = False,
    knn: str | Source | None = None,
    num_neighbours: int = NUM_NEIGHBOURS,
    window: ImageSize | None = None,
    stride: ImageSize | None = None,
    short_side: int = 0,
    num_beams: int = NUM_BEAMS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    proportional_decoder: bool = True,
    **model_options: Any,
) -> EvaluationReport:
    """Evaluate a model without merging and with each method at each r, on the same images.

    Every image is decoded once and all variants run on it, so that they are compared image by image: differences come
    with their 95 % intervals. The task follows from the model: a Segmenter is evaluated by mean IoU, a GIT captioner by
    the COCO caption metrics, any other model by accuracy. `model` stays as it was: copies that share its weights are
    patched.

    Args:
        model: a model's name (for `create_model`), a model, or a handle: then the patched model is one of the variants,
            under the name of its method, beside the unmerged model and `methods`.
        data: labelled images: a folder with one folder per class, ``timm:…``, ``hf:…``, ``wds:…``; images with masks
            (``camvid:DIR#val``, …); captions (``captions.json#test``); or a `Source`.
        r: one schedule or a list of them (see `dtem.schedule`). Default: 8, 13, 16; for segmentation 20 % to 50 %; for
            captioning 4, 8, 10, 13.
        methods: names of methods to run beside the unmerged model.
        adapters: trained adapters: files, Hub ids or shipped names, as ``LABEL=FILE`` where there are several, or a
            mapping from label to file. An adapter takes the place of its untrained method.
        batch_size: images per forward; default 64, for captioning 16. Segmentation takes images one by one.
        workers: processes that decode images; 0: this one.
        device: ``cpu`` or ``cuda``.
        dtype: float32, or autocast to bfloat16 or float16.
        limit: this many images, drawn at random, the same every time (of a stream the first ones).
        out: folder for the outcomes of every image, one file per variant, and record.json. For segmentation, the same
            call again resumes an interrupted evaluation.
        progress: show a progress bar on stderr.
        shortcut: in the last block of a class-token model, compute the class token only.
        keep_listed: also use images whose file names an adapter lists as its training images.
        knn: labelled images; the model gives features, and is evaluated by their nearest neighbours among these.
        num_neighbours: number of neighbours for `knn`.
        window: segmentation: size of a sliding window; default: the whole image at once.
        stride: segmentation: of the window; default: the window.
        short_side: segmentation: resize images to this short side first.
        num_beams: captioning: beams of generation.
        max_new_tokens: captioning: maximum number of tokens of a caption.
        proportional_decoder: captioning: the decoder counts merged tokens by their size; False: once, as in the paper.
        model_options: what `create_model` takes (``weights``, ``img_size``, …), where `model` is a name.

    Examples:
        >>> report = dtem.evaluate("deit_tiny_patch16_224", "imagenet/val", r=[8, 16], adapters="my.safetensors")
        >>> print(report)
        >>> report.save_plot("curve.png")
    """
    check_methods(methods, dense=model in PRESETS)  # an unknown name is refused before weights are downloaded
    specs = None if r is None else schedule.parse_list(r)
    inference = Inference(short_side, _as_pair(window), _as_pair(stride))
    settings = RunSettings(batch_size, workers, device, dtype, limit, None if out is None else Path(out), progress)
    setup = build(model, data, model_options, settings, features=knn is not None)
    task = task_of(setup.model)
    if task == "answering":
        raise DtemError(f"{setup.name} answers questions, for which dtem has no metric: take the model's own benchmark")
    _check_options(
        task,
        batch_size=batch_size,
        knn=knn,
        window=window,
        stride=stride,
        short_side=short_side,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        proportional_decoder=proportional_decoder,
    )
    names = check_methods(methods, dense=task == "segmentation")
    specs = specs or schedule.parse_list(DEFAULT_R[task])
    handles, trained_on = patched_variants(setup.model, names, adapters, setup.handle, shortcut, keep_listed)
    if "learned" in specs and all(each.method.schedule() is None for each in handles.values()):
        raise DtemError(f"r = 'learned': no schedule was learned by {', '.join(handles)}; give an adapter that has one")
    setup = setup.at(specs, handles, trained_on)
    report: EvaluationReport
    if task == "segmentation":
        report = evaluate_segmenters(setup, inference)
    elif task == "captioning":
        report = evaluate_captioners(setup, num_beams, max_new_tokens, proportional_decoder)
    else:
        report = evaluate_classifiers(setup, knn, num_neighbours).report
    save_record(report, settings.out, setup.source)
    return report


def build(
    model: str | nn.Module | Handle,
    data: str | os.PathLike[str] | Source,
    model_options: dict[str, Any],
    settings: RunSettings,
    features: bool = False,
) -> Setup:
    """The model that is named, or a copy that shares the weights of `model`; if that is patched, with its handle.

    A Segmenter that is named gets as many classes as the data has. `features`: without a classifier.
    """
    source, device = data if isinstance(data, Source) else os.fspath(data), settings.device
    if isinstance(model, str):
        num_classes = model_options.get("num_classes")
        if model in PRESETS:
            require("torchmetrics", "segmentation")
            source = open_pairs(source) if isinstance(source, str) else source
            num_classes = num_classes or len(getattr(source, "classes", ())) or None
        elif features:
            num_classes = 0
        elif num_classes and model_options.get("weights") is None and model_options.get("pretrained", True):
            raise DtemError(f"num_classes = {num_classes} requires weights: published ones have their own head")
        created = create_model(model, **{**model_options, "num_classes": num_classes}).to(device)
        return Setup(created, source, settings, public_name(model))
    if model_options:
        raise DtemError(
            f"{', '.join(model_options)}: these are for a model given by name, and this one is built already"
        )
    original = model.model if isinstance(model, Handle) else model
    on_device = next(original.parameters()).device.type == device

    def own_copy() -> nn.Module:
        return share(original) if on_device else copy.deepcopy(original).to(device)

    handle = Handle(own_copy()) if is_patched(model) else None
    base = own_copy() if handle is None else Handle(share(handle.model)).unpatch()
    if features and labels.num_classes(base):
        if handle is not None or not hasattr(base, "reset_classifier"):
            raise DtemError("knn compares features: give a model without a classifier, built with num_classes=0")
        base.reset_classifier(0)  # type: ignore[operator]
    return Setup(base, source, settings, integrations.find(base).describe(base).name, handle)


def _as_pair(size: ImageSize | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _check_options(task: str, **options: object) -> None:
    """Refuse options that only another task has, unless they are the default."""
    parameters = inspect.signature(evaluate).parameters
    for name, value in options.items():
        tasks = _TASKS_OF[name]
        if task not in tasks and value != parameters[name].default:
            shown = "x".join(map(str, value)) if isinstance(value, tuple) else repr(value)
            raise DtemError(f"{name} = {shown} is for {' and '.join(tasks)}, and the model is for {task}; leave it out")
