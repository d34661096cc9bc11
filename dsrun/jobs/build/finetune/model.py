"""Which model, and what its file, its method, the preset and the reference recipe say of the options."""

from __future__ import annotations

from dsrun.errors import collected
from dsrun.jobs.build.finetune import precedence
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.jobs.spec.job import ModelSpec
from dsrun.models import peft_methods, resolve
from dsrun.options import table


def take_adapter(draft: Draft) -> None:
    """What an adapter that is trained on says of itself: method, rank, length of the prefix."""
    _take(draft, precedence.OF_ADAPTER)


def find_model(draft: Draft) -> None:
    """The model, and the defaults that its file and its method bring."""
    draft.model, defaults = resolve.resolve(draft.name, draft.options.model_path)
    draft.dataset = defaults.get("dataset")
    own = {name: value for name, value in defaults.items() if name != "dataset"}
    _take(draft, precedence.of_model(draft.model.name, own, draft.shape.parameters if draft.shape else None))


def settle_options(draft: Draft) -> None:
    """What the environment, the preset, --set and the reference recipe say of the options."""
    if _take(draft, precedence.of_strategy(draft.environ)):
        draft.preset = draft.options.preset


def _take(draft: Draft, sources: precedence.Sources) -> bool:
    """Add the layers of sources; whether none was refused."""
    resolution = table.resolve(draft.asked, sources)
    draft.asked = resolution.known
    draft.notes += resolution.notes
    draft.problems += resolution.problems
    return not resolution.problems


def check_model(draft: Draft) -> None:
    """Whether the model can be trained that way, and exported as asked."""
    export_format, peft = draft.options.export_format, draft.peft
    with collected(draft.problems):
        if draft.model:
            resolve.check_export_format(draft.model, export_format)
    draft.problems += [*peft_methods.check_export(peft, export_format), *peft_methods.check_packages(peft)]
    draft.problems += peft_methods.check_attention(peft, draft.options.attention)
    if draft.model:
        draft.problems += peft_methods.check_targets(peft, resolve.architecture(draft.model))


def positions_of(model: ModelSpec) -> int | None:
    """The longest sequence that the model was made for, in tokens; None where its config says nothing."""
    found = resolve.architecture(model).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None
