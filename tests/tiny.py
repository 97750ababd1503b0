"""Another name of tests.oracles.tiny, until every test imports that."""

from tests.oracles.tiny import *  # noqa: F403
