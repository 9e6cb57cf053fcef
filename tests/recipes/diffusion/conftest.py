"""What the recipe's tests share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    """A file's tests share one cache, which is none of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
