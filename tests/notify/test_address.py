"""Tests for addresses: which are accepted, and that none of their secrets is ever shown."""

from typing import Any

import pytest

from handrail import Notify
from handrail.errors import DefinitionError
from handrail.notify import Address
from handrail.notify.address import check_page, link_to


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.example/services/T0/s3cret?key=s3cret", "https://hooks.example/…"),
        ("HTTP://127.0.0.1:8080", "http://127.0.0.1:8080/…"),
        ("slack://s3cret/s3cret/s3cret", "slack://…"),
        ("mailto://ann:s3cret@example.org", "mailto://…"),
    ],
)
def test_an_address_shows_no_secret(url: str, shown: str):
    address = Address(url)
    assert (str(address), repr(address)) == (shown, f"Address({shown!r})")
    assert "s3cret" not in f"{Notify(url)!r} {Notify(url)}"
    key = b"k" * 32
    assert address.secret(key) == Address(url).secret(key) != address.secret(b"other")
    assert address.receiver(key) != address.secret(key)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example/s3cret",
        "https:///s3cret",
        "https://user:s3cret@hooks.example/",
        "https://hooks.example:99999/s3cret",
        "https://hooks.example/s3cret#part",
        "https://hooks.example/s3cret\r\nHost: other",
        "https://hooks.example/s3 cret",
        "https://höoks.example/s3cret",
        "https://[::1/s3cret",
    ],
)
def test_a_bad_address_is_refused_without_showing_it(url: str):
    with pytest.raises(DefinitionError, match=r"can't be notified.*https://HOST/PATH") as refused:
        Address(url)
    assert "s3cret" not in str(refused.value)
    with pytest.raises(DefinitionError):
        Notify(url)


@pytest.mark.parametrize(
    ("name", "value"),
    [("after", 0), ("every", -1.0), ("remind", float("nan")), ("after", "10"), ("every", None)],
)
def test_a_bad_time_is_refused(name: str, value: Any):
    with pytest.raises(DefinitionError, match=f"{name} is "):
        Notify(**{name: value})


@pytest.mark.parametrize(
    "url",
    [
        "desk.example",
        "ftp://desk.example/",
        "https://a@desk.example/",
        "https://desk.example/?a",
        "https://x/#/t/1",
    ],
)
def test_a_public_url_is_the_address_of_a_page(url: str):
    with pytest.raises(DefinitionError, match="public URL"):
        check_page(url)


def test_a_link_names_one_question_whatever_its_id_contains():
    link = link_to(check_page("https://desk.example/agents"), "run/1?2#/../x")
    assert link == "https://desk.example/agents/#/q/run%2F1%3F2%23%2F..%2Fx"
