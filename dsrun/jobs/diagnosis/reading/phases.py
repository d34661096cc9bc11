"""What a job was doing when its ranks waited for one another in vain: tokenising, loading, saving, evaluating ...

A collective's time-out says who waited, never what the late rank was busy with. That stands in the lines before it, in
the words of whichever trainer it was, and in the frames of the rank that waited:

1. A progress bar with a description, and a line that begins with what is being done ("Saving model checkpoint to ..."),
   begin a phase; the words in them say which. An unfinished bar is one even if its words are in no list here.
2. A bar without a description belongs to the phase before it, unless its total is that of the training's bar.
3. A training's step, and the metrics of an evaluation, end a phase.
4. Where no such line stands, the functions that the waiting ranks were in tell it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsrun.host.hiding import without_secrets
from dsrun.jobs.diagnosis.progress import STEP
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine
from dsrun.jobs.diagnosis.reading.tracebacks import RaisedException

TRAINING = "training"
OTHER = "other"
"""The name of a phase whose words are in no list."""
MOST_QUOTED = 140
"""Longest quotation of the line that shows a phase, in characters."""
FULL_STATE = re.compile(
    r"(?i)\bfull_state_dict\b|gather_16bit_weights_on_model_save\W{1,4}true|StateDictType\.FULL"
)
"""Settings by which one rank gathers and writes the whole model."""

_WORDS = {
    "weight_sync": r"(?:updat|sync|synchroni[sz]|broadcast|push|transfer|reload|mov|load)\w{0,6} (?:\w{1,20} ){0,3}?"
    r"(?:weights?|params?|parameters|model) (?:\w{1,20} ){0,3}?(?:to|into|in|from|for) (?:the )?(?:vllm|sglang|rollout|"
    r"inference|generation|actor|engine)|weight[ _-]?(?:sync|update|transfer)|_move_model_to_vllm|hot.?load",
    "tokenising": r"\btokeni[sz](?:e|er|ing|ation)\b|pre-?process|\bMap\b|\bFilter\b|grouping texts|\bpacking\b"
    r"|converting (?:format|examples|dataset)|generating \w{1,20} split"
    r"|\bprepar\w{1,4} (?:the )?(?:data|\w{1,20} dataset)"
    r"|\b(?:build|creat|index)\w{1,4} (?:the )?(?:\w{1,20} ){0,3}(?:dataset|index|samples)"
    r"|format\w{1,4} (?:prompts|examples)|(?:truncating|adding eos to) \w{1,20} dataset"
    r"|extracting prompt|applying chat template",
    "saving": r"\bsav(?:e|ing|ed)\b|\bcheckpoint (?:to|into)\b|\bwriting (?:\w{1,20} ){0,3}(?:model|checkpoint|weights)"
    r"|\bconsolidat|\bupload|\bpush\w{0,4} to (?:the )?hub|\bexport(?:ing)?\b"
    r"|\bmerging (?:\w{1,20} ){0,3}(?:weights|lora)",
    "evaluating": r"\bevaluat(?:e|ing|ion)\b|\bvalidat(?:e|ing|ion)\b|\bpredict(?:ing|ion)\b|\bbenchmark",
    "generating": r"\bgenerat(?:e|ing|ion)\b|\brollouts?\b|\bsampling\b|processed prompts|\breward",
    "compiling": r"\bcompil(?:e|ing|ation)\b|\bextension module\b|\bcaptur\w{1,4} (?:\w{1,20} ){0,2}graphs?|autotun",
    "loading": r"\bload(?:ing)?\b|\bdownload(?:ing)?\b|\bfetching\b|\bmaterializ"
    r"|\bconvert\w{1,4} (?:the )?(?:checkpoint|weights)|\bresum(?:e|ing) (?:from|training)",
}  # fmt: skip
"""Phases, and the words in a bar's description or a line by which they are known; the first that fits counts."""
WORDS = {name: re.compile(rf"(?i){form}") for name, form in _WORDS.items()}
FUNCTIONS = {
    "weight_sync": r"_move_model_to_vllm|(?:sync|update|broadcast|push|transfer)_?\w{0,20}(?:weights?|params|para"
    r"meters)\w{0,20}|update_named_param|load_weights",
    "tokenising": r"main_process_first|local_main_process_first|zero_first|tokenize\w{0,20}|preprocess\w{0,20}"
    r"|_prepare_dataset|get_dataset|build_\w{0,20}dataset\w{0,20}",
    "saving": r"_?save(?:_\w{1,40}|)|\w{0,40}_state_dict|_zero3_consolidated_16bit_state_dict|export_\w{1,30}",
    "evaluating": r"evaluat\w{0,20}|evaluation_loop|prediction_(?:loop|step)|predict|_maybe_log_save_evaluate"
    r"|validat\w{0,20}|gather_for_metrics|nested_gather",
    "generating": r"generate\w{0,40}|_generate\w{0,40}|make_experience\w{0,20}|rollout\w{0,20}",
    "loading": r"from_pretrained|load_(?:checkpoint|model|state\w{0,10}|pretrained)\w{0,20}|_load_from_checkpoint",
}  # fmt: skip
"""Phases, and the names of functions that a rank which waits in them is in."""
IN_FUNCTION = {name: re.compile(rf"^(?:{form})$") for name, form in FUNCTIONS.items()}
BAR = re.compile(
    r"^(?P<what>[^|\n%]{0,100}?):?\s{0,8}(?P<percent>\d{1,3})%\s?\|[^|\n]{0,200}\|\s{0,3}(?P<at>\d{1,12})/(?P<total>\d{1,12})"
)
"""A progress bar, with its description if it has one."""
DOING = re.compile(
    r"(?i)^(?:[\w./:,\[\] -]{0,120}(?: - |\] |>> ))?[\W_]{0,12}"
    r"(?:(?:\[?rank ?\d{1,6}\]?|now|start(?:ed|ing|s)?(?: to)?|begin(?:ning|s)?(?: to)?|running|perform"
    r"(?:ing)?|doing|step \d{1,9})[:,]? ){0,2}(?:the )?(?P<what>[a-z]+(?:ing|ion|e)\b[^\n]{0,160})"
)
"""A line that begins with what is being done, behind a logger's head."""
BEGINS_TRAINING = re.compile(
    r"(?i)^\W{0,12}(?:(?:running|start(?:ed|ing)?|begin(?:ning)?) (?:the )?training|training (?:start|begin))"
)
EVALUATED = re.compile(r"['\"]?(?:eval|val|validation|test)[_/]\w{1,40}['\"]?\s?[:=]")
"""An evaluation's metrics: it has ended."""
IS_SETTING = re.compile(r"^\W{0,4}[\w.]{1,60}\s?[=:]\s?\S{1,60}$")
"""A line of a printed configuration, whose words name what is set and not what is done."""


class Phase(NamedTuple):
    """What a job was doing."""

    name: str
    """A key of WORDS, TRAINING, or OTHER."""
    line: PeeledLine
    """The last line that shows it."""
    percent: int | None = None
    """How far its bar had come."""
    function: str = ""
    """The function of a waiting rank that tells it, where no line does."""
    gathers: bool = False
    """Whether a setting has one rank gather the whole model as it saves."""


def before(line: PeeledLine, lines: Sequence[PeeledLine], raised: Iterable[RaisedException]) -> Phase | None:
    """The phase that a job was in before a line; None where nothing tells."""
    above = [other for other in lines if other.source == line.source and other.number < line.number]
    phase = _announced(above)
    if phase is None or phase.name == TRAINING:
        phase = _of_frames(raised) or phase
    gathers = (
        phase is not None and phase.name == "saving" and any(FULL_STATE.search(one.whole) for one in lines)
    )
    return phase._replace(gathers=gathers) if phase else None


def _announced(lines: Iterable[PeeledLine]) -> Phase | None:
    """The last phase that lines show, by their words."""
    phase: Phase | None = None
    training_total = ""
    for line in lines:
        text = line.text.strip()
        if not text or IS_SETTING.match(text):
            continue
        if bar := BAR.match(text):
            name = _of_words(bar["what"]) if len(bar["what"]) > 1 else ""
            percent = int(bar["percent"])
            if name:
                phase = Phase(name, line, percent)
            elif bar["what"].strip() and not STEP.search(bar["what"]) and percent < 100:
                phase = Phase(OTHER, line, percent)
            elif phase is None or phase.name == TRAINING or bar["total"] == training_total:
                training_total = bar["total"]
                phase = Phase(TRAINING, line, percent)
            else:
                phase = phase._replace(line=line, percent=percent)
        elif BEGINS_TRAINING.match(text) or EVALUATED.search(text) or STEP.search(text):
            phase = Phase(TRAINING, line)
        elif (doing := DOING.match(text)) and (name := _of_words(doing["what"])):
            phase = Phase(name, line)
    return phase


def _of_words(text: str) -> str:
    """The phase that a description speaks of; empty for none."""
    return next((name for name, words in WORDS.items() if words.search(text)), "")


def _of_frames(raised: Iterable[RaisedException]) -> Phase | None:
    """The phase by the functions that exceptions were raised in, the innermost that tells first."""
    for exception in raised:
        for frame in reversed([*exception.chain_frames, *exception.frames]):
            if name := next((name for name, form in IN_FUNCTION.items() if form.match(frame.name)), ""):
                return Phase(name, exception.line, function=frame.name)
    return None


IN_WORDS = {
    "tokenising": ("the data were prepared (tokenised)", "正在处理数据（分词）"),
    "loading": ("the model or its checkpoint was loaded", "正在加载模型或检查点"),
    "saving": ("a checkpoint or model was saved", "正在保存检查点或模型"),
    "evaluating": ("an evaluation ran", "正在评估"),
    "generating": ("answers were generated", "正在生成"),
    "weight_sync": ("weights were handed to the engine that generates", "正在把权重同步给推理引擎"),
    "compiling": ("operators were compiled", "正在编译算子"),
    TRAINING: ("the training made steps", "正在训练"),
    OTHER: ("another piece of work was going on", "正在做别的工作"),
}
"""Each phase as a clause, in English and Chinese."""
ADVICE = {
    "tokenising": (
        "Prepare the data before the job, once, and load them from disk or the cache in it; more worker processes "
        "(num_proc) shorten it.",
        "在任务之前先处理好数据，任务中直接从磁盘或缓存读取；增加处理进程数（num_proc）可缩短时间。",
    ),
    "loading": (
        "Weights on a fast local disk, and the same disk for all ranks of a host; is a rank missing that prints no "
        "bar, read its log first.",
        "把权重放在快速的本地盘；若某个进程没有进度输出，先看它的日志。",
    ),
    "saving": (
        "Let each rank write its own part (sharded checkpoints), to a disk that is fast from every host; every rank "
        "has to call the save function, not only rank 0.",
        "让每个进程各写自己的部分（分片检查点），写到各主机都快的磁盘；所有进程都要调用保存函数，而不只是 rank 0。",
    ),
    "evaluating": (
        "Every rank has to evaluate equally many batches; is only rank 0 to evaluate, the others need a longer limit. "
        "A smaller evaluation set, or eval_accumulation_steps, shortens it.",
        "各进程的评估批数必须相同；若只有 rank 0 评估，其他进程需要更长的超时。"
        "减小评估集或设置 eval_accumulation_steps 可缩短时间。",
    ),
    "generating": (
        "Ranks that generate end at different times: a bound on new tokens, synced_gpus=True under ZeRO-3, and equally "
        "many prompts a rank.",
        "各进程生成结束的时间不同：限制新 token 数；ZeRO-3 下设 synced_gpus=True；各进程的 prompt 数要相同。",
    ),
    "weight_sync": (
        "Look at the engine's own log: it died, has no memory left, or waits in another group; its group and the "
        "trainer's have to be of equal world size and backend.",
        "查看推理引擎自己的日志：它可能已退出、显存不足，或在另一个通信组中等待；"
        "双方通信组的 world size 和后端必须一致。",
    ),
    "compiling": (
        "Compile once before the job, or keep the compiled operators where all ranks find them (TORCH_EXTENSIONS_DIR).",
        "在任务之前先编译一次，或把编译结果放在所有进程都能找到的位置（TORCH_EXTENSIONS_DIR）。",
    ),
}
"""What to do, by phase, in English and Chinese."""
GATHERS = (
    "FULL_STATE_DICT (or gather_16bit_weights_on_model_save) has rank 0 collect the whole model while all others wait: "
    "SHARDED_STATE_DICT, and put the parts together afterwards.",
    "FULL_STATE_DICT（或 gather_16bit_weights_on_model_save）让 rank 0 汇集整个模型而其他进程等待："
    "改用 SHARDED_STATE_DICT，之后再合并。",
)


def in_words(phase: Phase, chinese: bool) -> str:
    """The phase in a sentence with its evidence."""
    clause = IN_WORDS[phase.name][chinese]
    percent = "" if phase.percent is None else f" ({phase.percent} %)"
    if phase.function:
        return (
            f"等待的进程停在 {phase.function}()：{clause}。"
            if chinese
            else f"The rank that waited was in {phase.function}(): {clause}."
        )
    shown = without_secrets(" ".join(phase.line.text.split()))[:MOST_QUOTED]
    if chinese:
        return f"此前{clause}{percent}：“{shown}”（第 {phase.line.number} 行）。"
    return f'Before it {clause}{percent}: "{shown}" (line {phase.line.number}).'


def advice(phase: Phase, chinese: bool) -> str:
    """What to do about a time-out in the phase; empty where the phase says nothing of it."""
    if phase.name not in ADVICE:
        return ""
    parts = [GATHERS[chinese]] if phase.gathers else []
    return " ".join([*parts, ADVICE[phase.name][chinese]])
