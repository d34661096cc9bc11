"""Write train.jsonl and dev.jsonl: attribute lists of goods, and Chinese advertising texts for them.

    python presets/datasets/advertise/make.py            # writes both files beside this script
    python presets/datasets/advertise/make.py --check    # exit status 1 if they are not current

A row is drawn in two steps: a product with three to five attributes, then a text which names every
attribute by its value. Same bytes on every run. The words stand in words.py: to add a product or a
value, add a line there (a value which PRODUCTS lists and VALUES lacks raises a KeyError).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from words import AT_PLACE, BANS, GROUPS, PATTERNS, PLACES, PRODUCTS, VALUES

HERE = Path(__file__).resolve().parent
SEED = 20240501
ROWS = {"train.jsonl": 1200, "dev.jsonl": 120}
CONTENT_CHARS = range(15, 61)
SUMMARY_CHARS = range(35, 101)
SENTENCES = range(2, 5)
TRIES_PER_CONTENT = 40

# patterns which read well directly before the product's name: 碎花连衣裙
FOLDABLE = frozenset(["碎花", "波点", "条纹", "格纹", "卡通", "麻花", "菱格", "千鸟格"])
# pairs of characters that a text may repeat; any other repetition is clumsy and the text is drawn again
REPEATABLE = frozenset(["面料", "设计", "鞋面", "包身", "图案", "风格", "版型", "材质"])


@dataclass(frozen=True)
class Product:
    name: str
    measure: str
    group: str
    attributes: dict[str, list[str]]


@dataclass(frozen=True)
class Value:
    descriptions: list[str]
    effects: list[str]


def read_products(table: str) -> list[Product]:
    products: list[Product] = []
    for line in table.strip().splitlines():
        words = line.split()
        if line.startswith(" "):
            products[-1].attributes[words[0]] = words[1:]
        else:
            name, measure, group = words
            products.append(Product(name, measure, group, {}))
    return products


def read_values(table: str) -> dict[tuple[str, str], Value]:
    values: dict[tuple[str, str], Value] = {}
    for line in table.strip().splitlines():
        keys, value, a, b, c, d = line.split()
        for key in keys.split("/"):
            values[key, value] = Value([a, b], [c, d])
    return values


def read_bans(table: str) -> set[frozenset[str]]:
    rows = [line.split() for line in table.strip().splitlines()]
    return {frozenset((first, other)) for first, *others in rows for other in others}


BANNED = read_bans(BANS)
MEANINGS = read_values(VALUES)


def draw_attributes(rng: random.Random, product: Product) -> dict[str, str]:
    """Three to five attributes whose values go together, in the order of the product's table."""
    while True:
        keys = rng.sample(list(product.attributes), rng.choice([3, 4, 4, 5]))
        chosen = {k: rng.choice(v) for k, v in product.attributes.items() if k in keys}
        values = list(chosen.values())
        if not any(frozenset((a, b)) in BANNED for i, a in enumerate(values) for b in values[:i]):
            return chosen


def folded_name(
    rng: random.Random, product: Product, attributes: dict[str, str], opener: str
) -> tuple[str, str]:
    """The product's name with one attribute before it (白色衬衫), and that attribute's key.

    Or the bare name and ''.
    """
    forms = {"颜色": "{v}{n}", "风格": "{v}风{n}", "图案": "{v}{n}"}
    keys = [
        k for k in attributes if k in forms and k != opener and (k != "图案" or attributes[k] in FOLDABLE)
        and not (k == "风格" and product.name.startswith("风"))
    ]  # fmt: skip
    if not keys or rng.random() < 0.4:
        return product.name, ""
    key = rng.choice(keys)
    return forms[key].format(v=attributes[key], n=product.name), key


def join(units: list[str]) -> str:
    """Clauses to sentences: a short clause takes the next one along, a clause with a comma stands alone."""
    text = ""
    comma_free = False  # the open sentence holds one short clause
    for unit in units:
        text += ("，" if comma_free else "。" if text else "") + unit
        comma_free = not comma_free and "，" not in unit
    return text + "。"


def draw_summary(rng: random.Random, product: Product, attributes: dict[str, str]) -> str:
    verb, material_word, endings = GROUPS[product.group]
    order = [k for k in attributes if k != "场景"]  # the text keeps the order of the attribute list
    name, folded = folded_name(rng, product, attributes, order[0])
    measure = "款" if rng.random() < 0.25 and "款" not in "".join(attributes.values()) else product.measure

    def fill(pattern: str, key: str) -> str:
        value = attributes[key]
        meaning = MEANINGS[key, value]
        return pattern.format(
            v=value, n=name, m=measure, f=material_word, w=verb, p=PLACES.get(key, ""),
            a=rng.choice(meaning.descriptions), e=rng.choice(meaning.effects),
        )  # fmt: skip

    openers, _ = PATTERNS.get(order[0], PATTERNS[""])
    units = [fill(rng.choice(openers), order[0])]
    for key in [k for k in order[1:] if k != folded] + (["场景"] if "场景" in attributes else []):
        clauses = PATTERNS.get(key, PATTERNS[""])[1] + (AT_PLACE if key in PLACES else [])
        units.append(fill(rng.choice(clauses), key))
    if "场景" not in attributes and rng.random() < 0.6:
        units.append(rng.choice(endings).format(m=product.measure))
    return join(units)


def reads_well(summary: str, product: Product, attributes: dict[str, str]) -> bool:
    if len(summary) not in SUMMARY_CHARS or summary.count("。") not in SENTENCES or summary.count("设计") > 2:
        return False
    pairs = Counter(summary[i : i + 2] for i in range(len(summary) - 1))
    given = product.name + "*" + "*".join(attributes.values())
    return not any(
        n > 1 and pair not in REPEATABLE and pair not in given and not set(pair) & set("，。的")
        for pair, n in pairs.items()
    )


def draw_rows(count: int) -> list[dict[str, str]]:
    rng = random.Random(SEED)
    products = read_products(PRODUCTS)
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    while len(rows) < count:
        product = rng.choice(products)
        attributes = draw_attributes(rng, product)
        content = "*".join(f"{k}#{v}" for k, v in [("类型", product.name), *attributes.items()])
        if content in seen or len(content) not in CONTENT_CHARS:
            continue
        for _ in range(TRIES_PER_CONTENT):
            summary = draw_summary(rng, product, attributes)
            if summary not in seen and reads_well(summary, product, attributes):
                rows.append({"content": content, "summary": summary})
                seen |= {content, summary}
                break
    return rows


def rendered() -> dict[str, bytes]:
    """File name to bytes, for both files."""
    rows = draw_rows(sum(ROWS.values()))
    files: dict[str, bytes] = {}
    for name, count in ROWS.items():
        part, rows = rows[:count], rows[count:]
        files[name] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part).encode()
    return files


def write_atomically(path: Path, data: bytes) -> None:
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write train.jsonl and dev.jsonl beside this script.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    check: bool = parser.parse_args(arguments).check
    stale = []
    for name, data in rendered().items():
        path = HERE / name
        if path.is_file() and path.read_bytes() == data:
            continue
        stale.append(name)
        if not check:
            write_atomically(path, data)
    if check and stale:
        print(f"{HERE}: not current: {', '.join(stale)}; run: python {__file__}", file=sys.stderr)
        return 1
    print(f"{HERE}: " + (f"wrote {', '.join(stale)}" if stale else "current"), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
