"""Configs: complete JSON there and back, typed overrides, limits, one sentence for every mistake."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bicovg.config import Config, from_json, nearest, override, parse_value, to_json, walk_settings
from bicovg.errors import UserError
from bicovg.limits import check_settings
from bicovg.recipes import RECIPES, get_recipe

SETTINGS = {setting.path: setting for setting in walk_settings(Config())}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json_there_and_back(name: str) -> None:
    config = get_recipe(name)
    assert from_json(to_json(config)) == config
    assert hash(from_json(to_json(config))) == hash(config)  # lists came back as tuples


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**63 - 1),
            "optim.lr": st.floats(0, 10),
            "model.channels": st.lists(st.integers(1, 999), min_size=1).map(tuple),
            "model.scales": st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)).map(tuple),
            "train.clip_norm": st.none() | st.floats(1e-3, 10),
            "data.root": st.none() | st.text(),
            "model.batch_norm": st.booleans(),
        },
    )
)
def test_any_override_survives_json_and_changes_nothing_else(changes: dict[str, Any]) -> None:
    config = override(Config(), changes)
    assert from_json(to_json(config)) == config
    back = {path: SETTINGS[path].default for path in changes}
    assert override(config, back) == Config()


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("optim.lr", "1e-3", 1e-3),
        ("train.epochs", "7", 7),
        ("model.alignment", "yes", True),
        ("model.alignment", "False", False),
        ("model.channels", "32,64", (32, 64)),
        ("model.channels", "[32, 64]", (32, 64)),
        ("model.pools", "", ()),
        ("model.scales", "[[2,4],[1]]", ((2, 4), (1,))),
        ("train.clip_norm", "none", None),
        ("train.clip_norm", "1", 1.0),
        ("data.root", "null", None),
        ("data.root", "a folder", "a folder"),
    ],
)
def test_command_line_words_become_typed_values(path: str, text: str, value: Any) -> None:
    parsed = parse_value(text, SETTINGS[path].kind, path)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("optim.lr", "fast", "--optim.lr 'fast' is not a number"),
        ("train.epochs", "1.5", "--train.epochs '1.5' is not a whole number"),
        ("model.alignment", "maybe", "--model.alignment 'maybe' is not true or false"),
        ("model.channels", "32;64", "--model.channels '32;64' is not a list such as 32,64"),
        ("model.channels", "32,6.5", "model.channels"),
        ("model.scales", "1,2", "model.scales"),
        *[("model.scales", "[" * n + "]" * n, "--model.scales '[[[") for n in (900, 990, 100_000)],
        ("model.scales", "[" * 100_000, "--model.scales '[[["),
        ("model.channels", "[" + "[1]," * 100_000 + "1]", "--model.channels '[[1]"),
    ],
)
def test_words_of_the_wrong_type_are_refused_with_the_field(path: str, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_value(text, SETTINGS[path].kind, path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_an_unknown_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown field 'optim.lrr'; did you mean optim.lr\?"):
        override(Config(), {"optim.lrr": 1.0})
    assert nearest("xyzzy", ["optim.lr"]) == ""


def change_json(**changes: Any) -> str:
    tree = json.loads(to_json(Config()))
    for path, value in changes.items():
        *parents, name = path.split("__")
        node = tree
        for parent in parents:
            node = node[parent]
        if value is ...:
            del node[name]
        else:
            node[name] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "run/config.json is not valid JSON"),
        ("[" * 100_000, "run/config.json is not valid JSON"),
        ("[]", "run/config.json: the top level must be an object"),
        (change_json(optim__speed=1), "run/config.json: unknown field optim.speed"),
        (change_json(optim__lr=...), "run/config.json: field optim.lr is missing"),
        (change_json(model=3), "run/config.json: model must be an object, not 3"),
        (change_json(train__epochs="7"), "config field train.epochs has the value '7', which is not a whole number"),
        (change_json(train__epochs=True), "config field train.epochs has the value True"),
        (change_json(model__scales="DEEP").replace('"DEEP"', "[" * 950 + "]" * 950), "config field model.scales has"),
        (change_json(model__channels=[1, "2"]), "config field model.channels has the value '2'"),
    ],
)
def test_a_damaged_config_file_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_json(text, "run/config.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optim.lr", -1.0, "--optim.lr -1.0 is out of range: it must be at least 0"),
        ("optim.lr", float("nan"), "--optim.lr nan is out of range"),
        ("optim.lr", float("inf"), "--optim.lr inf is out of range"),
        ("model.dropout", 1.0, "it must be at least 0 and below 1"),
        ("model.width", 0.0, "it must be above 0"),
        ("data.augment.hue", 0.6, "it must be at least 0 and at most 0.5"),
        ("model.channels", (8, 0), "--model.channels 0 is out of range: it must be at least 1"),
        ("model.scales", ((1, 2), (0,)), "--model.scales 0 is out of range"),
        ("seed", -1, "--seed -1 is out of range"),
        ("model.scope", "strickt", "is unknown; did you mean strict?: choose strict, grouped, hgb or end-to-end"),
        ("data.image_channels", 2, "is unknown: choose 1 or 3"),
        ("train.clip_norm", 0.0, "it must be above 0"),
        ("data.resize", 10**30, "it must be at least 0 and at most 16384"),
        ("train.keep", 10**30, "is out of range"),
        ("train.threads", 1025, "it must be at least 0 and at most 1024"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_its_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_settings(override(Config(), {path: value}))
    assert message in str(caught.value)


def test_every_recipe_is_within_the_limits() -> None:
    for name in RECIPES:
        check_settings(get_recipe(name))


def test_every_setting_has_help_and_is_written_to_disk() -> None:
    tree = json.loads(to_json(Config()))
    for setting in SETTINGS.values():
        assert setting.help, setting.path
        node = tree
        for name in setting.path.split("."):
            node = node[name]


def test_config_recipes_and_command_line_import_no_torch() -> None:
    modules = ("bicovg", "bicovg.cli", "bicovg.config", "bicovg.recipes", "bicovg.limits")
    code = f"import sys, {', '.join(modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
