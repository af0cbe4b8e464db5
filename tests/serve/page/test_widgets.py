"""Tests of the page's forms and renderers in a real browser, under the content security policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, time
from typing import Annotated, Any, Literal

import pytest
from playwright.sync_api import Locator, Page, expect
from pydantic import BaseModel, Field, SecretStr

from handrail.schema import Schema
from serve.page.widgets import Widgets, opened, shown
from support.browsers import browser

__all__ = ["browser", "opened", "shown"]

pytestmark = pytest.mark.once


class Address(BaseModel):
    street: str
    number: int


class Card(BaseModel):
    kind: Literal["card"]
    number: str


class Cash(BaseModel):
    kind: Literal["cash"]


class Order(BaseModel):
    item: Annotated[str, Field(min_length=3, description="What you want.", examples=["Green tea"])]
    count: Annotated[int, Field(ge=1, le=9)] = 1
    price: float
    gift: bool
    news: bool = True
    size: Literal["S", "M", "L"]
    colour: Literal["red", "green", "blue", "black", "white"]
    due: date | None = None
    clock: time
    to: Address
    back_to: Address | None = None
    tags: list[str] = Field(default_factory=list[str])
    marks: set[Literal["milk", "sugar"]] = Field(default_factory=set)
    weights: dict[str, int] = Field(default_factory=dict[str, int])
    pay: Annotated[Card | Cash, Field(discriminator="kind")]
    note: Annotated[str, Field(max_length=500)] = ""
    secret: SecretStr
    more: Any = None


@dataclass
class Tree:
    name: str
    children: list[Tree] = field(default_factory=list["Tree"])


def form(shown: Widgets, kind: Any, **props: Any) -> Schema[Any]:
    """Show the form for this type, and return the type's schema."""
    schema = Schema[Any](kind)
    shown.show("form", schema=schema.json_schema, **props)
    return schema


def sent(shown: Widgets) -> Any:
    """Press Send, and return the value that the form submits."""
    shown.page.get_by_role("button", name="Send").click()
    found = [value for name, value in shown.said() if name == "submit"]
    assert len(found) == 1, f"sent {len(found)} times: {shown.page.locator('form').inner_text()}"
    return found[0]


def group(page: Page, name: str) -> Locator:
    return page.get_by_role("group", name=name).or_(page.get_by_role("radiogroup", name=name))


def test_every_kind_of_field(shown: Widgets):
    """A form with every kind of field, filled in by label, submits a value that the type accepts."""
    schema = form(shown, Order)
    page = shown.page
    page.get_by_label("Item").fill("tea")
    page.get_by_label("Price").fill("2.50")
    group(page, "Gift").get_by_label("No").check()
    page.get_by_label("News").uncheck()
    group(page, "Size").get_by_label("M").check()
    page.get_by_label("Colour").select_option("blue")
    page.get_by_label("Due").fill("2026-05-31")
    page.get_by_label("Clock").fill("14:30")
    group(page, "To").get_by_label("Street").fill("Main")
    group(page, "To").get_by_label("Number").fill("7")
    page.get_by_role("button", name="Add to Tags").click()
    page.get_by_label("Tags 1", exact=True).fill("hot")
    page.get_by_label("sugar").check()
    page.get_by_role("button", name="Add to Weights").click()
    page.get_by_label("Weights 1: name").fill("box")
    page.get_by_label("Weights 1: value").fill("3")
    group(page, "Pay: kind").get_by_label("Card").check()
    page.get_by_role("group", name="Pay", exact=True).get_by_label("Number").fill("4711")
    page.get_by_label("Note").fill("one\ntwo")
    expect(page.get_by_label("Secret")).to_have_attribute("type", "password")
    page.get_by_label("Secret").fill("hush")
    page.get_by_label("More").fill('{"a": [1]}')
    value = sent(shown)
    assert value == {
        "item": "tea", "count": 1, "price": 2.5, "gift": False, "news": False, "size": "M", "colour": "blue",
        "due": "2026-05-31", "clock": "14:30", "to": {"street": "Main", "number": 7}, "back_to": None,
        "tags": ["hot"], "marks": ["sugar"], "weights": {"box": 3}, "pay": {"kind": "card", "number": "4711"},
        "note": "one\ntwo", "secret": "hush", "more": {"a": [1]},
    }  # fmt: skip
    schema.parse_value(value)


@pytest.mark.parametrize(
    ("kind", "fill", "value"),
    [
        (str, {"Answer": "hello"}, "hello"),
        (bool, {"No": True}, False),
        (bool | None, {}, None),
        (Literal["a", "b"], {"b": True}, "b"),
        (Literal[3, 1, 2], {"1": True}, 1),
        (Literal[1, 2, 3, 4, 5], {"Answer": "3"}, 3),
        (int | None, {}, None),
        (int | None, {"Answer optional": "-3"}, -3),
        (float, {"Answer": "1e3"}, 1000),
        (int | str, {"Text": True, "label=Text": "7"}, "7"),
        (int | str, {"label=Whole number": "7"}, 7),
        (tuple[int, str], {"Answer 1": "1", "Answer 2": "x"}, [1, "x"]),
        (set[Literal["x", "y"]], {"y": True}, ["y"]),
        (Annotated[list[int], Field(min_length=2)], {"Answer 1": "1", "Answer 2": "2"}, [1, 2]),
        (Any, {"Answer": '"text"'}, "text"),
        (Cash, {}, {"kind": "cash"}),
    ],
)
def test_answers_that_are_not_objects(shown: Widgets, kind: Any, fill: dict[str, Any], value: Any):
    """A form can ask for a single value, such as a number, a choice or a list, or for an object without fields to fill in."""
    schema = form(shown, kind)
    for label, text in fill.items():
        if text is True:
            shown.page.get_by_label(label, exact=True).first.check()
            continue
        found = shown.page.get_by_label(label.removeprefix("label="), exact=True).and_(
            shown.page.locator("input:not([type=radio]), textarea, select")
        )
        if found.evaluate("one => one.tagName") == "SELECT":
            found.select_option(text)
        else:
            found.fill(text)
    assert sent(shown) == value
    schema.parse_value(value)


def test_an_optional_object_is_added_and_removed(shown: Widgets):
    """Once an optional object is added, its fields are required. After it is removed, its value is null."""

    class Parcel(BaseModel):
        back_to: Address | None = None

    form(shown, Parcel)
    page = shown.page
    page.get_by_role("button", name="Add Back to").click()
    page.get_by_label("Street").fill("Main")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Number")).to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Remove Back to").click()
    assert sent(shown) == {"back_to": None}


def test_a_recursive_type_is_opened_at_need(shown: Widgets):
    """The form for a recursive type starts without children. An added child has the same fields."""
    schema = form(shown, Tree)
    page = shown.page
    page.get_by_label("Name", exact=True).fill("root")
    page.get_by_role("button", name="Add to Children").click()
    page.get_by_label("Name", exact=True).nth(1).fill("leaf")
    value = sent(shown)
    assert value == {"name": "root", "children": [{"name": "leaf"}]}
    schema.parse_value(value)


def test_errors_stand_beside_their_fields(shown: Widgets):
    """Invalid values are reported beside their fields and to screen readers, and the first one gets the focus."""
    form(shown, Order)
    page = shown.page
    page.get_by_label("Item").fill("te")
    page.get_by_label("Count").fill("10")
    page.get_by_label("Price").fill("cheap")
    page.get_by_label("Price").press("Enter")
    assert shown.said("submit") == []
    item = page.get_by_label("Item")
    expect(item).to_be_focused()
    expect(item).to_have_attribute("aria-invalid", "true")
    expect(item).to_have_accessible_description("What you want. At least 3 characters, this has 2")
    expect(page.get_by_label("Count")).to_have_accessible_description("From 1 to 9. At most 9")
    expect(page.get_by_label("Price")).to_have_value("cheap")
    expect(page.get_by_label("Price")).to_have_accessible_description("A number, such as 2.5")
    expect(group(page, "Gift")).to_have_accessible_description("A value is required")
    expect(page.get_by_role("alert")).to_contain_text("fields need to be corrected")
    item.fill("tea")
    expect(item).not_to_have_attribute("aria-invalid", "true")


def test_errors_wait_until_a_field_is_left(shown: Widgets):
    """No error is shown while a person types, or for a field that has not been visited yet."""
    form(shown, Order)
    item = shown.page.get_by_label("Item")
    item.press_sequentially("te")
    expect(item).not_to_have_attribute("aria-invalid", "true")
    item.press("Tab")
    expect(item).to_have_attribute("aria-invalid", "true")
    expect(shown.page.get_by_label("Price")).not_to_have_attribute("aria-invalid", "true")


def test_what_the_server_says_stands_there_too(shown: Widgets):
    """An error from the server is shown beside its field until the field is edited, or at the top of the form if it has no field."""
    form(shown, Address, value={"street": "Main", "number": 7})
    page = shown.page
    errors = [
        {"path": "/street", "message": "there is no such street"},
        {"path": "/number", "message": "nobody lives there"},
        {"path": "/country/code", "message": "it is missing"},
        {"path": "", "message": "ask somebody else"},
    ]
    shown.update(errors=errors)
    street = page.get_by_label("Street")
    expect(street).to_be_focused()
    expect(street).to_have_accessible_description("There is no such street")
    expect(page.get_by_role("alert")).to_contain_text("country, code: it is missing")
    expect(page.locator("form")).to_contain_text("sk somebody else")
    street.fill("Broad")
    expect(street).not_to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("Number")).to_have_accessible_description("Nobody lives there")
    assert sent(shown) == {"street": "Broad", "number": 7}


def test_several_of_a_choice_are_ticked(shown: Widgets):
    """A list of a few values has a checkbox for each, and is sent in the order of the choice. Nothing has to be ticked."""
    schema = form(shown, list[Literal["milk", "sugar", "lemon"]])
    boxes = shown.page.get_by_role("checkbox")
    expect(boxes).to_have_count(3)
    expect(shown.page.get_by_role("button", name="Add")).to_have_count(0)
    boxes.last.check()
    boxes.first.check()
    value = sent(shown)
    assert value == ["milk", "lemon"]
    schema.parse_value(value)


def test_a_list_that_has_a_value_twice_is_no_list_of_boxes(shown: Widgets):
    form(shown, list[Literal["milk", "sugar"]], value=["milk", "milk"])
    expect(shown.page.get_by_role("checkbox")).to_have_count(0)
    assert sent(shown) == ["milk", "milk"]


def test_entries_move_with_what_is_typed_in_them(shown: Widgets):
    """Entries of a list can be moved, removed and added with the keyboard. They keep their text, and the focus stays in the list."""
    form(shown, list[float], value=[1, 2, 3])
    page = shown.page
    page.get_by_label("Answer 1", exact=True).fill("1.50")
    page.get_by_role("button", name="Move down Answer 1").press("Enter")
    expect(page.get_by_label("Answer 2", exact=True)).to_have_value("1.50")
    expect(page.get_by_role("button", name="Move down Answer 2")).to_be_focused()
    page.get_by_role("button", name="Remove Answer 1").press("Enter")
    expect(page.get_by_role("button", name="Remove Answer 1")).to_be_focused()
    expect(page.get_by_label("Answer 1", exact=True)).to_have_value("1.50")
    page.get_by_role("button", name="Add to Answer").press("Enter")
    expect(page.get_by_label("Answer 3", exact=True)).to_be_focused()
    page.keyboard.type("4")
    assert sent(shown) == [1.5, 3, 4]


def test_names_of_a_mapping_are_there_once(shown: Widgets):
    """A mapping with a missing or repeated name can't be sent, and nothing that was typed is lost."""
    form(shown, dict[str, int], value={"a": 1})
    page = shown.page
    page.get_by_role("button", name="Add to Answer").click()
    page.get_by_label("Answer 2: value").fill("2")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Answer 2: name")).to_have_accessible_description("A name is required")
    page.get_by_label("Answer 2: name").fill("a")
    expect(page.get_by_label("Answer 2: name")).to_have_accessible_description("This name occurs twice")
    assert shown.said("submit") == []
    page.get_by_label("Answer 2: name").fill("b")
    assert sent(shown) == {"a": 1, "b": 2}


def test_what_has_no_fields_is_asked_for_as_json(shown: Widgets):
    """A value for which there are no fields is entered as JSON, and invalid JSON is refused."""
    shown.show("form", schema={"type": "object", "properties": {"odd": {"not": {}}}, "required": ["odd"]})
    odd = shown.page.get_by_label("Odd")
    odd.fill("{half")
    shown.page.get_by_role("button", name="Send").click()
    expect(odd).to_have_attribute("aria-invalid", "true")
    expect(shown.page.locator("form")).to_contain_text("This is not valid JSON")
    odd.fill("[1, null]")
    assert sent(shown) == {"odd": [1, None]}


def test_a_draft_begins_where_it_was_left(shown: Widgets):
    """The last value passed to `onChange` restores the form, even a number field with text that is not a number."""
    form(shown, Order)
    shown.page.get_by_label("Item").fill("tea")
    shown.page.get_by_label("Price").fill("2.")
    shown.page.get_by_label("Count").fill("x")
    draft = shown.said("change")[-1]
    form(shown, Order, value=draft)
    expect(shown.page.get_by_label("Item")).to_have_value("tea")
    expect(shown.page.get_by_label("Price")).to_have_value("2")
    expect(shown.page.get_by_label("Count")).to_have_value("x")


def test_numbers_step_and_are_never_rounded(shown: Widgets):
    """The arrow keys step to the next multiple, and not below the minimum. An integer that JavaScript would round is refused."""
    form(shown, Annotated[int, Field(ge=0, multiple_of=5)])
    answer = shown.page.get_by_role("spinbutton", name="Answer")
    answer.press("ArrowDown")
    expect(answer).to_have_value("0")
    answer.press("ArrowUp")
    answer.press("ArrowUp")
    expect(answer).to_have_value("10")
    answer.fill("12345678901234567890")
    shown.page.get_by_role("button", name="Send").click()
    expect(answer).to_have_accessible_description("At least 0. A whole number of at most 15 digits")
    answer.fill("15")
    assert sent(shown) == 15


def test_a_moment_says_where_it_is_meant(shown: Widgets):
    """A date-time answer has a UTC offset, unless the person chooses no time zone."""
    shown.show("form", schema={"type": "string", "format": "date-time"})
    shown.page.get_by_label("Answer", exact=True).and_(shown.page.locator("input")).fill("2026-05-31T14:30")
    assert shown.said("change")[-1] == "2026-05-31T14:30:00+00:00"
    shown.page.get_by_label("Answer: time zone").select_option("")
    assert sent(shown) == "2026-05-31T14:30:00"


def question(name: str) -> dict[str, Any]:
    return {
        "id": "q",
        "name": name,
        "schema": Schema(Address).json_schema,
        "payload": {"words": "Which one?"},
    }


def test_a_registered_renderer_shows_its_kind(shown: Widgets):
    """A registered renderer gets the question, and can submit an answer or decline."""
    shown.show("question", question=question("colour"), errors=[])
    expect(shown.page.get_by_text("Which one?")).to_be_visible()
    shown.page.get_by_role("button", name="Red").click()
    shown.page.get_by_role("button", name="None").click()
    assert shown.said() == [["submit", {"colour": "red"}], ["decline", "none of these"]]


def test_a_renderer_that_fails_leaves_a_form(shown: Widgets):
    """If a renderer fails, a message says so, and the question can be answered in a form."""
    shown.expected.append("no such paint")
    shown.show("question", question=question("broken"), errors=[])
    expect(shown.page.get_by_role("status")).to_contain_text("no such paint")
    shown.page.get_by_label("Street").fill("Main")
    shown.page.get_by_label("Number").fill("7")
    assert sent(shown) == {"street": "Main", "number": 7}


def test_declining_with_a_reason(shown: Widgets):
    """The Decline button opens a field for a reason. Escape closes it, and Enter declines without submitting."""
    shown.show("question", question=question("unknown"), errors=[])
    page = shown.page
    page.get_by_role("button", name="Decline…").click()
    expect(page.get_by_label("Reason (optional)")).to_be_focused()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Decline…").click()
    page.keyboard.type("none of your business")
    page.keyboard.press("Enter")
    assert shown.said("decline") == ["none of your business"]
    assert shown.said("submit") == []


def test_no_form_is_wider_than_a_phone(shown: Widgets):
    """At a width of 390 pixels, the form does not make the page scroll sideways."""
    shown.page.set_viewport_size({"width": 390, "height": 800})
    form(shown, Order, value={"tags": ["a"], "weights": {"a": 1}, "back_to": {"street": "a" * 200}})
    assert shown.overflow() == 0
