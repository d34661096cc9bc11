"""The choice of the model, and whether it can be trained and exported as requested."""

from __future__ import annotations

from dsrun.errors import Findings
from dsrun.jobs.assembly.finetune import precedence
from dsrun.jobs.assembly.finetune.stages import Requested, WithModel, resolved
from dsrun.models import peft_methods, resolve


def find_model(requested: Requested, findings: Findings) -> WithModel:
    """The model, and the defaults that its file and its method bring. Raises DsrunError where there is none."""
    model, defaults = resolve.resolve(requested.name, requested.options.model_path)
    known = WithModel(**vars(requested), model=model, dataset=defaults.get("dataset"))
    own = {name: value for name, value in defaults.items() if name != "dataset"}
    sources = precedence.of_model(model.name, own, known.shape.parameters if known.shape else None)
    return resolved(known, sources, findings)[0]


def begin(requested: Requested, findings: Findings) -> tuple[Requested, bool]:
    """The options with all that is said of them before the devices are known, and whether it can be taken so.

    It is a `WithModel` where the model was found.
    """
    requested, _ = resolved(requested, precedence.OF_ADAPTER, findings)
    known = findings.attempt(find_model, requested, findings)
    return resolved(known or requested, precedence.of_strategy(requested.environ), findings)


def check_model(requested: Requested, findings: Findings) -> None:
    """Whether the model can be trained that way, and exported as asked."""
    export_format, peft = requested.options.export_format, requested.peft
    if isinstance(requested, WithModel):
        findings.attempt(resolve.check_export_format, requested.model, export_format)
    findings.problems.extend(peft_methods.check_export(peft, export_format))
    findings.problems.extend(peft_methods.check_packages(peft))
    findings.problems.extend(peft_methods.check_attention(peft, requested.options.attention))
    findings.problems.extend(peft_methods.check_targets(peft, requested.architecture))
