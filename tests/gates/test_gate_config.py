"""The configuration stays small, and its page is the one that is generated."""

from pathlib import Path

from opengyre.core.config import Config, decode_config
from opengyre.run.config_page import keys, page

ROOT = Path(__file__).parents[2]


def test_the_configuration_has_at_most_80_keys():
    assert len(keys()) <= 80


def test_every_key_says_what_it_means():
    assert [f"{key.section}.{key.name}" for key in keys() if not key.meaning] == []


def test_every_key_has_a_default():
    assert decode_config({}) == Config()


def test_the_page_is_the_generated_one():
    assert (ROOT / "docs/config.md").read_text() == page(), "make docs writes docs/config.md again"
